"""Random schedules: whoever comes and goes, a finished sequence is bitwise what it is alone, undrafted and uncached.

Arrivals, cancels, lengths, samplers, drafters, K of every step, memory for few: hypothesis chooses all of it. What a
scheduler, a cache or a batch could get wrong is also done wrong on purpose, and must be seen.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, count
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backend.drafters.mtp import mtp_drafter
from backend.drafters.prediction import PredictionDrafter
from backend.drafters.protocol import Drafter
from backend.engine.cache import DeltaNetSlots, PageTable, PromptState
from backend.engine.loop import Loop
from backend.engine.memory import Memory
from backend.engine.prefix import PrefixCache
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence
from backend.interface import Step
from tests import factory
from tests.decoding import Job, Outcome, Request, ScriptedDrafter, make_loop, run
from tests.factory import Shape

SHAPE = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), k_heads=1, v_heads=2, seed=7)
MOST_TURNS = 3000
STREAMS = [tuple(random.Random(seed).choices(range(SHAPE.vocab), k=600)) for seed in range(6)]


@lru_cache
def runner_of(dtype: torch.dtype) -> Runner:
    torch.set_num_threads(1)
    runner = Runner(factory.build(SHAPE).to(dtype))
    with torch.inference_mode():
        assert probe(runner).lawful
    return runner


@dataclass(frozen=True)
class Arrival:
    """A request that comes `gap` turns after the one before it and may be cancelled so many turns later."""

    gap: int
    request: Request
    drafter: str
    salt: str
    last_turn: int
    mispredicted: int | None  # the client predicts the answer, but for the token at this index
    patience: int | None


@dataclass(frozen=True)
class Schedule:
    """What memory there is, the draft lengths in turn, and who comes. `snapshots`: how many; None: no prefix cache."""

    pages: int
    sequences: int
    snapshots: int | None
    lengths: tuple[int, ...]
    arrivals: tuple[Arrival, ...]


@dataclass
class InTurn:
    """A draft length for every step, one after the other."""

    lengths: Ids[int]
    steps: int = 0

    def choose(self, batch: int) -> int:
        self.steps += 1
        return self.lengths[self.steps % len(self.lengths)]

    def observe(self, batch: int, k: int, seconds: float | None, steps: Ids[Step]) -> None:
        pass


@dataclass
class Company:
    """Plays schedules on one model; `seen` counts what happened in them, `alone` remembers answers."""

    runner: Runner
    seen: Counter[str] = field(default_factory=Counter)
    alone: dict[Request, Outcome] = field(default_factory=dict)

    def answer(self, request: Request) -> Outcome:
        if request not in self.alone:
            positions = len(request.prompt) + request.max_tokens
            (self.alone[request],) = run(make_loop(self.runner, 0, positions=positions), [(request, None)])
        return self.alone[request]

    @torch.inference_mode()
    def play(self, schedule: Schedule) -> None:
        """Assert that every answer is the one its request gets alone, and that everything is given back."""
        answers = {arrival.request.prompt: self.answer(arrival.request).tokens for arrival in schedule.arrivals}
        drafters: dict[str, Drafter] = {
            "mtp": mtp_drafter(self.runner.model, "block"),
            "prediction": PredictionDrafter(),
            "scripted": ScriptedDrafter(answers, 0.7, SHAPE.vocab),
        }
        loop = make_loop(
            self.runner,
            InTurn(schedule.lengths),
            list(drafters.values()),
            sequences=schedule.sequences,
            pages=schedule.pages,
            prefix=schedule.snapshots is not None,
        )
        if schedule.snapshots is not None:
            budget = schedule.snapshots * loop.scheduler.memory.slots.new_prompt_state().bytes
            loop.scheduler.prefix = PrefixCache(loop.scheduler.memory, budget)
        jobs = self._drive(loop, schedule, drafters)
        for arrival, job in zip(schedule.arrivals, jobs, strict=True):
            self._check(job.outcome, self.answer(arrival.request))
        self.seen["preemptions"] += loop.scheduler.preemptions
        if loop.scheduler.prefix is not None:
            self.seen["cached tokens"] += loop.scheduler.prefix.hits
            loop.scheduler.prefix.clear()
        assert not loop.scheduler.decoding
        assert loop.scheduler.memory.table.free == schedule.pages
        assert loop.scheduler.usage == 0

    def play_all(self, schedules: Ids[Schedule]) -> None:
        for schedule in schedules:
            self.play(schedule)

    def _drive(self, loop: Loop, schedule: Schedule, drafters: dict[str, Drafter]) -> list[Job]:
        due = list(accumulate(arrival.gap for arrival in schedule.arrivals))
        jobs: list[Job] = []
        for turn in count():
            for arrival in schedule.arrivals[len(jobs) : bisect_right(due, turn)]:
                jobs.append(self._job(loop, arrival, drafters.get(arrival.drafter)))
                loop.add(jobs[-1].sequence)
            for arrival, came, job in zip(schedule.arrivals, due, jobs, strict=False):
                if arrival.patience == turn - came and not job.sequence.finish:
                    job.sequence.cancelled = True
                    self.seen[f"cancelled while {_phase(job)}"] += 1
            self._turn(loop, [job.sequence for job in jobs])
            if len(jobs) == len(due) and not loop.busy:
                break
            assert turn < MOST_TURNS, "somebody never ends"
        return jobs

    def _turn(self, loop: Loop, arrived: list[Sequence]) -> None:
        scheduler = loop.scheduler
        oldest = scheduler.running[0] if scheduler.running else None
        loop.turn()
        present = [*scheduler.running, *scheduler.waiting]
        assert present == [sequence for sequence in arrived if not sequence.finish], "not in order of arrival"
        assert oldest is None or oldest.finish or scheduler.running[0] is oldest, "the oldest had to make room"
        assert [s.place and s.place.slot for s in scheduler.decoding] == list(range(len(scheduler.decoding)))
        self.seen["together"] = max(self.seen["together"], len(scheduler.decoding))

    def _job(self, loop: Loop, arrival: Arrival, drafter: Drafter | None) -> Job:
        predicted = list(self.answer(arrival.request).tokens) if arrival.mispredicted is not None else []
        if predicted:
            at = (arrival.mispredicted or 0) % len(predicted)
            predicted[at] = (predicted[at] + 1) % SHAPE.vocab
        return Job(loop, arrival.request, drafter, arrival.salt, predicted, arrival.last_turn)

    def _check(self, outcome: Outcome, plain: Outcome) -> None:
        self.seen[str(outcome.finish)] += 1
        self.seen["accepted drafts"] += sum(step.accepted for step in outcome.steps)
        if outcome.finish != "cancelled":
            assert outcome.seen == plain.seen
            return
        told = len(outcome.tokens)
        assert outcome.tokens == plain.tokens[:told]
        assert outcome.logprobs == plain.logprobs[:told]
        assert outcome.text == "".join(chr(0x100 + token) for token in outcome.tokens)


def _phase(job: Job) -> str:
    if job.sequence.place is None:
        return "waiting again" if job.sequence.tokens else "waiting"
    return "decoding" if job.sequence.decoding else "in the prompt"


Kind = Literal["crowd", "party", "street"]  # soon in need of pages; short and many together; anybody


def some_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.6, 1.0, 1.5]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 5, 20]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        seed=rng.randrange(4),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([(), (), ((3, 2.5), (9, -100.0))]),
        bad_words=rng.choice([(), (), ((4,), (8, 15))]),
        min_tokens=rng.choice([0, 0, 10]),
    )


def some_request(rng: random.Random, kind: Kind) -> Request:
    """Prompts that share beginnings, about the grid's lines as well as any others."""
    borders = (63, 64, 65, 128, 129, 192, 495, 504, 511, 512, 513, 576)
    anywhere = rng.choice([rng.randint(1, 300), rng.choice(borders)])
    length = {"crowd": rng.randint(485, 503), "party": rng.randint(1, 70), "street": anywhere}[kind]
    shared = min(rng.choice([0, 64, 130, 450, 512, length]), length)
    return Request(
        prompt=(*STREAMS[rng.randrange(2)][:shared], *STREAMS[rng.randrange(2, 6)][shared:length]),
        params=some_params(rng),
        max_tokens=rng.choice([1, 2, 9, 40, 60] if kind == "street" else [40, 60]),
        eos=rng.choice([frozenset(), frozenset(), frozenset({5}), frozenset({1, 2, 3})]),
        stops=rng.choice([(), (), (chr(0x107) + chr(0x109), chr(0x10B))]),
    )


