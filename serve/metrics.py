"""What /metrics exposes: the engine's own counters read at scrape time, and what the wire measures itself.

Names and meanings are those of DESIGN §6; knows no request, only durations and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from backend.interface import DrafterStats, EngineStats
from serve.metrics_compat import VllmNames
from serve.metrics_upstream import speculation_of_upstream

PREFIX = "draftloop_"
STATUSES = ("finished", "cancelled", "failed", "opted_out")

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)

# The moment a counter was made is not worth a series beside every series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One app's collectors, in a registry of their own. Safe to call from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._also = CollectorRegistry()  # of those that read the other
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time between tokens; of tokens that arrive together, each takes its share of the time since the last.",
            TOKEN_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its committed end.", LATENCY_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From submission to the engine to admission.", LATENCY_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "From admission to the first token, of requests that finished.",
            LATENCY_BUCKETS,
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds",
            "From the first token to the last, of requests that finished.",
            LATENCY_BUCKETS,
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request that finished.", COUNT_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request that finished.", COUNT_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.requests = self._counter("request_success", "Requests that ended, by how.", ["finished_reason"])
        self.captured = self._counter(
            "capture_generations", "Rows committed by status; opted_out counts generations that left none.", ["status"]
        )
        self.capture_failures = self._counter("capture_failures", "Generations whose row was lost.")
        self.capture_queue_full = self._counter(
            "capture_queue_full", "Of the generations whose row was lost, those that found no room in the queue."
        )
        self.capture_late = self._counter("capture_late", "Answers sent before their row was committed.")
        self.capture_redacted = self._counter("capture_redacted", "Rows in which text was redacted.")
        self.capture_commit = self._histogram(
            "capture_commit_seconds", "From handing a row to the writer to its commit.", COMMIT_BUCKETS
        )
        for reason in ("stop", "length"):
            self.requests.labels(reason)
        for status in STATUSES:
            self.captured.labels(status)

    def watch(
        self, stats: Callable[[], EngineStats | None], queue_depth: Callable[[], int], failing: Callable[[], bool]
    ) -> None:
        """Read the engine's counters (None: nothing to tell yet) and how capture is doing at every scrape."""
        self._registry.register(_Scrape(stats, queue_depth, failing))

    def tell_as_vllm_too(self, model_name: Callable[[], str | None]) -> None:
        """Every figure that vLLM has, under its name and with its labels, from now on; None: no model yet."""
        self._also.register(VllmNames(self._registry, model_name))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry) + generate_latest(self._also)

    def samples(self) -> Iterator[Sample]:
        """Everything under our own names, as numbers."""
        for family in self._registry.collect():
            yield from family.samples

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(PREFIX + name, help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help_text, buckets=buckets, registry=self._registry)


