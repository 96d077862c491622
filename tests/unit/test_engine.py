"""The engine thread: who runs when, how a sequence ends, what is counted, and that a step's rows commit exactly."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import backend.engine.statistics as statistics_module
from backend.engine.cache import SequenceCache
from backend.engine.engine import Engine
from backend.engine.forms import GRID
from backend.engine.probe import probe
from backend.engine.runner import Rows, Runner
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.sequence import Emission, Sequence
from backend.engine.speculation import Speculation
from backend.engine.statistics import SpeculationCounts
from backend.interface import BackendError, BackendUnavailable, Step
from backend.text.answer import AnswerText
from tests import factory
from tests.decoding import Outcome, Request, ScriptedDrafter, decode
from tests.factory import Shape

SHAPE = Shape(layers=("linear", "full", "linear"), mtp=False)
SECONDS = 30


def make_runner(dtype: torch.dtype = torch.float32) -> Runner:
    runner = Runner(factory.build(SHAPE).to(dtype))
    with torch.inference_mode():
        assert probe(runner).lawful
    return runner


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner()


@dataclass
class Client:
    """Owner of one sequence; keeps what it was told and when, in the order all clients were told."""

    id: str
    prompt: tuple[int, ...] = (1, 2, 3)
    max_tokens: int = 8
    seed: int = 0
    stops: tuple[str, ...] = ()
    log: list[str] = field(default_factory=list)
    react: Callable[[Client], Any] = lambda client: None
    emissions: list[Emission] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.sequence = Sequence(
            id=self.id,
            prompt=self.prompt,
            sampler=Sampler(SamplingParams(seed=self.seed), SHAPE.vocab),
            max_tokens=self.max_tokens,
            eos_ids=frozenset(),
            text=AnswerText(lambda token: chr(0x100 + token).encode(), self.stops),
            alternatives=0,
            on_emission=self.hear,
        )

    def hear(self, emission: Emission) -> None:
        self.emissions.append(emission)
        self.log.append(f"{self.id}{'.' if emission.finish else ''}")
        self.react(self)
        if emission.finish:
            self.ended.set()

    def wait(self) -> Emission:
        assert self.ended.wait(SECONDS), f"{self.id} was never told its end"
        return self.emissions[-1]

    @property
    def request(self) -> Request:
        return Request(self.prompt, SamplingParams(seed=self.seed), self.max_tokens, stops=self.stops)

    @property
    def outcome(self) -> tuple[Any, ...]:
        emitted = [token for emission in self.emissions for token in emission.tokens]
        assert [token.token_id for token in emitted] == self.sequence.tokens
        return (
            tuple(self.sequence.tokens),
            tuple(self.sequence.logprobs),
            "".join(emission.text for emission in self.emissions),
            self.sequence.finish,
        )


class Stage:
    """Engines whose first turn waits until every client has submitted, so that the order of events is exact."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.engines: list[Engine] = []

    def run(self, speculation: Speculation, *clients: Client, max_sequences: int = 16) -> Engine:
        def load() -> Speculation:
            assert self.gate.wait(SECONDS)
            return speculation

        engine = Engine(load, max_sequences=max_sequences, draft_slots=speculation.draft_tokens)
        self.engines.append(engine)
        log: list[str] = []
        for client in clients:
            client.log = log
            engine.submit(client.sequence)
        self.gate.set()
        engine.start()
        return engine


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.gate.set()
    for engine in stage.engines:
        engine.close()


def plain(runner: Runner) -> Speculation:
    return Speculation(runner, None, 0)


# -- who runs when -------------------------------------------------------------------------------------------------


def test_running_sequences_progress_by_turns(runner: Runner, stage: Stage) -> None:
    a, b, c = (Client(name, max_tokens=4, seed=i) for i, name in enumerate("abc"))
    stage.run(plain(runner), a, b, c)
    for client in (a, b, c):
        client.wait()
    # One prefill chunk a turn, before the others' decode steps.
    assert a.log == ["a", "b", "a", "c", "a", "b", "a.", "b", "c", "b.", "c", "c."]


