"""Who runs: order of arrival, memory as the limit, the youngest make room, and all is given back however one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Ids
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from backend.answer import _timings
from backend.drafters.mtp import mtp_drafter
from backend.engine.cache import PAGE, DeltaNetSlots
from backend.engine.loop import Loop
from backend.engine.memory import page_bytes
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence
from backend.engine.speculation import Speculation
from backend.interface import ChatRequest, InvalidRequest, SamplingRequest, Step
from backend.loading import GIB, LocalOptions
from backend.local import LocalBackend
from backend.models.config import ModelConfig
from backend.ops.delta_replay import MAX_ROWS
from tests import checkpoints, factory
from tests.decoding import Job, Outcome, Request, make_loop, run
from tests.factory import Shape

SHAPE = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), k_heads=1, v_heads=2, seed=6)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def runner() -> Runner:
    torch.set_num_threads(1)
    runner = Runner(factory.build(SHAPE))
    with torch.inference_mode():
        assert probe(runner).lawful
    return runner


@pytest.fixture
def loop(runner: Runner) -> Callable[..., Loop]:
    def build(pages: int, sequences: int, prefix: bool = False) -> Loop:
        return make_loop(runner, 2, pages=pages, sequences=sequences, prefix=prefix)

    return build


def request(length: int, count: int = 5, first: int = 1) -> Request:
    return Request(tuple((first + 7 * i + i * i // 5) % SHAPE.vocab for i in range(length)), GREEDY, count)


def add(loop: Loop, *requests: Request) -> list[Sequence]:
    sequences = [Job(loop, request, None).sequence for request in requests]
    for sequence in sequences:
        loop.add(sequence)
    return sequences


@torch.inference_mode()
def turns(loop: Loop, until: Callable[[], object], most: int = 2000) -> int:
    """Turn until it holds; how often."""
    for turn in range(most):
        if until():
            return turn
        loop.turn()
    pytest.fail(f"not within {most} turns")


def assert_all_is_given_back(loop: Loop) -> None:
    scheduler = loop.scheduler
    assert not loop.busy
    assert not scheduler.decoding
    if scheduler.prefix is not None:
        scheduler.prefix.clear()
    assert (scheduler.memory.table.free, scheduler.usage) == (scheduler.memory.table.total, 0)


def test_first_come_first_served(loop: Callable[..., Loop]) -> None:
    house = loop(pages=20, sequences=2)
    sequences = add(house, *(request(30 * (1 + i % 3), first=i) for i in range(7)))
    turns(house, lambda: not house.busy)
    begun = [sequence.first_token_at or 0.0 for sequence in sequences]
    assert begun == sorted(begun)
    assert all(sequence.finish == "length" for sequence in sequences)


def test_as_many_run_as_there_are_slots_and_pages_for(loop: Callable[..., Loop]) -> None:
    for pages, sequences, running in ((20, 3, 3), (3, 5, 3), (2, 5, 2)):
        house = loop(pages=pages, sequences=sequences)
        add(house, *(request(100, count=30, first=i) for i in range(6)))
        turns(house, lambda house=house, running=running: len(house.scheduler.decoding) == running)
        assert len(house.scheduler.running) == running
        assert len(house.scheduler.waiting) == 6 - running
        assert house.scheduler.usage == running / pages
        turns(house, lambda house=house: not house.busy)
        assert house.scheduler.preemptions == 0
        assert_all_is_given_back(house)


def test_a_long_one_is_let_in_among_short_ones_that_never_cease(loop: Callable[..., Loop]) -> None:
    house = loop(pages=4, sequences=4)
    add(house, *(request(100, count=40, first=i) for i in range(4)))
    turns(house, lambda: len(house.scheduler.decoding) == 4)
    (long,) = add(house, request(1100, count=40))  # three of the four pages
    shorts: list[Sequence] = []

    def busy_street() -> bool:
        while len(house.scheduler.waiting) < 5:
            shorts.extend(add(house, request(100, count=9, first=len(shorts))))
        return long.finish is not None

    assert turns(house, busy_street) < 40 + 40 + 1100 // 64 + 10
    assert any(short.finish for short in shorts)
    turns(house, lambda: not house.busy)
    assert_all_is_given_back(house)


def test_the_youngest_make_room_and_lose_only_time(loop: Callable[..., Loop], runner: Runner) -> None:
    wanted = [request(480 + i, count=60, first=i) for i in range(3)]
    alone = [run(make_loop(runner, 2, positions=600), [(one, None)])[0] for one in wanted]
    house = loop(pages=4, sequences=3)
    jobs = [Job(house, one, None) for one in wanted]
    for job in jobs:
        house.add(job.sequence)
    oldest = jobs[0].sequence

    def watched() -> bool:
        assert oldest.finish or oldest in house.scheduler.running or not oldest.prefilled
        return not house.busy

    turns(house, watched)
    assert house.scheduler.preemptions >= 1
    assert [job.outcome for job in jobs] == alone
    ends = [job.sequence.finished_at or 0.0 for job in jobs]
    assert ends == sorted(ends)
    assert_all_is_given_back(house)


def test_the_longest_sequence_that_is_promised_does_run(loop: Callable[..., Loop]) -> None:
    for pages in (1, 2, 3):
        house = loop(pages=pages, sequences=2, prefix=True)
        longest = house.scheduler.longest
        assert longest == pages * PAGE - MAX_ROWS
        for prompt in (longest - 40, longest - 1):
            first, second = add(house, *(request(prompt, count=longest - prompt, first=i) for i in (3, 3)))
            turns(house, lambda house=house: not house.busy)
            assert (first.finish, second.finish) == ("length", "length")
            assert first.length == longest
        assert house.scheduler.preemptions == 0 or pages > 1
        assert_all_is_given_back(house)


def test_one_prompt_chunk_a_turn_and_every_stream_goes_on(loop: Callable[..., Loop]) -> None:
    house = loop(pages=10, sequences=3)
    streams = add(house, request(20, count=80), request(25, count=80, first=2))
    turns(house, lambda: len(house.scheduler.decoding) == 2)
    (long,) = add(house, request(1000, count=3))
    for chunk in range(1, 1000 // 64 + 1):
        before = [len(stream.tokens) for stream in streams]
        turns(house, lambda chunk=chunk: long.prefilled == 64 * chunk, most=2)
        assert all(len(stream.tokens) > n for stream, n in zip(streams, before, strict=True))


STAGES: dict[str, Callable[[Sequence], bool]] = {
    "waiting": lambda sequence: sequence.place is None and not sequence.prefilled,
    "in its prompt": lambda sequence: 0 < sequence.prefilled < len(sequence.prompt),
    "decoding": lambda sequence: sequence.decoding and len(sequence.tokens) > 3,
    "waiting again": lambda sequence: sequence.place is None and bool(sequence.tokens),
    "run again": lambda sequence: sequence.decoding and 0 < sequence.replayed < len(sequence.tokens) - 1,
}


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_who_is_cancelled_gives_everything_back(loop: Callable[..., Loop], stage: str, prefix: bool) -> None:
    house = loop(pages=3, sequences=2, prefix=prefix)
    add(house, request(486, count=1, first=9))
    turns(house, lambda: not house.busy)
    older, younger = add(house, request(470, count=100), request(486, count=100, first=9))
    turns(house, lambda: STAGES[stage](younger))
    younger.cancelled = True
    turns(house, lambda: younger.finish, most=2)
    assert younger.finish == "cancelled"
    assert younger.place is None
    assert _timings(younger).prompt_n >= 0
    assert younger not in [*house.scheduler.running, *house.scheduler.waiting, *house.scheduler.decoding]
    turns(house, lambda: not house.busy)
    assert older.finish == "length"
    assert_all_is_given_back(house)


def test_a_fault_in_a_prompt_is_its_own_and_gives_everything_back(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = loop(pages=6, sequences=3, prefix=True)
    prefill = Runner.prefill_chunk

    def fail_at_the_second(runner: Runner, memory: object, place: object, chunk: object, start: int) -> object:
        if start == 64:
            raise RuntimeError("out of luck")
        return prefill(runner, memory, place, chunk, start)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "prefill_chunk", fail_at_the_second)
    good, bad, also_good = add(house, request(60), request(120, first=4), request(50, first=5))
    turns(house, lambda: not house.busy)
    assert (good.finish, bad.finish, also_good.finish) == ("length", "error", "length")
    assert_all_is_given_back(house)


def test_drafts_after_preemption_are_those_of_an_undisturbed_sequence(runner: Runner) -> None:
    """What a drafter knew is made again with the rest: even the steps are the same."""
    wanted = [Request(request(488 + i, first=i).prompt, SamplingParams(temperature=2.0, seed=i), 50) for i in range(3)]

    def outcomes(pages: int, sequences: int) -> tuple[list[Outcome], Scheduler]:
        drafter = mtp_drafter(runner.model, "block")
        house = make_loop(runner, 3, [drafter], pages=pages, sequences=sequences)
        return run(house, [(one, drafter) for one in wanted]), house.scheduler

    disturbed, crowded = outcomes(pages=3, sequences=3)
    undisturbed, _ = outcomes(pages=6, sequences=1)
    assert crowded.preemptions > 0
    assert disturbed == undisturbed
    assert sum(step.accepted for outcome in disturbed for step in outcome.steps) > 20


class Clock:
    """Two drafts a step; keeps what it is told of their time."""

    def __init__(self, log: list[object]) -> None:
        self._log = log

    def choose(self, batch: int) -> int:
        return 2

    def observe(self, batch: int, k: int, seconds: float | None, steps: Ids[Step]) -> None:
        self._log.append(seconds)


def test_a_step_that_runs_known_tokens_again_tells_nothing_of_the_time_of_drafts(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[object] = []
    replay = Speculation._replay

    def logged(speculation: Speculation, sequence: Sequence, rows: int, hidden: Tensor) -> None:
        log.append("again")
        replay(speculation, sequence, rows, hidden)

    monkeypatch.setattr(Speculation, "_replay", logged)
    house = make_loop(runner, Clock(log), pages=3, sequences=3)
    add(house, *(request(480 + i, count=60, first=i) for i in range(3)))
    turns(house, lambda: not house.busy)
    after = [told for before, told in pairwise(log) if before == "again" and told != "again"]
    assert after
    assert set(after) == {None}
    assert any(isinstance(told, float) for told in log)


@pytest.fixture(scope="module")
def short_of_memory() -> LocalOptions:
    """Memory for two pages, of a model that could hold many more."""
    directory = checkpoints.random_endless().directory
    config = ModelConfig.from_directory(directory)
    state = DeltaNetSlots(config, 1, torch.device("cpu"), torch.bfloat16).slot_bytes
    memory = 2 * state + 2.5 * page_bytes(
        config, torch.bfloat16, blocks=[(config.num_key_value_heads, config.head_dim)]
    )
    return LocalOptions(str(directory), threads=1, max_num_seqs=2, prefix_cache=False, kv_memory=memory / GIB)


@pytest.mark.parametrize(("words", "count"), [(5000, 1), (10, 5000)])
def test_what_can_never_fit_is_refused_at_once(short_of_memory: LocalOptions, words: int, count: int) -> None:
    async def ask() -> tuple[InvalidRequest, int]:
        backend = LocalBackend(short_of_memory)
        await backend.start()
        try:
            limit = backend.info().max_model_len
            wanted = ChatRequest("a", [{"role": "user", "content": "word " * words}], SamplingRequest(max_tokens=count))
            with pytest.raises(InvalidRequest) as refused:
                await anext(backend.chat(wanted))
            small = ChatRequest("b", [{"role": "user", "content": "Hi"}], SamplingRequest(max_tokens=3))
            async for event in backend.chat(small):
                last = event
            assert last.result is not None
            assert last.result.finish_reason == "length"
            return refused.value, limit
        finally:
            await backend.close()

    refused, limit = asyncio.run(ask())
    assert refused.code == "context_length_exceeded"
    assert f"{limit} tokens" in str(refused)
    assert limit == 2 * PAGE - MAX_ROWS
