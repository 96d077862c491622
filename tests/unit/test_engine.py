"""The engine thread: who runs when, how a sequence ends, what is counted, and that a step's rows commit exactly."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.drafters.protocol import Choose, Drafter, Proposal
from backend.engine.engine import Engine
from backend.engine.forms import GRID
from backend.engine.loop import Loop
from backend.engine.memory import Memory, Place
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Emission, Sequence
from backend.engine.statistics import SpeculationCounts
from backend.interface import BackendError, BackendUnavailable, Step
from backend.ops.delta_replay import CHUNK, RING
from backend.text.answer import AnswerText
from tests import factory
from tests.by_hand import ByHand
from tests.decoding import Outcome, Request, ScriptedDrafter, decode, make_loop
from tests.factory import Shape
from tests.servers import eventually

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
    drafter: Drafter | None = None
    emissions: list[Emission] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.sequence = Sequence(
            id=self.id,
            prompt=self.prompt,
            sampler=Sampler(SamplingParams(seed=self.seed), SHAPE.vocab, self.prompt),
            max_tokens=self.max_tokens,
            eos_ids=frozenset(),
            text=AnswerText(lambda token: chr(0x100 + token).encode(), self.stops),
            alternatives=0,
            on_emission=self.hear,
            drafter=self.drafter,
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

    def run(self, loop: Loop, *clients: Client) -> Engine:
        def load() -> Loop:
            assert self.gate.wait(SECONDS)
            return loop

        engine = Engine(load, SpeculationCounts(["scripted", "none"], K))
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


def plain(runner: Runner, sequences: int = 16, draft_tokens: int = 0) -> Loop:
    return make_loop(runner, draft_tokens, positions=1024, sequences=sequences)


def holds_nothing(loop: Loop) -> bool:
    """Every page and every slot has been given back."""
    scheduler, table = loop.scheduler, loop.speculation.memory.table
    return not (scheduler.running or scheduler.waiting or scheduler.decoding) and table.free == table.total


# -- who runs when -------------------------------------------------------------------------------------------------


def test_running_sequences_progress_together(runner: Runner, stage: Stage) -> None:
    a, b, c = (Client(name, max_tokens=4, seed=i) for i, name in enumerate("abc"))
    stage.run(plain(runner), a, b, c)
    for client in (a, b, c):
        client.wait()
    # One prompt chunk a turn, then a step of all that decode; the last of them takes the place of one that ended.
    assert a.log == ["a", "a", "b", "a", "b", "c", "a.", "b", "c", "c", "b.", "c."]


def test_one_forward_serves_all_running_sequences(
    runner: Runner, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    verify = Runner.verify

    def counting(self: Runner, memory: Memory, places: list[Place], *rest: Any) -> tuple[Tensor, Tensor]:
        batches.append(len(places))
        return verify(self, memory, places, *rest)

    monkeypatch.setattr(Runner, "verify", counting)
    clients = [Client(str(i), max_tokens=9) for i in range(4)]
    stage.run(plain(runner), *clients)
    for client in clients:
        client.wait()
    assert batches == [1, 2, 3, 4, 4, 4, 4, 4, 3, 2, 1]


def test_a_long_prompt_does_not_hold_up_running_sequences(runner: Runner, stage: Stage) -> None:
    a, b = Client("a", max_tokens=7), Client("b", prompt=(5,) * (3 * GRID + 1), max_tokens=2)
    stage.run(plain(runner), a, b)
    a.wait()
    b.wait()
    # Three chunks of b's prompt ran beside a's steps, the fourth gave its first token.
    assert a.log == ["a", "a", "a", "a", "a", "b", "a", "b.", "a."]


def test_sequences_are_admitted_in_order_and_no_more_than_allowed(runner: Runner, stage: Stage) -> None:
    lengths = (6, 3, 5, 2, 4)
    clients = [Client(name, max_tokens=n) for name, n in zip("abcde", lengths, strict=True)]
    loop, running = plain(runner, sequences=2), []
    for client in clients:
        client.react = lambda _: running.append(len(loop.scheduler.running))
    engine = stage.run(loop, *clients)
    for client in clients:
        client.wait()
    admitted = [client.sequence.admitted_at for client in clients]
    assert admitted == sorted(admitted)
    assert max(running) == 2
    first_heard = [clients[0].log.index(name) for name in "abcde"]
    assert first_heard == sorted(first_heard)
    for later, client in enumerate(clients[2:], start=2):
        before = clients[0].log[: clients[0].log.index(client.id)]
        assert sum(entry.endswith(".") for entry in before) >= later - 1
    engine.close()
    assert holds_nothing(loop)


def test_every_sequence_decodes_as_if_it_were_alone(runner: Runner, stage: Stage) -> None:
    clients = [Client(str(i), tuple(range(1, 2 + 37 * i)), max_tokens=12, seed=i) for i in range(5)]
    stage.run(plain(runner, sequences=3), *clients)
    for client in clients:
        client.wait()
    alone = decode(runner, None, 0, [client.request for client in clients])
    assert [client.outcome for client in clients] == [outcome.seen for outcome in alone]


# -- how it ends from outside --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_sequences", "told"),
    [((1, 2), 1, 0), ((1,) * (8 * GRID), 2, 0), ((1, 2), 2, 2)],
    ids=["waiting", "in-prefill", "decoding"],
)
def test_a_cancelled_sequence_ends_within_one_step(
    runner: Runner, stage: Stage, prompt: tuple[int, ...], max_sequences: int, told: int
) -> None:
    a = Client("a", max_tokens=8, react=lambda c: len(c.emissions) == 3 and stage.engines[0].cancel("b"))
    b = Client("b", prompt=prompt, max_tokens=1000)
    loop = plain(runner, sequences=max_sequences)
    engine = stage.run(loop, a, b)
    assert a.wait().finish == "length"
    end = b.wait()
    assert (end.finish, end.tokens, end.error) == ("cancelled", (), None)
    assert len(b.sequence.tokens) == told
    assert (b.sequence.prefilled == len(prompt)) == (told > 0)
    third, fourth = [i for i, entry in enumerate(a.log) if entry == "a"][2:4]
    assert third < a.log.index("b.") < fourth
    assert a.outcome == decode(runner, None, 0, [a.request])[0].seen
    engine.close()
    assert holds_nothing(loop)


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
    clients = [Client(name, max_tokens=900, react=lambda _: started.set()) for name in "abc"]
    loop = plain(runner, sequences=1)
    engine = stage.run(loop, *clients)
    assert started.wait(SECONDS)
    assert engine.alive
    assert engine.waiting == 2
    engine.close()
    assert [client.emissions[-1].finish for client in clients] == ["cancelled"] * 3
    assert not engine.alive
    assert engine.waiting == 0
    assert holds_nothing(loop)
    with pytest.raises(BackendUnavailable, match="shutting down"):
        engine.submit(Client("late").sequence)
    engine.close()


def test_an_engine_that_was_never_started_closes(runner: Runner) -> None:
    Engine(lambda: plain(runner), SpeculationCounts([], 0)).close()


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [(BackendError("no such model"), "no such model"), (MemoryError("19 GB"), "loading failed: 19 GB")],
)
def test_what_stops_loading_is_told_at_the_start_and_to_those_waiting(
    stage: Stage, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Loop:
        raise error

    engine = Engine(load, SpeculationCounts([], 0))
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


class BrokenText(AnswerText):
    """Cannot spell token number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(lambda token: b"x", ())
        self._left = at

    def push(self, token: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("by design")
        return super().push(token)


@pytest.mark.parametrize("at", [0, 3], ids=["prefill", "decode"])
def test_a_fault_in_one_sequence_ends_that_one_alone(
    runner: Runner, stage: Stage, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad, other = (Client(name, max_tokens=8, seed=i) for i, name in enumerate(("good", "bad", "other")))
    bad.sequence.text = BrokenText(at)
    loop = plain(runner)
    engine = stage.run(loop, good, bad, other)
    end = bad.wait()
    assert (end.finish, end.error) == ("error", "ZeroDivisionError: by design")
    assert len([token for emission in bad.emissions for token in emission.tokens]) == at
    for client in (good, other):
        client.wait()
        assert client.outcome == decode(runner, None, 0, [client.request])[0].seen
    assert engine.alive
    assert "by design" in caplog.text
    again = Client("again")
    engine.submit(again.sequence)
    assert again.wait().finish == "length"
    engine.close()
    assert holds_nothing(loop)


class BrokenSampler(Sampler):
    """Cannot choose after `at` tokens."""

    at = 3

    @property
    def plain(self) -> bool:
        return False

    def process(self, logits: Tensor, drafts: Tensor) -> Tensor:
        if self.count >= self.at:
            raise ZeroDivisionError("by design")
        return logits


def test_a_fault_in_one_sequences_sampling_ends_that_one_alone(runner: Runner, stage: Stage) -> None:
    good, bad, other = (Client(name, max_tokens=8, seed=i) for i, name in enumerate(("good", "bad", "other")))
    bad.sequence.sampler = BrokenSampler(SamplingParams(seed=1), SHAPE.vocab, bad.prompt)
    loop = plain(runner)
    engine = stage.run(loop, good, bad, other)
    assert (bad.wait().finish, bad.emissions[-1].error) == ("error", "ZeroDivisionError: by design")
    assert tuple(bad.sequence.tokens) == decode(runner, None, 0, [bad.request])[0].tokens[: BrokenSampler.at]
    assert bad.outcome[0] == tuple(bad.sequence.tokens)
    for client in (good, other):
        client.wait()
        assert client.outcome == decode(runner, None, 0, [client.request])[0].seen
    engine.close()
    assert holds_nothing(loop)


@pytest.mark.parametrize("hit_rate", [0.0, 1.0])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_fault_inside_a_block_ends_it_after_the_same_tokens_for_any_draft_length(
    runner: Runner, stage: Stage, at: int, hit_rate: float
) -> None:
    a = Client("a", PROMPT, max_tokens=12)
    told = decode(runner, None, 0, [a.request])[0].tokens
    b = Client("b", PROMPT, max_tokens=12, drafter=scripted(a.request, told, hit_rate))
    for client, drafts in ((a, 0), (b, 4)):
        client.sequence.text = BrokenText(at)
        stage.run(plain(runner, draft_tokens=drafts), client)
        assert client.wait().error == "ZeroDivisionError: by design"
        assert client.outcome[0] == told[:at]  # those that were emitted, and no more
    assert a.outcome == b.outcome


@pytest.mark.parametrize("what", ["prefill", "resume", "propose", "observe"])
def test_a_drafter_that_fails_costs_its_drafts_and_no_token(
    runner: Runner, stage: Stage, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = (5,) * (2 * GRID + 1)
    a, first = Client("a", prompt, max_tokens=12), Client("first", prompt, max_tokens=1)
    told = decode(runner, None, 0, [a.request])[0]
    drafter = scripted(a.request, told.tokens, 1.0)

    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("by design")

    setattr(drafter, what, broken)
    b = Client("b", prompt, max_tokens=12, drafter=drafter)
    engine = stage.run(make_loop(runner, 4, positions=1024, sequences=16, prefix=True), first, b)
    b.wait()
    assert b.sequence.cached == 2 * GRID
    assert engine.restarts == 0
    assert b.outcome == told.seen
    assert not any(step.drafted for step in b.sequence.steps)
    assert "by design" in caplog.text


def test_a_fault_of_a_prompts_forward_ends_that_one_alone(
    runner: Runner, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill_chunk = Runner.prefill_chunk

    def broken(self: Runner, memory: Memory, place: Place, chunk: Any, start: int) -> tuple[Tensor, Tensor]:
        if start == 2 * GRID:
            raise ZeroDivisionError("by design")
        return prefill_chunk(self, memory, place, chunk, start)

    monkeypatch.setattr(Runner, "prefill_chunk", broken)
    good, bad = Client("good"), Client("bad", prompt=(1,) * (3 * GRID))
    loop = plain(runner)
    engine = stage.run(loop, good, bad)
    assert bad.wait() == Emission("", (), "error", "ZeroDivisionError: by design")
    good.wait()
    assert good.outcome == decode(runner, None, 0, [good.request])[0].seen
    engine.close()
    assert holds_nothing(loop)


def test_a_fault_of_a_batchs_forward_ends_the_batch_and_nobody_else(
    runner: Runner, stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verify, calls = Runner.verify, itertools.count()

    def broken_once(self: Runner, *given: Any) -> tuple[Tensor, Tensor]:
        if next(calls) == 4:
            raise ZeroDivisionError("by design")
        return verify(self, *given)

    monkeypatch.setattr(Runner, "verify", broken_once)
    a, b = Client("a"), Client("b", seed=1)
    in_prefill, waiting = Client("in prefill", prompt=(1,) * (9 * GRID)), Client("waiting", seed=2)
    loop = plain(runner, sequences=3)
    engine = stage.run(loop, a, b, in_prefill, waiting)
    for client in (a, b):
        assert client.wait() == Emission("", (), "error", "ZeroDivisionError: by design")
        assert 0 < len(client.sequence.tokens) < 8
    for client in (in_prefill, waiting):
        client.wait()
        assert client.outcome == decode(runner, None, 0, [client.request])[0].seen
    assert engine.alive
    assert "by design" in caplog.text
    engine.close()
    assert holds_nothing(loop)


@pytest.mark.parametrize("hit_rate", [0.0, 1.0])
@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("fault", [1, 2, 4, 5, 6, 8])
def test_logits_that_are_no_numbers_end_it_at_the_same_token_for_any_draft_length(
    runner: Runner, stage: Stage, fault: int, draft_tokens: int, hit_rate: float
) -> None:
    class Overflowing(Runner):
        def verify(
            self, memory: Memory, places: Any, tokens: Tensor, counts: Any, starts: Any
        ) -> tuple[Tensor, Tensor]:
            logits, hidden = super().verify(memory, places, tokens, counts, starts)
            bad = len(PROMPT) + fault - 1 - starts[0]  # the row that chooses token number `fault`
            if 0 <= bad < tokens.shape[1] and places[0].prompt == len(PROMPT):
                logits[0, bad] = float("nan")
            return logits, hidden

    broken = Overflowing(runner.model)
    a, c = Client("a", PROMPT, max_tokens=12), Client("c", (5, 6), max_tokens=12, seed=1)
    told, other = decode(runner, None, 0, [a.request, c.request])
    b = Client("b", PROMPT, max_tokens=12, drafter=scripted(a.request, told.tokens, hit_rate))
    stage.run(plain(broken), a)
    assert a.wait().finish == "error"
    stage.run(plain(broken, draft_tokens=draft_tokens), b, c)  # b is in slot 0 while it lasts
    assert a.wait().error == b.wait().error == "the model produced logits that are not finite"
    assert a.outcome == b.outcome
    assert a.sequence.tokens == list(told.tokens[:fault])
    assert all(step.accepted <= step.drafted for step in b.sequence.steps)
    assert sum(step.accepted + 1 for step in b.sequence.steps) >= fault - 1
    c.wait()
    assert c.outcome == other.seen


def test_an_owner_that_breaks_the_engine_is_not_the_only_one_told(runner: Runner, stage: Stage) -> None:
    def broken(client: Client) -> None:
        if client.emissions[-1].finish is None:
            stage.engines[0].cancel("a")
        elif len([e for e in client.emissions if e.finish]) == 1:
            raise RuntimeError("a broken owner")

    a, b = Client("a", max_tokens=900, react=broken), Client("b", max_tokens=900)
    engine = stage.run(plain(runner), a, b)
    end = b.wait()
    assert end.finish == "error"
    assert "a broken owner" in str(end.error)
    eventually(lambda: engine.alive)
    assert engine.restarts == 1


def crashes(monkeypatch: pytest.MonkeyPatch, *turns: int) -> None:
    """Break the scheduler's accounts in the given turns: of nobody's sequence, so that no one can be blamed."""
    reserve, count = Scheduler.reserve, itertools.count()

    def broken(self: Scheduler) -> None:
        if next(count) in turns:
            self.running.clear()
            raise LookupError("lost count")
        reserve(self)

    monkeypatch.setattr(Scheduler, "reserve", broken)


def test_a_crash_ends_everything_and_the_engine_begins_anew(
    runner: Runner, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes(monkeypatch, 6)
    prompt = tuple(range(1, 2 * GRID + 7))
    a, b, waiting = Client("a", prompt, max_tokens=900), Client("b", prompt), Client("waiting")
    loop = make_loop(runner, 0, positions=1024, sequences=2, prefix=True)
    engine = stage.run(loop, a, b, waiting)
    for client in (a, b, waiting):
        assert client.wait() == Emission("", (), "error", "the engine failed: lost count")
    eventually(lambda: engine.alive)
    assert (engine.restarts, engine.waiting, engine.failed) == (1, 0, False)
    assert holds_nothing(loop)
    again = [Client(f"{i}", prompt, seed=i) for i in range(3)]
    for client in again:
        engine.submit(client.sequence)
    for client in again:
        client.wait()
    alone = decode(runner, None, 0, [client.request for client in again])
    assert [client.outcome for client in again] == [outcome.seen for outcome in alone]
    assert again[0].sequence.cached == 0, "the prefix cache has outlived the memory's accounts"
    engine.close()


def test_a_second_crash_is_the_last(runner: Runner, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes(monkeypatch, 1, 3)
    first, second = Client("first", max_tokens=900), Client("second", max_tokens=900)
    engine = stage.run(plain(runner), first)
    first.wait()
    eventually(lambda: engine.alive)
    engine.submit(second.sequence)
    assert "lost count" in str(second.wait().error)
    eventually(lambda: engine.failed)
    assert not engine.alive
    with pytest.raises(BackendUnavailable, match="lost count"):
        engine.submit(Client("late").sequence)
    engine.close()
    assert engine.restarts == 1


def test_a_fault_of_the_device_is_everyones(runner: Runner, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, calls = Runner.verify, itertools.count()

    def broken_once(self: Runner, *given: Any) -> tuple[Tensor, Tensor]:
        if next(calls) == 1:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return verify(self, *given)

    monkeypatch.setattr(Runner, "verify", broken_once)
    a, waiting = Client("a"), Client("waiting")
    engine = stage.run(plain(runner, sequences=1), a, waiting)
    for client in (a, waiting):
        assert "illegal memory access" in str(client.wait().error)
    eventually(lambda: engine.alive)
    assert engine.restarts == 1


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
    drafter = scripted(told.cut(), told.tokens)
    clients = [
        Client(str(i), prompt=PROMPT, seed=told.seed, max_tokens=n, drafter=drafter)
        for i, n in enumerate((1, 2, 8, 12))
    ]
    engine = stage.run(plain(runner, draft_tokens=K), *clients, Client("undrafted"))
    for client in clients:
        client.wait()
        assert client.sequence.steps == list(steps(BUDGET[client.max_tokens]))
    counted, none = engine.counts.snapshot()
    # (4,4) (1,1) of the third and (4,4) (4,4) of the fourth; steps without a draft count nowhere
    assert counted.drafts == 4
    assert counted.draft_tokens_per_pos == counted.accepted_tokens_per_pos == (4, 3, 3, 3)
    assert counted.recent_draft_tokens_per_pos == counted.recent_accepted_tokens_per_pos == (4, 3, 3, 3)
    assert none.drafts == 0


def test_who_hears_of_an_emission_finds_it_counted_and_an_end_made_room(
    runner: Runner, told: Told, stage: Stage
) -> None:
    seen: list[tuple[int, int, bool]] = []
    loop = plain(runner, draft_tokens=K)

    def look(client: Client) -> None:
        (counted, _), steps = stage.engines[0].counts.snapshot(), client.sequence.steps
        seen.append((counted.draft_tokens, sum(step.drafted for step in steps), holds_nothing(loop)))

    client = Client("a", PROMPT, 12, told.seed, react=look, drafter=scripted(told.cut(), told.tokens))
    stage.run(loop, client)
    client.wait()
    assert seen == [(0, 0, False), (4, 4, False), (8, 8, False), (8, 8, True)]


class Clairvoyant:
    """Runs the target itself for every slot, so that nothing but the noise can part draft and target."""

    name, fingerprint, block = "scripted", "clairvoyant", None

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def attach(self, memory: Memory) -> None:
        pass

    def new_state(self, prompt: Any, pages: list[int]) -> tuple[tuple[int, ...], list[int]]:
        return tuple(prompt), []

    def resume(self, state: Any, boundary: int, known: bool) -> None:
        pass

    def prefill(self, state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        pass

    def observe(self, state: Any, tokens: Any, hidden: Tensor) -> None:
        state[1].extend(tokens)

    def propose(self, states: Any, counts: Any, choose: Choose) -> Proposal:
        drafts = torch.empty(len(states), 0, dtype=torch.int64)
        for _ in range(max(counts)):
            known = [(prompt, [*tokens, *row]) for (prompt, tokens), row in zip(states, drafts.tolist(), strict=True)]
            logits = [list(self._runner.force(prompt, tokens, 9))[-1][0][-1] for prompt, tokens in known]
            drafts = torch.cat((drafts, choose(torch.stack(logits))[:, None]), dim=1)
        return Proposal(drafts, counts)


def test_draft_and_target_share_their_noise_in_every_slot_of_every_sequence(runner: Runner) -> None:
    wanted = [Request((1, 2, 3, i), SamplingParams(temperature=1.5, seed=i), 14 + i) for i in range(3)]
    for outcome in decode(runner, Clairvoyant(runner), 3, wanted, together=3):
        assert all(step.accepted == step.drafted for step in outcome.steps)
        assert Step(3, 3) in outcome.steps


# -- rows that were wrong, and rows in company -----------------------------------------------------------------------

KEPT = st.integers(0, 8).flatmap(lambda drafts: st.tuples(st.just(drafts), st.integers(1, drafts + 1)))
STEPS = st.lists(st.tuples(KEPT, KEPT), min_size=1, max_size=9)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def either(request: pytest.FixtureRequest) -> Runner:
    return make_runner(request.param)


@torch.inference_mode()
def commits_exactly(
    runner: Runner, blocks: list[tuple[tuple[int, int], tuple[int, int]]], prompt_lengths: tuple[int, int], seed: int
) -> None:
    """Two sequences together in blocks of (drafts, rows right), each against itself alone, one row at a time."""
    tokens = torch.randint(0, SHAPE.vocab, (1000,), generator=torch.Generator().manual_seed(seed)).tolist()
    prompts = [tokens[i : i + length] for i, length in enumerate(prompt_lengths)]
    truths, wrong = [tokens[600:700], tokens[700:800]], itertools.cycle(tokens[800:])
    together, alone = ByHand(runner, prompts), [ByHand(runner, [prompt]) for prompt in prompts]
    done = [0, 0]
    for block in blocks:
        right = [truth[at : at + kept] for truth, at, (_, kept) in zip(truths, done, block, strict=True)]
        given = zip(right, block, strict=True)
        rows = together.verify([[*own, *itertools.islice(wrong, drafts + 1 - kept)] for own, (drafts, kept) in given])
        kept = [kept for _, kept in block]
        together.keep(kept)
        for i, sequence in enumerate(alone):
            single = []
            for token in right[i]:
                single += sequence.verify([[token]])
                sequence.keep([1])
            assert torch.equal(rows[i][0][: kept[i]], torch.cat([logits for logits, _ in single]))
            assert torch.equal(rows[i][1][: kept[i]], torch.cat([hidden for _, hidden in single]))
            done[i] += kept[i]
    for i, sequence in enumerate(alone):
        for ours, expected in zip(remembered(together, i, done[i]), remembered(sequence, 0, done[i]), strict=True):
            assert torch.equal(ours, expected)


def remembered(hands: ByHand, slot: int, rows: int) -> list[Tensor]:
    """All of a sequence's memory that rows to come may read, `rows` having been generated."""
    memory, place = hands.memory, hands.places[slot]
    slots, places = memory.slots, memory.places(place.pages, 0, place.prompt + rows)
    slots.advance(slot, rows)
    since = [row % RING for row in range(slots.bases[slot] - 1, rows)]
    columns = [row % slots.columns.shape[2] for row in range(rows - slots.history, rows)]
    assert slots.S.dtype == torch.float32
    return [
        *(memory.cache.k[:, :, places], memory.cache.v[:, :, places]),
        *(slots.S[:, slot], slots.columns[:, slot, columns]),
        *(ring[:, slot, :, since] for ring in (slots.k, slots.u, slots.G)),
    ]


@settings(max_examples=12, deadline=None)
@given(
    blocks=STEPS,
    prompt_lengths=st.tuples(*[st.sampled_from((1, 2, 3, GRID - 1, GRID, GRID + 3, 500))] * 2),
    seed=st.integers(0, 99),
)
def test_any_acceptance_leaves_the_memory_of_one_row_at_a_time(
    either: Runner,
    blocks: list[tuple[tuple[int, int], tuple[int, int]]],
    prompt_lengths: tuple[int, int],
    seed: int,
) -> None:
    commits_exactly(either, blocks, prompt_lengths, seed)


def test_a_base_that_moves_inside_a_block_leaves_the_same_memory(either: Runner) -> None:
    for first in range(0, 9, 2):
        blocks = [((8, 9), (first, first + 1))] * 2 + [((8, 9), (8, 9))] * (1 + 2 * CHUNK // 9)
        commits_exactly(either, blocks, (3, 500), first)


def test_a_count_of_kept_rows_that_is_off_by_one_is_seen(either: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ByHand.keep
    monkeypatch.setattr(ByHand, "keep", lambda self, counts: keep(self, [max(count - 1, 1) for count in counts]))
    with pytest.raises(AssertionError):
        commits_exactly(either, [((3, 2), (0, 1)), ((0, 1), (0, 1))], (5, 5), 0)
