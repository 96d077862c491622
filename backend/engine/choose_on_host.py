"""A token from one row of logits in host memory, looking closely at as few entries as the row allows (DESIGN §5).

argmax(z + noise) over what min_p, then top_k, then top_p keep of z = logits / temperature; truncations are prefixes of
one order: higher z first, ties to the lower id. All in numpy, a row at a time: a choice's bits are the row's own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from backend.engine.noise import GUMBEL_MAX, LANES, Stream, host_gumbel, host_noise, host_words
from backend.engine.parameters import SamplingParams

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

WEIGHT_ONE = (
    2.0**40
)  # probabilities are summed as integers, so that no sum depends on its order: 2^40 is the likeliest's
_FIRST_CANDIDATES = 1024
_BLOCK = 64


def choose(logits: Row, params: SamplingParams, position: int) -> int:
    """The token at `position` from logits float32 [V]. Some token, should they not be finite."""
    top = int(logits.argmax())  # ties to the lowest id
    if params.greedy or not math.isfinite(logits[top]):
        return top
    z = logits if params.temperature == 1 else logits / np.float32(params.temperature)
    stream = Stream(params.seed, position, params.choice)
    if 0 < params.top_k < len(z) or params.top_p < 1:
        ids = np.sort(truncate(z, params.top_k, params.top_p, params.min_p))
        return int(ids[(z[ids] + host_noise(stream, ids)).argmax()])
    return _race(z, _floor(z.max(), params.min_p), stream)


def truncate(z: Row, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids kept by min_p, then top_k (exactly k), then top_p (the smallest prefix reaching it), best first.

    z float32 [V], already divided by the temperature. top_p is measured on what min_p and top_k left.
    """
    peak = z.max()
    floor = _floor(peak, min_p)
    limit = top_k if 0 < top_k < len(z) else len(z)
    if top_p >= 1:
        return _above(z, leading(z, limit), floor)
    total = int(weights(z[z >= floor] if min_p > 0 else z, peak).sum()) if limit == len(z) else None
    # The normaliser says whether a few candidates reached top_p; most rows need no more.
    for count in (limit,) if total is None else (_FIRST_CANDIDATES, 16 * _FIRST_CANDIDATES, limit):
        ids = _above(z, leading(z, count), floor)
        mass = weights(z[ids], peak).cumsum()
        target = share(top_p, int(mass[-1]) if total is None else total)
        if mass[-1] >= target:
            break
    kept: Ids = ids[: 1 + int(mass.searchsorted(target))]
    return kept


def leading(z: Row, count: int) -> Ids:
    """The first `count` ids in the order (z descending, id ascending), found without sorting the others."""
    candidates = np.flatnonzero(z >= _reached(z, count)) if count < len(z) else np.arange(len(z))
    order = np.argsort(-z[candidates], kind="stable")
    best: Ids = candidates[order[:count]]
    return best


def weights(z: Row, peak: np.float32) -> Ids:
    """exp(z - peak) in units of 2^-40, rounded down: int64, exact to sum over any vocabulary."""
    whole: Ids = (np.exp(z - peak) * np.float32(WEIGHT_ONE)).astype(np.int64)
    return whole


def share(top_p: float, total: int) -> int:
    """The weight a prefix must reach."""
    return max(math.ceil(top_p * float(total)), 1)


def _reached(z: Row, count: int) -> float:
    """A value that at least `count` entries reach, and few more: the count-th best of interleaved blocks' maxima."""
    blocks = len(z) // _BLOCK
    if 4 * count > blocks:
        return _nth_best(z, count)
    return _nth_best(z[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(0), count)


def _nth_best(values: Row, n: int) -> float:
    return float(np.partition(values, len(values) - n)[len(values) - n])


def _floor(peak: np.float32, min_p: float) -> np.float32:
    return peak + np.float32(math.log(min_p)) if min_p > 0 else np.float32(-np.inf)


def _above(z: Row, ids: Ids, floor: np.float32) -> Ids:
    kept: Ids = ids[z[ids] >= floor]
    return kept


def _race(z: Row, floor: np.float32, stream: Stream) -> int:
    """argmax of z + noise over z ≥ floor, the noise worked out only where it can still win.

    Noise is bounded, so that entries far below the leader's score need no draw at all; of the others the draw alone,
    whose cheap upper bound -log(u) ≥ -log(-log(1 - u)) rules nearly all of them out.
    """
    top = int(z.argmax())
    score = z[top] + host_noise(stream, np.array([top]))[0]
    reach = max(floor, score - np.float32(GUMBEL_MAX))
    padded = np.concatenate((z, np.full(-len(z) % LANES, -np.inf, np.float32))).reshape(-1, LANES)
    counters = np.flatnonzero((padded >= reach).any(1))
    near = padded[counters]
    words = host_words(stream, counters)
    bound = np.where(near >= reach, near - np.log((words + 0.5).astype(np.float32) * np.float32(2**-32)), -np.inf)
    # What the bound's leader really scores, less what float32 may have lost.
    leader = np.unravel_index(bound.argmax(), bound.shape)
    score = max(score, near[leader] + host_gumbel(words[leader]))
    rows, lanes = np.nonzero(bound >= score - (1e-3 + 1e-6 * abs(score)))
    scores = near[rows, lanes] + host_gumbel(words[rows, lanes])
    best = int(scores.argmax())  # ids ascend: ties to the lowest
    return int(counters[rows[best]] * LANES + lanes[best])
