"""An upstream's own speculation counters, read from its /metrics and told under our names with drafter="upstream".

Knows the names that servers use; invents nothing: what an upstream does not tell is absent.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

DRAFTER = "upstream"
PREFIX = "draftloop_spec_decode_"

# Our name and meaning, and every sample that has it elsewhere: vLLM's, our own, and llama.cpp's in its builds that
# tell any. Each adds up over the labels that are not ours.
TOTALS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "num_drafts": (
        "Verify steps that proposed at least one slot.",
        ("vllm:spec_decode_num_drafts_total", "draftloop_spec_decode_num_drafts_total"),
    ),
    "num_draft_tokens": (
        "Draft tokens proposed.",
        (
            "vllm:spec_decode_num_draft_tokens_total",
            "draftloop_spec_decode_num_draft_tokens_total",
            "llamacpp:n_drafted_total",
            "llamacpp:n_draft_total",
        ),
    ),
    "num_accepted_tokens": (
        "Draft tokens accepted.",
        (
            "vllm:spec_decode_num_accepted_tokens_total",
            "draftloop_spec_decode_num_accepted_tokens_total",
            "llamacpp:n_drafted_accepted_total",
            "llamacpp:n_draft_accepted_total",
            "llamacpp:n_accepted_total",
        ),
    ),
}
PER_POSITION: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "num_draft_tokens_per_pos": (
        "Verify steps in which the slot was proposed.",
        ("draftloop_spec_decode_num_draft_tokens_per_pos_total",),
    ),
    "num_accepted_tokens_per_pos": (
        "Verify steps in which this slot and all before it were accepted.",
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "draftloop_spec_decode_num_accepted_tokens_per_pos_total",
        ),
    ),
}

log = logging.getLogger(__name__)


def speculation_of_upstream(exposition: str) -> Iterator[Metric]:
    """The counters in a text of Prometheus' format; none where it is empty or cannot be read."""
    samples = _samples(exposition)
    for name, (help_text, theirs) in TOTALS.items():
        if found := _told(samples, theirs):
            total = CounterMetricFamily(PREFIX + name, help_text, labels=["drafter"])
            total.add_metric([DRAFTER], sum(sample.value for sample in found))
            yield total
    for name, (help_text, theirs) in PER_POSITION.items():
        counts: dict[int, float] = defaultdict(float)
        for sample in _told(samples, theirs):
            if re.fullmatch(r"\d{1,3}", sample.labels.get("position", "")):
                counts[int(sample.labels["position"])] += sample.value
        if counts:
            per_position = CounterMetricFamily(PREFIX + name, help_text, labels=["drafter", "position"])
            for position in sorted(counts):
                per_position.add_metric([DRAFTER, str(position)], counts[position])
            yield per_position


def _told(samples: Sequence[Sample], theirs: Sequence[str]) -> Sequence[Sample]:
    """Those of the first name found: one count under two names, as --metrics-compat tells ours, counts once."""
    found = [sample for sample in samples if sample.name in theirs]
    return [sample for sample in found if sample.name == found[0].name]


@lru_cache(maxsize=4)  # read more often than the upstream is asked for it, by as many servers as one process has
def _samples(exposition: str) -> Sequence[Sample]:
    try:
        families = text_string_to_metric_families(exposition)
        return [sample for family in families for sample in family.samples if 0 <= sample.value < math.inf]
    except ValueError as error:
        log.warning("the upstream's metrics cannot be read: %s", error)
        return ()
