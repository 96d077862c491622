"""A promotion: what is faster is kept, what is not leaves no trace, and nothing that happens leaves it half-way."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from backend.drafters.student import StudentHeader, Target
from backend.interface import ChatEvent, ChatRequest, InvalidRequest, StepTimes
from backend.models.student import StudentConfig
from capture.export import split_of
from capture.records import Generation
from tests.capture_rows import generation, write
from tests.fake_backend import FINGERPRINTS, FakeBackend
from tests.servers import AppServer, running_app
from training import gate
from training.cli import app
from training.errors import TrainingError
from training.gate import Block, Counts, Ratio
from training.ledger import Ledger
from training.live_drafters import Steps
from training.promote import PromoteOptions, promote

CANDIDATE = "student-01234567"
HEADER = StudentHeader(
    name="student",
    architecture=StudentConfig(
        hidden_size=8,
        d_inner=4,
        intermediate_size=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        rotary_dim=2,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        hot_rows=4,
    ),
    d2t_sha256="0" * 64,
    weights_sha256="0123456789" * 6 + "abcd",
    target=Target(weights="any", tokenizer="any", chat_template="any"),
)
INCUMBENT_SECONDS = 0.02


@dataclass
class Timed(FakeBackend):
    """Every drafter drafts alike, but takes its own time: `seconds` of each a request, told as that of its steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    refuses: str | None = None
    lies: bool = False  # the candidate changes the answers
    reads: str = HEADER.fingerprint  # what its paths lead to

    async def load_drafter(self, path: str, name: str | None, min_acceptance: float) -> Any:
        if self.refuses:
            raise InvalidRequest(self.refuses, param="path")
        return await super().load_drafter(path, name, min_acceptance)

    def _times(self, drafter: str) -> tuple[StepTimes, ...]:
        return tuple(
            replace(one, seconds=one.steps * (1e-4 + self.seconds.get(drafter, 0.0))) for one in super()._times(drafter)
        )

    def promote(self, drafter: str, canary: float | None = None) -> None:
        """Lets go of loaded ones that have no part any more after a promotion, as the engine does."""
        before = self.default.name
        super().promote(drafter, canary)
        states = self._states()
        if self.default.name != before:
            self.drafters = tuple(name for name in self.drafters if name == "mtp" or states[name] != "loaded")

    def _entry(self, drafter: str) -> dict[str, Any]:
        entry = super()._entry(drafter)
        return entry | ({"fingerprint": self.reads} if drafter == CANDIDATE else {})

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        import asyncio

        drafter = self.default.of(request.id)
        await asyncio.sleep(self.seconds.get(drafter, 0.0))
        async for event in super().chat(request):
            if self.lies and drafter == CANDIDATE and event.result:
                yield replace(event, result=replace(event.result, completion_ids=(1, 2)))
            else:
                yield event


def held_out_rows(count: int, split: str = "held_out") -> Iterator[Generation]:
    """Answers of the fake's model to so many prompts of the held-out tenth, or of the rest."""
    found, number = 0, 0
    while found < count:
        number += 1
        row = generation(
            prompt_tokens=[number, 6, 7],
            completion_tokens=[8, 9],
            weights_fingerprint=FINGERPRINTS.weights,
            tokenizer_fingerprint=FINGERPRINTS.tokenizer,
            template_fingerprint=FINGERPRINTS.chat_template,
            build=FINGERPRINTS.build,
            parameters={"temperature": 0.7, "max_tokens": 40},
            request={"messages": [{"role": "user", "content": f"Question {number}?"}]},
        )
        if split_of(row) == split:
            found += 1
            yield row


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return write(tmp_path / "asked.db", *held_out_rows(8))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "student"
    folder.mkdir()
    (folder / "config.json").write_text(HEADER.model_dump_json())
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AppServer]:
    backend = Timed(seconds={"mtp": INCUMBENT_SECONDS})
    with running_app(backend=backend, capture=tmp_path / "server.db") as started:
        yield started


def options(server: AppServer, checkpoint: Path, asked: Path, **more: Any) -> PromoteOptions:
    return PromoteOptions(server.url, checkpoint, capture=asked, **{"pairs": 2, "min_gain": 1.0} | more)


