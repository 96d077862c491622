"""The figures of /metrics under vLLM's names too, so that dashboards made for vLLM show this server.

Reads the registry it stands beside; counts nothing itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Our family and vLLM's names of it, the present one first, then those it had before or has beside it.
NAMES: Mapping[str, tuple[str, ...]] = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "num_preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "request_success": ("request_success",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
}
OURS, THEIRS = "draftloop_", "vllm:"
REASONS = {"cancelled": "abort"}  # whose other words for how a request ended are the same


class VllmNames(Collector):
    """Everything of a registry that vLLM has a name for, with vLLM's labels: one engine, no drafter."""

    def __init__(self, registry: CollectorRegistry, model_name: Callable[[], str | None]) -> None:
        self._registry = registry
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if (model := self._model_name()) is None:
            return
        for family in self._registry.collect():
            for name in NAMES.get(family.name.removeprefix(OURS), ()):
                yield _renamed(family, THEIRS + name, {"engine": "0", "model_name": model})


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """The family under another name; what several drafters count apart adds up."""
    values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        theirs = {key: value for key, value in sample.labels.items() if key != "drafter"}
        if "finished_reason" in theirs:
            theirs["finished_reason"] = REASONS.get(theirs["finished_reason"], theirs["finished_reason"])
        suffix = sample.name.removeprefix(family.name)
        values[name + suffix, tuple({**labels, **theirs}.items())] += sample.value
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [Sample(one, dict(its), value) for (one, its), value in values.items()]
    return renamed