def test_a_long_prompt_does_not_hold_up_running_sequences(runner: Runner, stage: Stage) -> None:
    a, b = Client("a", max_tokens=7), Client("b", prompt=(5,) * (3 * GRID + 1), max_tokens=2)
    stage.run(plain(runner), a, b)
    a.wait()
    b.wait()
    assert a.log == ["a", "a", "a", "a", "b", "a", "a", "b.", "a."]


def test_sequences_are_admitted_in_order_and_no_more_than_allowed(runner: Runner, stage: Stage) -> None:
    lengths = (6, 3, 5, 2, 4)
    clients = [Client(name, max_tokens=n) for name, n in zip("abcde", lengths, strict=True)]
    running: list[int] = []
    engine: list[Engine] = []
    for client in clients:
        client.react = lambda _: running.append(engine[0].load()[0]) if engine else None
    engine.append(stage.run(plain(runner), *clients, max_sequences=2))
    for client in clients:
        client.wait()
    admitted = [client.sequence.admitted_at for client in clients]
    assert admitted == sorted(admitted)
    assert max(running, default=2) <= 2
    first_heard = [clients[0].log.index(name) for name in "abcde"]
    assert first_heard == sorted(first_heard)
    for later, client in enumerate(clients[2:], start=2):
        before = clients[0].log[: clients[0].log.index(client.id)]
        assert sum(entry.endswith(".") for entry in before) >= later - 1


def test_every_sequence_decodes_as_if_it_were_alone(runner: Runner, stage: Stage) -> None:
    clients = [Client(str(i), tuple(range(1, 2 + 37 * i)), max_tokens=12, seed=i) for i in range(5)]
    stage.run(plain(runner), *clients, max_sequences=3)
    for client in clients:
        client.wait()
    alone = decode(runner, None, 0, [client.request for client in clients])
    assert [client.outcome for client in clients] == [outcome.seen for outcome in alone]


# -- how it ends from outside --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_sequences", "told"),
    [((1, 2), 1, 0), ((1,) * (10 * GRID), 2, 0), ((1, 2), 2, 2)],
    ids=["waiting", "in-prefill", "decoding"],
)
def test_a_cancelled_sequence_ends_within_one_step(
    runner: Runner, stage: Stage, prompt: tuple[int, ...], max_sequences: int, told: int
) -> None:
    a = Client("a", max_tokens=8, react=lambda c: len(c.emissions) == 3 and stage.engines[0].cancel("b"))
    b = Client("b", prompt=prompt, max_tokens=1000)
    stage.run(plain(runner), a, b, max_sequences=max_sequences)
    assert a.wait().finish == "length"
    end = b.wait()
    assert (end.finish, end.tokens, end.error) == ("cancelled", (), None)
    assert len(b.sequence.tokens) == told
    assert b.sequence.in_prefill == (told == 0)
    third, fourth = [i for i, entry in enumerate(a.log) if entry == "a"][2:4]
    assert third < a.log.index("b.") < fourth
    assert b.sequence.cache is None
    assert a.outcome == decode(runner, None, 0, [a.request])[0].seen


def test_a_sequence_that_cancels_itself_gets_no_further_token(runner: Runner, stage: Stage) -> None:
    a = Client("a", max_tokens=1000, react=lambda client: len(client.emissions) == 5 and stage.engines[0].cancel("a"))
    stage.run(plain(runner), a)
    assert a.wait().finish == "cancelled"
    assert len(a.sequence.tokens) == 5


def test_a_cancelled_sequence_is_given_the_text_held_back(runner: Runner, stage: Stage) -> None:
    tokens = decode(runner, None, 0, [Client("a").request])[0].tokens
    stop = "".join(chr(0x100 + token) for token in tokens[2:4]) + "never"
    a = Client("a", stops=(stop,), react=lambda c: len(c.emissions) == 4 and stage.engines[0].cancel("a"))
    stage.run(plain(runner), a)
    assert a.wait().finish == "cancelled"
    assert a.emissions[2].text == a.emissions[3].text == ""
    assert a.outcome[2] == "".join(chr(0x100 + token) for token in tokens[:4])


