"""Whether a drafter serves faster than another: tokens per second of verify steps and of whole blocks, with intervals.

Knows counts and seconds, in which a drafter's cost shows; knows no server. DESIGN §4 has the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.live_drafters import Buckets, Steps

DRAWS = 2000
CONFIDENCE = 0.95
FEWEST_STEPS = 20  # of each drafter in a bucket, before the bucket's times mean anything


@dataclass(frozen=True)
class Counts:
    """Of one request under one drafter: verify steps, and drafts accepted in them."""

    steps: int
    accepted: int


@dataclass(frozen=True)
class Ratio:
    """Candidate over incumbent, with an interval from `n` units."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.n}"


@dataclass(frozen=True)
class Bucket:
    """Both drafters in steps of about as many sequences: steps, τ = 1 + accepted / sequences, seconds a step, and the
    ratio of τ / seconds."""

    batch: int
    candidate_steps: int
    incumbent_steps: int
    candidate_tau: float
    incumbent_tau: float
    candidate_seconds: float
    incumbent_seconds: float
    ratio: float


@dataclass(frozen=True)
class Block:
    """The same requests under the candidate alone and under the incumbent alone: tokens per second, and the steps that
    the server counted in each."""

    candidate: float
    incumbent: float
    candidate_steps: Buckets
    incumbent_steps: Buckets


def tau(counts: Sequence[Counts]) -> float:
    """Acceptance length, 1 + accepted / steps; NaN without a step."""
    steps = sum(one.steps for one in counts)
    return 1 + sum(one.accepted for one in counts) / steps if steps else float("nan")


def added(parts: Sequence[Buckets]) -> Buckets:
    """Steps of several spans together."""
    total: dict[int, Steps] = {}
    for part in parts:
        for batch, steps in part.items():
            total[batch] = total.get(batch, Steps()) + steps
    return total


def since(now: Buckets, before: Buckets) -> Buckets:
    """Steps of a span, from the counters at its end and at its begin."""
    return {batch: steps - before.get(batch, Steps()) for batch, steps in now.items()}


def buckets(candidate: Buckets, incumbent: Buckets) -> list[Bucket]:
    """Those in which both have steps enough, the smallest batch first."""
    found = []
    for batch in sorted(set(candidate) & set(incumbent)):
        one, other = candidate[batch], incumbent[batch]
        if min(one.steps, other.steps) < FEWEST_STEPS or min(one.seconds, other.seconds) <= 0:
            continue
        (our_tau, our_seconds), (their_tau, their_seconds) = (
            (1 + steps.accepted / steps.sequences, steps.seconds / steps.steps) for steps in (one, other)
        )
        ratio = our_tau / our_seconds / (their_tau / their_seconds)
        found.append(Bucket(batch, one.steps, other.steps, our_tau, their_tau, our_seconds, their_seconds, ratio))
    return found


def step_seconds(found: Sequence[Bucket]) -> tuple[float, float]:
    """Seconds a step of candidate and incumbent, both at the same mixture of batches: that of all their steps."""
    weights = np.array([bucket.candidate_steps + bucket.incumbent_steps for bucket in found], dtype=np.float64)
    weights /= weights.sum()
    candidate = float(weights @ np.array([bucket.candidate_seconds for bucket in found]))
    return candidate, float(weights @ np.array([bucket.incumbent_seconds for bucket in found]))


def unpaired(candidate: Sequence[Counts], incumbent: Sequence[Counts], found: Sequence[Bucket], seed: int) -> Ratio:
    """τ / seconds a step, from different requests under each, as a canary has them; requests are drawn anew.

    `found`: the buckets that the seconds are of. Raises ValueError where one of them is empty.
    """
    _require(candidate, incumbent, found)
    rng = np.random.default_rng(seed)
    by_time = _inverse_seconds(found)
    drawn = [_taus(counts, rng.integers(len(counts), size=(DRAWS, len(counts)))) for counts in (candidate, incumbent)]
    ratios = drawn[0] / drawn[1] * by_time
    return _interval(tau(candidate) / tau(incumbent) * by_time, ratios, min(len(candidate), len(incumbent)))


def paired(
    candidate: Mapping[str, Counts], incumbent: Mapping[str, Counts], blocks: Sequence[Block], seed: int
) -> Ratio:
    """τ / seconds a step, from the same requests under both; requests and blocks are drawn anew.

    Raises ValueError where there is no request both had, or no bucket with steps of both.
    """
    shared = sorted(set(candidate) & set(incumbent))
    ones, others = ([counts[name] for name in shared] for counts in (candidate, incumbent))
    found = buckets(added([b.candidate_steps for b in blocks]), added([b.incumbent_steps for b in blocks]))
    _require(ones, others, found)
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(shared), size=(DRAWS, len(shared)))
    times = []
    for chosen in rng.integers(len(blocks), size=(DRAWS, len(blocks))):
        drawn = [blocks[i] for i in chosen]
        again = buckets(added([b.candidate_steps for b in drawn]), added([b.incumbent_steps for b in drawn]))
        times.append(_inverse_seconds(again) if again else np.nan)
    ratios = _taus(ones, rows) / _taus(others, rows) * np.array(times)
    return _interval(tau(ones) / tau(others) * _inverse_seconds(found), ratios, len(shared))


def throughput(blocks: Sequence[Block], seed: int) -> Ratio:
    """Tokens per second end to end: the geometric mean over two pairs of blocks or more.

    Its interval is Student's: drawing six pairs anew calls one in ten of equally fast drafters surely faster, drawing
    two one in five.
    """
    logs = np.log([block.candidate / block.incumbent for block in blocks])
    drawn = np.random.default_rng(seed).standard_t(len(logs) - 1, size=10 * DRAWS)
    log = _interval(logs.mean(), logs.mean() + logs.std(ddof=1) / np.sqrt(len(logs)) * drawn, len(blocks))
    return Ratio(float(np.exp(log.value)), float(np.exp(log.low)), float(np.exp(log.high)), log.n)


def _taus(counts: Sequence[Counts], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """τ of each drawn set of requests: int64 [draws, n] → float64 [draws]."""
    steps, accepted = (
        np.array([getattr(one, name) for one in counts], dtype=np.float64)[rows].sum(axis=1)
        for name in ("steps", "accepted")
    )
    drawn: NDArray[np.float64] = 1 + accepted / np.where(steps > 0, steps, np.nan)
    return drawn


def _inverse_seconds(found: Sequence[Bucket]) -> float:
    candidate, incumbent = step_seconds(found)
    return incumbent / candidate


def _interval(value: float, drawn: NDArray[np.float64], n: int) -> Ratio:
    low, high = np.nanquantile(drawn, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Ratio(value, float(low), float(high), n)


def _require(candidate: Sequence[Counts], incumbent: Sequence[Counts], found: Sequence[Bucket]) -> None:
    for name, counts in (("candidate", candidate), ("incumbent", incumbent)):
        if not any(one.steps for one in counts):
            raise ValueError(f"the {name} has had no verify step in the requests that were counted")
    if not found:
        raise ValueError(f"no batch size has {FEWEST_STEPS} steps in which either drafter alone ran")