def costs(server: AppServer, seconds: float) -> None:
    backend = server.backend
    assert isinstance(backend, Timed)
    backend.seconds[CANDIDATE] = seconds


def drafters(server: AppServer) -> tuple[str, str | None, set[str]]:
    told = server.http.get("/v1/drafters").json()
    assert told["canary"] is None
    return told["active"], told["previous"], {one["name"] for one in told["drafters"]}


def test_a_faster_drafter_is_made_the_default(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, 0.0)
    verdict = promote(options(server, checkpoint, asked, pairs=5))
    assert verdict.promoted, verdict.reason
    assert drafters(server) == (CANDIDATE, "mtp", {"mtp", CANDIDATE, "none"})
    assert verdict.requests == 8
    assert verdict.trial
    assert verdict.trial.candidate_requests + verdict.trial.incumbent_requests == 8
    assert verdict.steps
    assert verdict.steps.n == 8
    assert verdict.steps.value == pytest.approx((1e-4 + INCUMBENT_SECONDS) / 1e-4)
    assert verdict.throughput
    assert verdict.throughput.low > 1
    assert verdict.candidate_tau == verdict.incumbent_tau
    assert server.rows() == []  # what is asked for a trial is nobody's answer to train on
    json.dumps(verdict.as_json(), allow_nan=False)