class _Scrape(Collector):
    """prometheus_client's way to expose figures that somebody else counts."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], queue_depth: Callable[[], int], failing: Callable[[], bool]
    ) -> None:
        self._stats = stats
        self._queue_depth = queue_depth
        self._failing = failing

    def describe(self) -> list[Metric]:
        return []  # nothing can clash: every other name stands in Metrics

    def collect(self) -> Iterator[Metric]:
        yield _gauge("capture_queue_depth", "Rows handed to the writer and not yet committed.", self._queue_depth())
        yield _gauge("capture_failing", "1 while rows wait for a file that cannot be written.", self._failing())
        stats = self._stats()
        if stats is None:
            return
        yield _gauge("num_requests_running", "Requests being decoded.", stats.running)
        yield _gauge("num_requests_waiting", "Requests waiting for admission.", stats.waiting)
        if stats.kv_cache_usage is None:
            yield from speculation_of_upstream(stats.upstream_metrics)
        else:
            yield from _engine(stats, stats.kv_cache_usage)


def _engine(stats: EngineStats, cache_usage: float) -> Iterator[Metric]:
    """What only an engine of this process has."""
    yield _gauge("kv_cache_usage_ratio", "Share of the KV pages held by running requests, 0 to 1.", cache_usage)
    yield _total("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries)
    yield _total("prefix_cache_hits", "Prompt tokens taken from the prefix cache.", stats.prefix_cache_hits)
    yield _total("num_preemptions", "Running requests set back to waiting for lack of cache.", stats.preemptions)
    yield _total("engine_restarts", "Times the engine was started again after a crash.", stats.restarts)
    yield _gauge("spec_decode_draft_length", "Draft tokens a sequence in the last verify step.", stats.draft_tokens)
    yield from _speculation(stats.drafters)
    yield from _drafters(stats)


def _speculation(drafters: Sequence[DrafterStats]) -> Iterator[Metric]:
    """One family per count, with a series for every drafter, and for every slot where slots are counted apart."""
    for name, help_text, counts in (
        ("num_drafts", "Verify steps that proposed at least one slot.", [d.drafts for d in drafters]),
        ("num_draft_tokens", "Draft tokens proposed.", [d.draft_tokens for d in drafters]),
        ("num_accepted_tokens", "Draft tokens accepted.", [d.accepted_tokens for d in drafters]),
    ):
        totals = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", help_text, labels=["drafter"])
        for drafter, count in zip(drafters, counts, strict=True):
            totals.add_metric([drafter.drafter], count)
        yield totals
    for name, help_text, slots in (
        (
            "num_draft_tokens_per_pos",
            "Verify steps in which the slot was proposed.",
            [d.draft_tokens_per_pos for d in drafters],
        ),
        (
            "num_accepted_tokens_per_pos",
            "Verify steps in which this slot and all before it were accepted.",
            [d.accepted_tokens_per_pos for d in drafters],
        ),
    ):
        per_pos = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", help_text, labels=["drafter", "position"])
        for drafter, slot_counts in zip(drafters, slots, strict=True):
            for position, count in enumerate(slot_counts):
                per_pos.add_metric([drafter.drafter, str(position)], count)
        yield per_pos
    ratio = GaugeMetricFamily(
        f"{PREFIX}spec_decode_acceptance_ratio",
        "Accepted per proposed of each slot (surv) over the last 60 seconds.",
        labels=["drafter", "position"],
    )
    for drafter in drafters:
        for position, acceptance in enumerate(recent_acceptance(drafter)):
            if acceptance is not None:
                ratio.add_metric([drafter.drafter, str(position)], acceptance)
    yield ratio


def _drafters(stats: EngineStats) -> Iterator[Metric]:
    """Who drafts for whom, and what the steps took that a drafter had alone."""
    states = GaugeMetricFamily(
        f"{PREFIX}drafter_state", "1 for the state each drafter is in.", labels=["drafter", "state"]
    )
    for drafter, state in stats.drafter_states.items():
        states.add_metric([drafter, state], 1)
    yield states
    yield _gauge("drafter_canary_share", "Share of the requests that the canary drafts for.", stats.canary_share)
    for name, help_text, field in (
        ("steps", "Verify steps in which it alone drafted and nothing else ran.", "steps"),
        ("step_sequences", "Sequences in those steps.", "sequences"),
        ("step_accepted_tokens", "Draft tokens accepted in those steps.", "accepted"),
        ("step_seconds", "Draft and verify time of those steps.", "seconds"),
    ):
        total = CounterMetricFamily(f"{PREFIX}drafter_{name}", help_text, labels=["drafter", "batch"])
        for drafter, times in stats.step_times.items():
            for one in times:
                total.add_metric([drafter, str(one.batch)], getattr(one, field))
        yield total


def recent_acceptance(stats: DrafterStats) -> list[float | None]:
    """surv_s = A_s / P_s of each slot over the last 60 seconds; None where nothing was proposed."""
    return _ratios(stats.recent_accepted_tokens_per_pos, stats.recent_draft_tokens_per_pos)


def _ratios(accepted: Sequence[int], proposed: Sequence[int]) -> list[float | None]:
    return [a / p if p else None for a, p in zip(accepted, proposed, strict=True)]


def _gauge(name: str, help_text: str, value: float) -> Any:
    return GaugeMetricFamily(PREFIX + name, help_text, value=value)


def _total(name: str, help_text: str, value: float) -> Any:
    return CounterMetricFamily(PREFIX + name, help_text, value=value)