def test_cancelling_the_unknown_and_the_finished_does_nothing(runner: Runner, stage: Stage) -> None:
    a, b = Client("a"), Client("b")
    engine = stage.run(plain(runner), a)
    a.wait()
    engine.cancel("a")
    engine.cancel("never heard of")
    engine.submit(b.sequence)
    assert b.wait().finish == "length"
    assert [emission.finish for emission in a.emissions if emission.finish] == ["length"]


def test_closing_cancels_the_running_and_the_waiting(runner: Runner, stage: Stage) -> None:
    started = threading.Event()
    clients = [Client(name, max_tokens=100_000, react=lambda _: started.set()) for name in "abc"]
    engine = stage.run(plain(runner), *clients, max_sequences=1)
    assert started.wait(SECONDS)
    assert engine.alive
    engine.close()
    assert [client.emissions[-1].finish for client in clients] == ["cancelled"] * 3
    assert not engine.alive
    assert engine.load() == (0, 0, 0)
    with pytest.raises(BackendUnavailable, match="shutting down"):
        engine.submit(Client("late").sequence)
    engine.close()


def test_an_engine_that_was_never_started_closes(runner: Runner) -> None:
    Engine(lambda: plain(runner), max_sequences=1, draft_slots=0).close()


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [(BackendError("no such model"), "no such model"), (MemoryError("19 GB"), "loading failed: 19 GB")],
)
def test_what_stops_loading_is_told_at_the_start_and_to_those_waiting(
    stage: Stage, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Speculation:
        raise error

    engine = Engine(load, max_sequences=1, draft_slots=0)
    early = Client("early")
    engine.submit(early.sequence)
    with pytest.raises(BackendError) as caught:
        engine.start()
    assert str(caught.value) == said
    assert early.wait() == Emission("", (), "error", said)
    assert not engine.alive
    with pytest.raises(BackendUnavailable, match=said):
        engine.submit(Client("late").sequence)
    engine.close()
    assert bool(caplog.records) == isinstance(error, MemoryError)  # a traceback for us where it is not the user's doing


@pytest.mark.parametrize("during", ["prefill", "decode"])
def test_a_fault_in_one_sequence_ends_that_one_alone(
    runner: Runner, stage: Stage, during: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Speculation):
        def prefill(self, sequence: Sequence) -> None:
            self.trip(sequence, "prefill")
            super().prefill(sequence)

        def decode(self, sequence: Sequence) -> None:
            self.trip(sequence, "decode")
            super().decode(sequence)

        def trip(self, sequence: Sequence, step: str) -> None:
            if sequence.id == "bad" and step == during and len(sequence.tokens) == (3 if step == "decode" else 0):
                raise ZeroDivisionError("by design")

    good, bad, other = (Client(name, max_tokens=8, seed=i) for i, name in enumerate(("good", "bad", "other")))
    engine = stage.run(Faulty(runner, None, 0), good, bad, other)
    end = bad.wait()
    assert (end.finish, end.error) == ("error", "ZeroDivisionError: by design")
    assert len(bad.sequence.tokens) == (3 if during == "decode" else 0)
    assert bad.sequence.cache is None
    for client in (good, other):
        client.wait()
        assert client.outcome == decode(runner, None, 0, [client.request])[0].seen
    assert engine.alive
    assert "by design" in caplog.text
    again = Client("again")
    engine.submit(again.sequence)
    assert again.wait().finish == "length"


@pytest.mark.parametrize("hit_rate", [0.0, 1.0])
@pytest.mark.parametrize("draft_tokens", [1, 3, 4])
@pytest.mark.parametrize("fault", range(1, 9))
def test_logits_that_are_no_numbers_end_it_at_the_same_token_for_any_draft_length(
    runner: Runner, stage: Stage, fault: int, draft_tokens: int, hit_rate: float
) -> None:
    class Overflowing(Runner):
        def verify(self, cache: SequenceCache, tokens: Any, start: int) -> Rows:
            rows = super().verify(cache, tokens, start)
            bad = len(Client("a").prompt) + fault - 1 - start  # the row that chooses token number `fault`
            if 0 <= bad < len(tokens):
                rows.logits[bad] = float("nan")
            return rows

    broken = Overflowing(runner.model)
    request = Client("a", max_tokens=20).request
    told = decode(runner, None, 0, [request])[0]
    a, b = Client("a", max_tokens=20), Client("a", max_tokens=20)
    stage.run(Speculation(broken, None, 0), a)
    stage.run(Speculation(broken, scripted(request, told.tokens, hit_rate), draft_tokens), b)
    assert a.wait().error == b.wait().error == "the model produced logits that are not finite"
    assert a.outcome == b.outcome
    assert a.sequence.tokens == list(told.tokens[:fault])
    assert all(step.accepted <= step.drafted for step in b.sequence.steps)
    assert sum(step.accepted + 1 for step in b.sequence.steps) >= fault - 1


def test_an_owner_that_breaks_the_engine_is_not_the_only_one_told(runner: Runner, stage: Stage) -> None:
    def broken(client: Client) -> None:
        if client.emissions[-1].finish is None:
            stage.engines[0].cancel("a")
        elif len([e for e in client.emissions if e.finish]) == 1:
            raise RuntimeError("a broken owner")

    a, b = Client("a", max_tokens=100_000, react=broken), Client("b", max_tokens=100_000)
    engine = stage.run(plain(runner), a, b)
    end = b.wait()
    assert end.finish == "error"
    assert "a broken owner" in str(end.error)
    assert not engine.alive
    with pytest.raises(BackendUnavailable, match="a broken owner"):
        engine.submit(Client("late").sequence)


# -- cuts inside a block -------------------------------------------------------------------------------------------

K = 4
PROMPT = (9, 8, 7)


@dataclass(frozen=True)
class Told:
    """An answer known beforehand."""

    seed: int
    tokens: tuple[int, ...]

    def cut(self, max_tokens: int = 40, eos: frozenset[int] = frozenset(), stops: tuple[str, ...] = ()) -> Request:
        return Request(PROMPT, SamplingParams(seed=self.seed), max_tokens, eos, stops)


@pytest.fixture(scope="module")
def told(runner: Runner) -> Told:
    """A sampled answer whose first tokens all differ, so that each of them can be what ends it."""
    for seed in range(100):
        tokens = decode(runner, None, 0, [Told(seed, ()).cut()])[0].tokens
        if len(set(tokens[:12])) == 12:
            return Told(seed, tokens)
    raise AssertionError("no answer of distinct tokens")


def scripted(request: Request, answer: tuple[int, ...], hit_rate: float = 1.0) -> ScriptedDrafter:
    return ScriptedDrafter({request.prompt: answer}, hit_rate, SHAPE.vocab)


def both(runner: Runner, told: Told, request: Request, hit_rate: float = 1.0) -> tuple[Outcome, Outcome]:
    return (
        decode(runner, None, 0, [request])[0],
        decode(runner, scripted(request, told.tokens, hit_rate), K, [request])[0],
    )


def text(tokens: tuple[int, ...]) -> str:
    return "".join(chr(0x100 + token) for token in tokens)


# Token number → verify steps when the drafter is always right and that token ends the answer. Token 0 is the
# prefill's; the ending token is itself a draft that was accepted, or the bonus token of a full step.
ENDING = {
    0: [],
    1: [(1, 1)],
    2: [(2, 2)],
    3: [(3, 3)],
    4: [(4, 4)],
    5: [(4, 4)],
    6: [(4, 4), (1, 1)],
    7: [(4, 4), (2, 2)],
    8: [(4, 4), (3, 3)],
    9: [(4, 4), (4, 4)],
    10: [(4, 4), (4, 4)],
    11: [(4, 4), (4, 4), (1, 1)],
}
# max_tokens → verify steps: K = min(K, remaining - 1), so the last token is always the target's own.
BUDGET = {
    1: [],
    2: [(0, 0)],
    3: [(1, 1)],
    4: [(2, 2)],
    5: [(3, 3)],
    6: [(4, 4)],
    7: [(4, 4), (0, 0)],
    8: [(4, 4), (1, 1)],
    9: [(4, 4), (2, 2)],
    10: [(4, 4), (3, 3)],
    11: [(4, 4), (4, 4)],
    12: [(4, 4), (4, 4), (0, 0)],
}


def steps(pairs: list[tuple[int, int]]) -> tuple[Step, ...]:
    return tuple(Step(*pair) for pair in pairs)


@pytest.mark.parametrize("number", ENDING)
def test_an_end_token_cuts_its_block_and_the_counts_where_it_falls(runner: Runner, told: Told, number: int) -> None:
    unaided, drafted = both(runner, told, told.cut(eos=frozenset({told.tokens[number]})))
    assert unaided.seen == drafted.seen
    assert drafted.tokens == told.tokens[: number + 1]
    assert drafted.finish == "stop"
    assert drafted.steps == steps(ENDING[number])
    assert unaided.steps == (Step(0, 0),) * number


@pytest.mark.parametrize("number", ENDING)
def test_a_stop_string_cuts_its_block_and_the_counts_where_it_falls(runner: Runner, told: Told, number: int) -> None:
    for length in range(1, min(number + 1, 3) + 1):  # over one token, and across up to three, blocks' borders included
        first = number + 1 - length
        unaided, drafted = both(runner, told, told.cut(stops=("never", text(told.tokens[first : number + 1]))))
        assert unaided.seen == drafted.seen
        assert drafted.tokens == told.tokens[: number + 1]
        assert drafted.text == text(told.tokens[:first])
        assert drafted.finish == "stop"
        assert drafted.steps == steps(ENDING[number])


@pytest.mark.parametrize("budget", BUDGET)
def test_max_tokens_shortens_the_last_draft(runner: Runner, told: Told, budget: int) -> None:
    unaided, drafted = both(runner, told, told.cut(max_tokens=budget))
    assert unaided.seen == drafted.seen
    assert drafted.tokens == told.tokens[:budget]
    assert drafted.text == text(told.tokens[:budget])
    assert drafted.finish == "length"
    assert drafted.steps == steps(BUDGET[budget])


@pytest.mark.parametrize("number", [1, 4, 5, 6, 9])
def test_an_end_token_at_the_last_place_is_a_stop(runner: Runner, told: Told, number: int) -> None:
    request = told.cut(max_tokens=number + 1, eos=frozenset({told.tokens[number]}))
    unaided, drafted = both(runner, told, request)
    assert unaided.seen == drafted.seen
    assert drafted.finish == "stop"
    assert drafted.steps == steps(BUDGET[number + 1])


@pytest.mark.parametrize("number", [1, 2, 5, 7])
def test_slots_after_an_end_that_no_draft_foresaw_are_not_counted(runner: Runner, told: Told, number: int) -> None:
    unaided, drafted = both(runner, told, told.cut(eos=frozenset({told.tokens[number]})), hit_rate=0.0)
    assert unaided.seen == drafted.seen
    assert drafted.steps == (*[Step(K, 0)] * (number - 1), Step(1, 0))


def test_a_part_of_a_stop_string_that_the_end_token_cuts_short_is_text(runner: Runner, told: Told) -> None:
    request = told.cut(eos=frozenset({told.tokens[6]}), stops=(text(told.tokens[5:7]) + "more",))
    unaided, drafted = both(runner, told, request)
    assert unaided.seen == drafted.seen
    assert drafted.text == text(told.tokens[:7])


# -- counts --------------------------------------------------------------------------------------------------------


def test_the_engine_counts_what_its_sequences_did(runner: Runner, told: Told, stage: Stage) -> None:
    clients = [Client(str(i), prompt=PROMPT, seed=told.seed, max_tokens=n) for i, n in enumerate((1, 2, 8, 12))]
    engine = stage.run(Speculation(runner, scripted(told.cut(), told.tokens), K), *clients)
    for client in clients:
        client.wait()
        assert client.sequence.steps == list(steps(BUDGET[client.max_tokens]))
    drafts, proposed, accepted, recent_proposed, recent_accepted = engine.counts.snapshot()
    # (4,4) (1,1) of the third and (4,4) (4,4) of the fourth; steps without a draft count nowhere
    assert drafts == 4
    assert proposed == accepted == recent_proposed == recent_accepted == (4, 3, 3, 3)


def test_a_slot_is_accepted_only_with_all_before_it() -> None:
    counts = SpeculationCounts(3)
    for step in (Step(3, 3), Step(3, 1), Step(2, 0), Step(1, 1), Step(0, 0)):
        counts.add(step)
    assert counts.snapshot() == (4, (4, 3, 2), (3, 1, 1), (4, 3, 2), (3, 1, 1))


def test_the_recent_counts_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(statistics_module, "time", SimpleNamespace(monotonic=lambda: now))
    counts = SpeculationCounts(2)
    counts.add(Step(2, 2))
    now += 30
    counts.add(Step(1, 0))
    now += 30
    assert counts.snapshot() == (2, (2, 1), (1, 1), (2, 1), (1, 1))
    now += 0.5
    assert counts.snapshot() == (2, (2, 1), (1, 1), (1, 0), (0, 0))
    now += 30
    assert counts.snapshot() == (2, (2, 1), (1, 1), (0, 0), (0, 0))
    counts.add(Step(2, 1))
    assert counts.snapshot() == (3, (3, 2), (2, 1), (1, 1), (1, 0))


# -- deferred commit -----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.integers(0, 8).flatmap(lambda drafts: st.tuples(st.just(drafts), st.integers(1, drafts + 1))),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def either(request: pytest.FixtureRequest) -> Runner:
    return make_runner(request.param)


@torch.inference_mode()
def commits_exactly(runner: Runner, blocks: list[tuple[int, int]], prompt_length: int, seed: int) -> None:
    tokens = torch.randint(0, SHAPE.vocab, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    prompt, truth, wrong = tokens[:prompt_length], tokens[100:250], itertools.cycle(tokens[250:])
    cache, single = runner.new_cache(), runner.new_cache()
    for each in (cache, single):
        list(runner.force(prompt, [], 1, each))
    done = 0
    for drafts, accepted in [*blocks, (0, 1)]:  # the last folds in what the one before it accepted
        at = len(prompt) + done
        right = truth[done : done + accepted]
        block = runner.verify(cache, [*right, *itertools.islice(wrong, drafts + 1 - accepted)], at)
        cache.accept(accepted)
        rows = []
        for offset, token in enumerate(right):
            rows.append(runner.verify(single, [token], at + offset))
            single.accept(1)
        assert torch.equal(block.logits[:accepted], torch.cat([row.logits for row in rows]))
        assert torch.equal(block.hidden[:, :accepted], torch.cat([row.hidden for row in rows], dim=1))
        done += accepted
    for layer, state in cache.deltanet.items():
        assert state.S.dtype == torch.float32
        assert torch.equal(state.S, single.deltanet[layer].S)
        assert torch.equal(state.columns, single.deltanet[layer].columns)
    for layer, kept in cache.attention.items():
        end = len(prompt) + done
        assert torch.equal(kept.k[:, :, :end], single.attention[layer].k[:, :, :end])
        assert torch.equal(kept.v[:, :, :end], single.attention[layer].v[:, :, :end])


@settings(max_examples=30, deadline=None)
@given(blocks=STEPS, prompt_length=st.sampled_from((1, 2, 3, GRID - 1, GRID, GRID + 3)), seed=st.integers(0, 99))
def test_any_acceptance_leaves_the_state_of_one_row_at_a_time(
    either: Runner, blocks: list[tuple[int, int]], prompt_length: int, seed: int
) -> None:
    commits_exactly(either, blocks, prompt_length, seed)


def test_a_count_of_accepted_rows_that_is_off_by_one_is_seen(either: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(self: SequenceCache, rows: int) -> None:
        self.accepted = max(rows - 1, 1)

    monkeypatch.setattr(SequenceCache, "accept", off_by_one)
    with pytest.raises(AssertionError):
        commits_exactly(either, [(3, 2)], 5, 0)
