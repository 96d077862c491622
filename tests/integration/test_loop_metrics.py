"""Law L5 on the real engine: what /metrics counts of a scripted run is the sum, by hand, of what its answers say.

Figures before the script are subtracted, so that a counter that only ever shows the last request would be found out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from capture.records import Generation
from tests.answers import Answer, body, streamed, whole
from tests.checkpoints import random_endless
from tests.servers import CHAT, ProcessServer, eventually, running_process, serve_command

SLOTS = 3
SAMPLED: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": 0, "ignore_eos": True}
SCRIPT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("What is a list?", {"temperature": 0, "max_tokens": 60}),
    ("What is a list?", {**SAMPLED, "max_tokens": 41, "seed": 1}),
    ("What does zip() do? " * 20, {**SAMPLED, "max_tokens": 33, "seed": 2}),
    ("What is a set?", {**SAMPLED, "max_tokens": 200, "seed": 3, "stop": ["e", "a"]}),
    ("What is a dict?", {"temperature": 0, "max_tokens": 200, "stop": ["i", "o"]}),
    ("And a tuple?", {**SAMPLED, "max_tokens": 1}),
    ("And a tuple?", {**SAMPLED, "max_tokens": 2}),
    ("And a tuple?", {**SAMPLED, "max_tokens": 3}),
)
OPT_OUTS: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
    ({"X-Draftloop-Capture": "off"}, {"max_tokens": 9}),
    ({}, {"max_tokens": 6, "store": False}),
)
# DESIGN §6, all that has a source before there is a prefix cache; histograms by one of their series.
NAMES = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_acceptance_ratio",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "capture_generations_total",
    "capture_failures_total",
    "capture_late_total",
    "capture_queue_depth",
    "capture_commit_seconds_bucket",
]

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: ProcessServer) -> Samples:
    """Every sample of /metrics by name and labels."""
    families = parse(server.http.get("/metrics").text)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for f in families for sample in f.samples}


@dataclass(frozen=True)
class Run:
    """The timings blocks of everything the script asked, and what the counters showed before and after it."""

    answers: list[Answer]
    opted_out: list[dict[str, Any]]  # timings
    cancelled: Generation
    rows: list[Generation]  # of `answers`
    before: Samples
    after: Samples

    @property
    def timings(self) -> list[Mapping[str, Any]]:
        return [*(answer.timings for answer in self.answers), *self.opted_out, self.cancelled.timings]

    def total(self, name: str) -> int:
        return sum(timings[name] for timings in self.timings)

    def at_slot(self, name: str, slot: int) -> int:
        return sum(counts[slot] for timings in self.timings if slot < len(counts := timings[name]))

    def grown(self, name: str, **labels: str) -> float:
        """How much a counter has grown over the script."""
        key = f"draftloop_{name}", frozenset(labels.items())
        return self.after[key] - self.before.get(key, 0)

    def now(self, name: str, **labels: str) -> float:
        return self.after[f"draftloop_{name}", frozenset(labels.items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    command = serve_command(random_endless(), "--draft-tokens", str(SLOTS))
    with running_process(command, tmp_path_factory.mktemp("metrics") / "capture.db") as server:
        began = time.monotonic()
        whole(server.openai, "Before it all", max_tokens=7)
        before = scrape(server)
        answers = [
            ask(server.openai, content, **more)
            for number, (content, more) in enumerate(SCRIPT)
            for ask in ((streamed, whole) if number % 2 else (whole, streamed))
        ]
        opted_out = []
        for headers, more in OPT_OUTS:
            asked = {"messages": [{"role": "user", "content": "Hush"}], **more}
            answer = server.http.post(CHAT, json=asked, headers=headers).json()
            opted_out.append(answer["timings"])
        left = leave(server)
        cancelled = eventually(lambda: next((row for row in server.rows() if row.id == left), None))
        eventually(lambda: server.metric("request_success_total", finished_reason="cancelled") == 1)
        after = scrape(server)
        assert time.monotonic() - began < 55, "too slow for everything to be recent"
        rows = {row.id: row for row in server.rows()}
        return Run(answers, opted_out, cancelled, [rows[answer.row_id] for answer in answers], before, after)


def leave(server: ProcessServer) -> str:
    """Ask for a long answer, leave in the middle of it; the id of its row."""
    asked = body("Tell me all", **SAMPLED, max_tokens=5000)
    with server.openai.chat.completions.create(**asked, stream=True) as stream:
        for number, chunk in enumerate(stream):
            if number == 20:
                return chunk.id.removeprefix("chatcmpl-")
    raise AssertionError("the stream ended by itself")


def test_the_script_meets_every_case(run: Run) -> None:
    ends = Counter(answer.finish_reason for answer in run.answers)
    assert ends["stop"] == 4
    assert ends["length"] == 12
    assert run.cancelled.status == "cancelled"
    assert run.cancelled.timings["draft_n"] > 0
    assert all(timings["draft_n"] > 0 for timings in run.opted_out)
    assert all(run.at_slot("draft_n_accepted_per_pos", slot) > 0 for slot in range(SLOTS))
    assert run.total("draft_n_accepted") < run.total("draft_n")
    # Near a limit fewer are drafted, so that the slots' denominators differ.
    assert run.at_slot("draft_n_per_pos", SLOTS - 1) < run.at_slot("draft_n_per_pos", 0)


def test_every_step_proposes_what_there_is_room_for_and_accounts_for_its_tokens(run: Run) -> None:
    """DESIGN §6 walked through by hand: the first token belongs to no step; what the end cuts off was not proposed."""
    assert [len(row.steps) == 0 for row in run.rows] == [len(row.completion_tokens) == 1 for row in run.rows]
    for row in (row for row in run.rows if row.steps):
        told, limit = 1, row.parameters["max_tokens"]
        *steps, last = row.steps
        for drafted, accepted in steps:
            assert drafted == min(SLOTS, limit - told - 1)
            assert 0 <= accepted <= drafted
            told += accepted + 1
        left = len(row.completion_tokens) - told
        assert left > 0
        assert last[0] == min(SLOTS, limit - told - 1, left)
        assert last[1] in (left - 1, left)


def test_draft_counters_grow_by_the_sums_of_the_timings(run: Run) -> None:
    mtp = {"drafter": "mtp"}
    assert run.grown("spec_decode_num_draft_tokens_total", **mtp) == run.total("draft_n")
    assert run.grown("spec_decode_num_accepted_tokens_total", **mtp) == run.total("draft_n_accepted")
    # A step that drafts at all drafts slot 0.
    assert run.grown("spec_decode_num_drafts_total", **mtp) == run.at_slot("draft_n_per_pos", 0)


def test_each_slots_counters_grow_by_that_slots_sums(run: Run) -> None:
    for slot in range(SLOTS):
        labels = {"drafter": "mtp", "position": str(slot)}
        proposed, accepted = run.at_slot("draft_n_per_pos", slot), run.at_slot("draft_n_accepted_per_pos", slot)
        assert run.grown("spec_decode_num_draft_tokens_per_pos_total", **labels) == proposed
        assert run.grown("spec_decode_num_accepted_tokens_per_pos_total", **labels) == accepted
    positions = {dict(labels)["position"] for name, labels in run.after if name.endswith("_per_pos_total")}
    assert positions == {str(slot) for slot in range(SLOTS)}


def test_slots_add_up_to_the_totals(run: Run) -> None:
    for what in ("draft", "accepted"):
        per_slot = [
            run.now(f"spec_decode_num_{what}_tokens_per_pos_total", drafter="mtp", position=str(slot))
            for slot in range(SLOTS)
        ]
        assert per_slot == sorted(per_slot, reverse=True)
        assert sum(per_slot) == run.now(f"spec_decode_num_{what}_tokens_total", drafter="mtp")


def test_the_recent_ratio_of_a_slot_is_accepted_per_proposed(run: Run) -> None:
    for slot in range(SLOTS):
        labels = {"drafter": "mtp", "position": str(slot)}
        proposed = run.now("spec_decode_num_draft_tokens_per_pos_total", **labels)
        accepted = run.now("spec_decode_num_accepted_tokens_per_pos_total", **labels)
        assert run.now("spec_decode_acceptance_ratio", **labels) == accepted / proposed


def test_token_counters_grow_by_the_sums_of_the_timings(run: Run) -> None:
    assert run.grown("prompt_tokens_total") == run.total("prompt_n") + run.total("cache_n")
    assert run.grown("generation_tokens_total") == run.total("predicted_n")
    for answer in run.answers:
        assert answer.timings["prompt_n"] + answer.timings["cache_n"] == answer.usage["prompt_tokens"]
        assert answer.timings["cache_n"] == answer.cached
        assert answer.timings["predicted_n"] == answer.usage["completion_tokens"]


def test_requests_are_counted_by_how_they_ended(run: Run) -> None:
    ends = Counter(answer.finish_reason for answer in run.answers)
    assert run.grown("request_success_total", finished_reason="stop") == ends["stop"]
    assert run.grown("request_success_total", finished_reason="length") == ends["length"] + len(OPT_OUTS)
    assert run.grown("request_success_total", finished_reason="cancelled") == 1


def test_rows_are_counted_by_their_status(run: Run) -> None:
    assert run.grown("capture_generations_total", status="finished") == len(run.answers)
    assert run.grown("capture_generations_total", status="cancelled") == 1
    assert run.grown("capture_generations_total", status="opted_out") == len(OPT_OUTS)
    assert run.grown("capture_generations_total", status="failed") == 0
    assert run.grown("capture_commit_seconds_count") == len(run.answers) + 1
    assert run.now("capture_failures_total") == run.now("capture_late_total") == run.now("capture_queue_depth") == 0


def test_latencies_count_every_request_and_every_token_after_the_first(run: Run) -> None:
    requests = len(run.timings)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert run.grown(f"{name}_seconds_count") == requests
        assert run.grown(f"{name}_seconds_sum") > 0
    assert run.grown("inter_token_latency_seconds_count") == run.total("predicted_n") - requests
    # Both clocks run from the first token to the last; one stands in the engine, one behind the queue to the wire.
    decoding = run.total("predicted_ms") / 1000
    assert run.grown("inter_token_latency_seconds_sum") == pytest.approx(decoding, rel=0.25, abs=0.5)
    assert run.grown("e2e_request_latency_seconds_sum") > run.grown("time_to_first_token_seconds_sum")


def test_an_idle_server_holds_nothing(run: Run) -> None:
    assert run.now("num_requests_running") == run.now("num_requests_waiting") == run.now("kv_cache_usage_ratio") == 0


def test_every_promised_name_that_has_a_source_is_exposed(run: Run) -> None:
    assert {f"draftloop_{name}" for name in NAMES} <= {name for name, _ in run.after}