def some_arrival(rng: random.Random, kind: Kind) -> Arrival:
    return Arrival(
        gap=rng.choice([0, 0, 0, 1, 2, 30] if kind == "street" else [0, 0, 1, 7]),
        request=some_request(rng, kind),
        drafter=rng.choice(["none", "mtp", "mtp", "prediction", "scripted"]),
        salt=rng.choice(["", "", "", "another"]),
        last_turn=rng.choice([0, 64, 100, 300]),
        mispredicted=rng.choice([None, None, rng.randrange(40)]),
        patience=rng.choice([None, None, None, rng.randrange(60)]),
    )


def some_schedule(rng: random.Random, arrivals: int) -> Schedule:
    kind: Kind = rng.choice(["crowd", "crowd", "party", "street"])
    return Schedule(
        pages=rng.choice({"crowd": [2, 3, 4, 5], "party": [6, 12], "street": [2, 4, 12]}[kind]),
        sequences=rng.randint(1, 6),
        snapshots=rng.choice([None, 0, 1, 2, 3, 100, 100]),
        lengths=tuple(rng.choices(range(9), k=rng.randint(1, 5))),
        arrivals=tuple(some_arrival(rng, kind) for _ in range(arrivals)),
    )


schedules = st.builds(some_schedule, st.randoms(use_true_random=True), st.integers(2, 8))


def play_schedules(company: Company, examples: int) -> None:

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking would take minutes; the seed that failed is told and can be played again
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules)
    def play(schedule: Schedule) -> None:
        company.play(schedule)

    play()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