def test_a_slower_drafter_is_taken_back(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, 3 * INCUMBENT_SECONDS)
    verdict = promote(options(server, checkpoint, asked))
    assert not verdict.promoted
    assert "slower on trial" in verdict.reason or "not surely faster by steps" in verdict.reason
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_where_nothing_is_accepted_it_is_said(
    server: AppServer, checkpoint: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fake_backend.ACCEPTED", (0,))
    costs(server, 0.0)
    verdict = promote(options(server, checkpoint, asked))
    assert "no draft of it was accepted on trial" in verdict.reason
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_a_drafter_as_fast_as_the_other_is_not_worth_it(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, INCUMBENT_SECONDS)
    verdict = promote(options(server, checkpoint, asked))
    assert "not surely faster by steps: 1.000 [1.000, 1.000], n = 8" in verdict.reason
    assert verdict.blocks
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_a_gain_below_the_one_wanted_is_not_enough(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, INCUMBENT_SECONDS / 2)
    verdict = promote(options(server, checkpoint, asked, min_gain=2.5))
    assert not verdict.promoted
    assert "2.5" in verdict.reason or "slower on trial" in verdict.reason


@pytest.mark.parametrize(("figure", "said"), [("paired", "by steps"), ("throughput", "in tokens/s")])
def test_a_gain_that_its_interval_leaves_in_doubt_is_none(
    server: AppServer, checkpoint: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, figure: str, said: str
) -> None:
    costs(server, 0.0)
    sure, doubtful = Ratio(1.2, 1.1, 1.3, 8), Ratio(1.2, 0.9, 1.5, 8)
    for name in ("paired", "throughput"):
        told = doubtful if name == figure else sure
        monkeypatch.setattr(f"training.promote.{name}", lambda *given, told=told: told)
    verdict = promote(options(server, checkpoint, asked))
    assert not verdict.promoted
    assert f"not surely faster {said}: 1.200 [0.900, 1.500]" in verdict.reason
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_a_slower_drafter_that_is_let_in_is_not_called_faster(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, 3 * INCUMBENT_SECONDS)
    verdict = promote(options(server, checkpoint, asked, min_gain=0.0))
    assert verdict.promoted
    assert verdict.reason.startswith("surely above 0: 0.")


@pytest.mark.parametrize("at", ["loading", "canary", "block 1 of 2, mtp", "block 2 of 2, mtp"])
def test_an_interruption_leaves_the_incumbent_alone(server: AppServer, checkpoint: Path, asked: Path, at: str) -> None:
    costs(server, 0.0)

    def interrupt(doing: str, done: int, total: int) -> None:
        if doing == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        promote(options(server, checkpoint, asked), interrupt)
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


@pytest.mark.parametrize("at", ["canary", f"block 1 of 2, {CANDIDATE}", "block 1 of 2, mtp", "block 2 of 2, mtp"])
def test_a_default_that_somebody_else_chooses_meanwhile_stays(
    server: AppServer, checkpoint: Path, asked: Path, at: str
) -> None:
    costs(server, 0.0)
    server.http.post("/v1/drafters", json={"path": "theirs"}).raise_for_status()

    def choose(doing: str, done: int, total: int) -> None:
        if doing == at and done == total:
            server.http.put("/v1/drafters/active", json={"drafter": "theirs"}).raise_for_status()

    verdict = promote(options(server, checkpoint, asked), choose)
    assert not verdict.promoted
    assert verdict.reason == "theirs was made the default meanwhile, not by this promotion"
    active, _, loaded = drafters(server)
    assert (active, CANDIDATE in loaded) == ("theirs", False)


@pytest.mark.parametrize("seconds", [0.0, 3 * INCUMBENT_SECONDS], ids=["faster", "slower"])
def test_what_a_killed_promotion_left_active_is_judged_again(
    server: AppServer, checkpoint: Path, asked: Path, seconds: float
) -> None:
    costs(server, seconds)
    server.http.post("/v1/drafters", json={"path": str(checkpoint), "name": CANDIDATE}).raise_for_status()
    server.http.put("/v1/drafters/active", json={"drafter": CANDIDATE}).raise_for_status()
    verdict = promote(options(server, checkpoint, asked, pairs=5 if seconds == 0.0 else 2))
    assert verdict.promoted == (seconds == 0.0)
    assert verdict.incumbent == "mtp"
    assert drafters(server)[0] == (CANDIDATE if verdict.promoted else "mtp")


def test_what_the_server_refuses_is_not_promoted(server: AppServer, checkpoint: Path, asked: Path) -> None:
    assert isinstance(server.backend, Timed)
    server.backend.refuses = "the student was made for another model"
    verdict = promote(options(server, checkpoint, asked))
    assert not verdict.promoted
    assert verdict.reason.startswith("the server refuses it: the student was made for another model")
    assert drafters(server)[0] == "mtp"


@pytest.mark.parametrize("seconds", [0.0, INCUMBENT_SECONDS], ids=["faster", "same"])
def test_whatever_else_is_loaded_stays_unless_it_is_promoted(
    server: AppServer, checkpoint: Path, asked: Path, seconds: float
) -> None:
    """The way back from the incumbent too."""
    costs(server, seconds)
    for name in ("earlier", "incumbent"):
        server.http.post("/v1/drafters", json={"path": name}).raise_for_status()
        server.http.put("/v1/drafters/active", json={"drafter": name}).raise_for_status()
    server.http.post("/v1/drafters", json={"path": "idle"}).raise_for_status()
    assert isinstance(server.backend, Timed)
    server.backend.seconds["incumbent"] = INCUMBENT_SECONDS
    before = server.http.get("/v1/drafters").json()
    assert before["previous"] == "earlier"
    verdict = promote(options(server, checkpoint, asked, min_gain=0.0 if seconds == 0.0 else 1.0))
    if seconds == 0.0:
        assert verdict.promoted, verdict.reason
        assert drafters(server) == (CANDIDATE, "incumbent", {"mtp", CANDIDATE, "incumbent", "none"})
    else:
        assert drafters(server) == ("incumbent", "earlier", {"mtp", "earlier", "incumbent", "idle", "none"})
        assert server.http.get("/v1/drafters").json()["history"] == before["history"]


@pytest.mark.parametrize("name", ["mtp", "none", "other"])
def test_another_drafter_of_that_name_is_not_judged_in_its_place(
    server: AppServer, checkpoint: Path, asked: Path, name: str
) -> None:
    server.http.post("/v1/drafters", json={"path": "other"}).raise_for_status()
    with pytest.raises(TrainingError, match=f"the server has another drafter {name} than"):
        promote(options(server, checkpoint, asked, name=name))
    assert drafters(server) == ("mtp", None, {"mtp", "other", "none"})


def test_what_the_server_reads_must_be_what_is_to_be_promoted(server: AppServer, checkpoint: Path, asked: Path) -> None:
    assert isinstance(server.backend, Timed)
    server.backend.reads = "f" * 64
    verdict = promote(options(server, checkpoint, asked, server_path="elsewhere"))
    assert not verdict.promoted
    assert "another checkpoint" in verdict.reason
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_a_drafter_that_changes_an_answer_is_taken_back(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, 0.0)
    assert isinstance(server.backend, Timed)
    server.backend.lies = True
    verdict = promote(options(server, checkpoint, asked, canary=0.01))
    assert not verdict.promoted
    assert "changed with the drafter" in verdict.reason
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_too_few_requests_decide_nothing(server: AppServer, checkpoint: Path, tmp_path: Path) -> None:
    few = write(tmp_path / "few.db", *held_out_rows(3), *held_out_rows(20, "train"))
    with pytest.raises(TrainingError, match="holds 3 different held-out requests"):
        promote(options(server, checkpoint, few))
    assert drafters(server) == ("mtp", None, {"mtp", "none"})


def test_clients_of_the_server_count_in_a_trial(server: AppServer, checkpoint: Path, asked: Path) -> None:
    costs(server, 0.0)
    seen = []

    def wait(doing: str, done: int, total: int) -> None:
        if doing == "clients on trial" and not seen:
            seen.append(server.http.get("/v1/drafters").json()["canary"])
            write(asked, *held_out_rows(2))

    verdict = promote(options(server, checkpoint, asked, wait=0.5), wait)
    assert seen == [{"drafter": CANDIDATE, "share": 0.5}]
    assert verdict.trial
    assert verdict.trial.candidate_requests + verdict.trial.incumbent_requests == 10


def test_the_command_tells_why_and_the_ledger_keeps_it_but_no_key(
    server: AppServer, checkpoint: Path, asked: Path, tmp_path: Path
) -> None:
    costs(server, INCUMBENT_SECONDS)
    given = ["--server", server.url, "--drafter", str(checkpoint), "--capture", str(asked), "--pairs", "2"]
    told = CliRunner().invoke(app, ["promote", *given, "--api-key", "SECRET"])
    assert told.exit_code == 1
    assert "not promoted: not surely faster" in told.stdout
    ledger = Ledger(tmp_path / "ledger.jsonl")
    [run], _ = ledger.read()
    assert (run.command, run.outcome) == ("promote", "negative")
    assert run.reason
    assert "not surely faster" in run.reason
    assert run.figures["steps"]["n"] == 8
    assert "SECRET" not in ledger.path.read_text()


def test_a_server_without_drafter_can_be_given_one(tmp_path: Path, checkpoint: Path, asked: Path) -> None:
    """Its steps without drafts are an incumbent like others."""
    backend = Timed(drafters=("none",), seconds={"none": INCUMBENT_SECONDS, CANDIDATE: 0.0})
    with running_app(backend=backend, capture=tmp_path / "server.db") as server:
        verdict = promote(options(server, checkpoint, asked, pairs=5))
        assert verdict.promoted, verdict.reason
        assert (verdict.incumbent, drafters(server)[:2]) == ("none", (CANDIDATE, "none"))


# What the figures are.


def steps(count: int, sequences: int, accepted: int, seconds: float) -> Steps:
    return Steps(count, sequences, accepted, seconds)


def test_a_batch_is_compared_where_both_have_steps_enough() -> None:
    ours = {1: steps(100, 100, 150, 2.0), 2: steps(50, 90, 90, 1.0), 4: steps(19, 70, 70, 1.0)}
    theirs = {1: steps(200, 200, 400, 8.0), 4: steps(90, 300, 300, 1.0), 8: steps(90, 300, 300, 1.0)}
    [one] = gate.buckets(ours, theirs)
    assert (one.batch, one.candidate_tau, one.incumbent_tau) == (1, 2.5, 3.0)
    assert (one.candidate_seconds, one.incumbent_seconds) == (0.02, 0.04)
    assert one.ratio == pytest.approx(2.5 / 0.02 / (3.0 / 0.04))


def test_seconds_are_of_one_mixture_of_batches_for_both() -> None:
    """A drafter that happened to run in cheap batches more often is no faster for it."""
    ours = {1: steps(300, 300, 0, 3.0), 8: steps(100, 800, 0, 4.0)}
    theirs = {1: steps(100, 100, 0, 1.0), 8: steps(300, 2400, 0, 12.0)}
    candidate, incumbent = gate.step_seconds(gate.buckets(ours, theirs))
    assert candidate == pytest.approx(incumbent) == pytest.approx(0.5 * 0.01 + 0.5 * 0.04)


def test_the_same_counts_on_the_same_requests_are_a_ratio_of_times_alone() -> None:
    counts = {str(i): Counts(10, i) for i in range(20)}
    block = Block(200.0, 100.0, {1: steps(100, 100, 90, 1.0)}, {1: steps(100, 100, 90, 1.5)})
    found = gate.paired(counts, counts, [block] * 3, seed=0)
    assert (found.value, found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5))
    assert gate.throughput([block] * 3, seed=0) == gate.Ratio(*[pytest.approx(2.0)] * 3, n=3)


