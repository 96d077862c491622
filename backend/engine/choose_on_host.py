"""A token from one row of logits in host memory, looking closely at as few entries as the row allows (DESIGN §5).

argmax(z + noise) over what min_p, then top_k, then top_p keep of z = logits / temperature; truncations are prefixes of
one order: higher z first, ties to the lower id. All in numpy, a row at a time: a choice's bits are the row's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from backend.engine.noise import GUMBEL_MAX, LANES, Stream, host_gumbel, host_noise, host_words
from backend.engine.parameters import SamplingParams

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

WEIGHT_ONE = (
    2.0**40
)  # probabilities are summed as integers, so that no sum depends on its order: 2^40 is the likeliest's
_FEW = 1024
_BLOCK = 64
_PIECE = 65_536


def choose(logits: Row, params: SamplingParams, position: int) -> int:
    """The token at `position` from logits float32 [V]. Some token, should they not be finite."""
    top = int(logits.argmax())  # ties to the lowest id
    if params.greedy or not math.isfinite(logits[top]):
        return top
    z = logits if params.temperature == 1 else logits / np.float32(params.temperature)
    stream = Stream(params.seed, position, params.choice)
    if 0 < params.top_k < len(z) or params.top_p < 1:
        ids = truncate(z, params.top_k, params.top_p, params.min_p)
        if len(ids) <= _FEW:
            return int(ids[(z[ids] + host_noise(stream, ids)).argmax()])
        kept = np.full_like(z, -np.inf)
        kept[ids] = z[ids]
        return _race(kept, np.float32(-np.inf), stream)
    return _race(z, _floor(z.max(), params.min_p), stream)


def truncate(z: Row, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids kept by min_p, then top_k (exactly k), then top_p (the smallest prefix reaching it), ascending.

    z float32 [V], already divided by the temperature. top_p is measured on what min_p and top_k left.
    """
    peak = z.max()
    floor = _floor(peak, min_p)
    limited = 0 < top_k < len(z)
    if not limited and top_p >= 1:
        return np.flatnonzero(z >= floor)
    ids = leading(z, top_k if limited else _FEW)
    ids = ids[z[ids] >= floor]
    if top_p < 1:
        mass = weights(z[ids], peak).cumsum()
        total = mass[-1] if limited else sum(weights(p[p >= floor], peak).sum() for p in _pieces(z))
        target = share(top_p, int(total))
        if mass[-1] < target:  # not among a few: rare, unless the model has no idea
            return _reaching(z, target, peak)
        ids = ids[: 1 + mass.searchsorted(target)]
    return np.sort(ids)


def leading(z: Row, count: int) -> Ids:
    """The first `count` ids in the order (z descending, id ascending), found without sorting the others."""
    candidates = np.flatnonzero(z >= _reached(z, count)) if 0 < count < len(z) else np.arange(len(z))
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


def _reaching(z: Row, target: int, peak: np.float32) -> Ids:
    """Ids of the smallest prefix, in the order of `leading`, whose weights reach `target`, ascending."""
    best, count = -np.sort(-z), 0
    for piece in _pieces(best):
        mass = weights(piece, peak).cumsum()
        if mass[-1] >= target:
            count += 1 + int(mass.searchsorted(target))
            break
        count, target = count + len(piece), target - int(mass[-1])
    last = best[count - 1]
    above = np.flatnonzero(z > last)
    return np.sort(np.concatenate((above, np.flatnonzero(z == last)[: count - len(above)])))


def _pieces(z: Row) -> Iterator[Row]:
    """What stays in a core's cache while it is worked on, and in the allocator's hands when it is not."""
    return (z[start : start + _PIECE] for start in range(0, len(z), _PIECE))


def _race(z: Row, floor: np.float32, stream: Stream) -> int:
    """argmax of z + noise over z ≥ floor, the noise worked out only where it can still win.

    Noise is bounded, so that entries far below the best score so far need no draw at all; of the others the draw
    alone, whose cheap upper bound -log(u) ≥ -log(-log(1 - u)) rules nearly all of them out.
    """
    best = int(z.argmax())
    score = z[best] + host_noise(stream, np.array([best]))[0]
    for start, piece in zip(range(0, len(z), _PIECE), _pieces(z), strict=True):
        quads = np.concatenate((piece, np.full(-len(piece) % LANES, -np.inf, np.float32))).reshape(-1, LANES)
        a, b, c, d = quads.T
        reach = max(floor, score - np.float32(GUMBEL_MAX))
        counters = np.flatnonzero(np.maximum(np.maximum(a, b), np.maximum(c, d)) >= reach)
        if not len(counters):
            continue
        near = quads[counters].ravel()
        words = host_words(stream, counters + start // LANES).ravel()
        bound = near - np.log((words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32))
        bound[near < floor] = -np.inf
        leader = bound.argmax()
        bar = max(score, near[leader] + host_gumbel(words[leader]))
        hopes = np.flatnonzero(bound >= bar - (1e-3 + 1e-6 * abs(bar)))  # less what float32 may have lost
        if not len(hopes):
            continue
        scores = near[hopes] + host_gumbel(words[hopes])
        winner = scores.argmax()  # ids ascend: ties to the lowest
        token = start + int(counters[hopes[winner] // LANES]) * LANES + int(hopes[winner]) % LANES
        if scores[winner] > score or (scores[winner] == score and token < best):
            best, score = token, scores[winner]
    return best