def test_company_cancels_drafts_and_short_memory_change_no_bit(dtype: torch.dtype) -> None:
    company = Company(runner_of(dtype))
    play_schedules(company, 15)
    happened = {name for name, times in company.seen.items() if times}
    assert happened >= {"stop", "length", "accepted drafts"}, company.seen
    assert company.seen["together"] > 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@DTYPES
def test_company_cancels_drafts_and_short_memory_change_no_bit_in_hundreds_of_schedules(dtype: torch.dtype) -> None:
    company = Company(runner_of(dtype))
    play_schedules(company, 200)
    phases = ("waiting", "in the prompt", "decoding")
    assert all(company.seen[f"cancelled while {phase}"] for phase in phases), company.seen
    assert company.seen["together"] > 4
    assert company.seen["preemptions"] > 20


@pytest.mark.parametrize("undrafted", range(26, 44))
def test_drafting_may_begin_after_any_number_of_steps_without(undrafted: int) -> None:
    requests = [Request(STREAMS[i][:70], SamplingParams(temperature=0), 60 + i) for i in range(2)]
    arrivals = tuple(Arrival(9 * i, request, "mtp", "", 0, None, None) for i, request in enumerate(requests))
    lengths = (*(0 for _ in range(undrafted)), 3, 1, 8)
    Company(runner_of(torch.float32)).play(Schedule(4, 2, None, lengths, arrivals))


@lru_cache
def hard_company() -> tuple[Company, list[Schedule]]:
    """A few schedules in which all that can happen happens, and what each request gets alone."""
    company = Company(runner_of(torch.float32))
    hard = [crowd(0, salt_of=lambda i: ""), crowd(1, salt_of=lambda i: str(i % 2))]
    company.play_all(hard)
    return company, hard


def crowd(seed: int, salt_of: Callable[[int], str]) -> Schedule:
    """Eight at once on pages for half of them, all of one beginning, most of them soon in need of a second page."""
    rng = random.Random(seed)
    arrivals = []
    for i in range(8):
        length, shared = rng.randint(485, 503) if i % 4 else rng.randint(140, 200), rng.choice([128, 450])
        request = replace(
            some_request(rng, "crowd"),
            prompt=(*STREAMS[0][: min(shared, length)], *STREAMS[2 + i % 4][min(shared, length) : length]),
            max_tokens=30,
            eos=frozenset(),
        )
        arrivals.append(Arrival(i, request, ("scripted", "mtp", "none")[i % 3], salt_of(i), 128, None, None))
    return Schedule(pages=4, sequences=6, snapshots=100, lengths=(3, 0, 8, 1), arrivals=tuple(arrivals))


def test_the_crowd_is_hard_enough() -> None:
    seen = hard_company()[0].seen
    assert seen["preemptions"] > 2, seen
    assert seen["cached tokens"] > 500, seen
    assert seen["together"] > 2, seen


def moved_without_bases(slots: DeltaNetSlots, source: int, target: int) -> None:
    for tensor in slots._tensors:
        tensor[:, target] = tensor[:, source]


def joined_without_columns(slots: DeltaNetSlots, slot: int, prompt: PromptState) -> None:
    for tensor in slots._tensors:
        tensor[:, slot] = 0
    slots.S[:, slot] = prompt.S
    slots.bases[slot] = 0


def released_from_all(table: PageTable, pages: Ids[int]) -> None:
    for page in pages:
        if table._holders[page]:
            table._holders[page] = 0
            table._free.append(page)


def preempted_to_the_end_of_the_queue(scheduler: Scheduler, sequence: Sequence) -> None:
    preempt(scheduler, sequence)
    scheduler.waiting.rotate(-1)


def begun_as_if_all_were_in_memory(scheduler: Scheduler, sequence: Sequence) -> bool:
    begun = begin(scheduler, sequence)
    sequence.replayed = max(len(sequence.tokens) - 1, 0)
    return begun


preempt, begin = Scheduler._preempt, Scheduler._begin
MUTANTS: dict[str, tuple[object, str, object]] = {
    "who moves to another slot leaves its state behind": (DeltaNetSlots, "move", lambda *_: None),
    "who moves to another slot forgets its base": (DeltaNetSlots, "move", moved_without_bases),
    "who begins to decode forgets the convolution's inputs": (DeltaNetSlots, "join", joined_without_columns),
    "snapshots share their state with the running": (PromptState, "copy", lambda state: state),
    "a shared page's rest is not copied": (Memory, "copy", lambda *_: None),
    "pages are free when their first holder leaves": (PageTable, "release", released_from_all),
    "the preempted go to the end of the queue": (Scheduler, "_preempt", preempted_to_the_end_of_the_queue),
    "the preempted do not run their tokens again": (Scheduler, "_begin", begun_as_if_all_were_in_memory),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    company, hard = hard_company()
    monkeypatch.setattr(*MUTANTS[name])
    # An accident deep inside is as telling as a wrong answer, unless it is the mutant that does not work.
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)):
        company.play_all(hard)