def test_pairs_that_disagree_leave_doubt() -> None:
    blocks = [Block(ours, 100.0, {}, {}) for ours in (90.0, 130.0, 95.0, 120.0)]
    found = gate.throughput(blocks, seed=0)
    assert found.low < 1 < found.value < found.high


@pytest.mark.parametrize("pairs", [2, 3, 6, 12])
def test_of_equally_fast_drafters_one_in_forty_seems_surely_faster(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    trials = [[Block(ratio, 1.0, {}, {}) for ratio in np.exp(rng.normal(0, 0.05, pairs))] for _ in range(400)]
    faster = sum(gate.throughput(blocks, seed).low > 1 for seed, blocks in enumerate(trials))
    assert 1 <= faster <= 22  # of a binomial with n = 400, p = 0.025: all but one in a few thousand


def test_without_steps_there_is_no_ratio() -> None:
    drafted, none = {"a": Counts(5, 2)}, {"a": Counts(0, 0)}
    block = Block(1.0, 1.0, {1: steps(100, 100, 90, 1.0)}, {1: steps(100, 100, 90, 1.0)})
    with pytest.raises(ValueError, match="the incumbent has had no verify step"):
        gate.paired(drafted, none, [block], seed=0)
    with pytest.raises(ValueError, match="no batch size"):
        gate.paired(drafted, drafted, [Block(1.0, 1.0, {}, {})], seed=0)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100)), min_size=1, max_size=12),
    st.floats(0.5, 2.0),
)
def test_the_value_lies_in_its_interval_and_swapping_inverts_it(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], cost: float
) -> None:
    one, other = ([Counts(*pair) for pair in pairs] for pairs in (ours, theirs))
    found = gate.buckets({1: steps(100, 100, 50, 1.0)}, {1: steps(100, 100, 50, cost)})
    back = gate.buckets({1: steps(100, 100, 50, cost)}, {1: steps(100, 100, 50, 1.0)})
    ratio, inverse = gate.unpaired(one, other, found, seed=1), gate.unpaired(other, one, back, seed=1)
    assert math.isclose(ratio.value * inverse.value, 1.0)
    assert ratio.low <= ratio.high
    assert ratio == gate.unpaired(one, other, found, seed=1)


@given(st.lists(st.dictionaries(st.sampled_from([1, 2, 4]), st.tuples(*[st.integers(0, 9)] * 4)), max_size=4))
def test_spans_add_up_to_the_whole(parts: list[dict[int, tuple[int, int, int, int]]]) -> None:
    spans = [{batch: Steps(*four) for batch, four in part.items()} for part in parts]
    whole = gate.added(spans)
    for i in range(len(spans)):
        first, rest = gate.added(spans[:i]), gate.added(spans[i:])
        later = {batch: taken for batch, taken in gate.since(whole, first).items() if taken != Steps()}
        assert later == {batch: taken for batch, taken in rest.items() if taken != Steps()}
