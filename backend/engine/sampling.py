"""Coupled sampling (DESIGN §5): a token is argmax(processed logits + noise), for target and draft alike.

A choice is a function of one row of logits, the parameters, the seed and the position; nothing else may enter.
Truncations are prefixes of one order: higher logit first, ties to the lower id. The vocabulary is never sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.noise import GUMBEL_MAX, gumbel
from backend.interface import GenerationFailed

_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Effective parameters of one sequence. top_k 0 = off, top_p 1 = off, min_p 0 = off, temperature 0 = greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens of one sequence; `vocab` is the number of decodable ids (rows past it are padding)."""

    params: SamplingParams
    vocab: int

    def choose(self, logits: Tensor, position: int) -> int:
        """logits float32 [V] of the row before `position` → the token id at `position`.

        Raises GenerationFailed when the logits are not numbers.
        """
        logits = logits[: self.vocab]
        top = int(logits.argmax())  # ties to the lowest id
        peak = float(logits[top])
        if not math.isfinite(peak):
            raise GenerationFailed("the model produced logits that are not finite")
        p = self.params
        if p.temperature == 0:
            return top
        z = logits / p.temperature
        ids = self._untruncated(z, top, position) if self._keeps_all() else truncate(z, p.top_k, p.top_p, p.min_p)
        scores = z[ids] + gumbel(p.seed, ids, position, p.choice)
        best = ids[scores == scores.max()]
        return int(best.min())

    def _keeps_all(self) -> bool:
        p = self.params
        return p.top_p >= 1 and p.min_p <= 0 and not 0 < p.top_k < self.vocab

    def _untruncated(self, z: Tensor, top: int, position: int) -> Tensor:
        """Ids that can still win: noise is bounded, so those far below the top's own score need none drawn."""
        top_id = torch.tensor([top], device=z.device)
        bound = z[top] + gumbel(self.params.seed, top_id, position, self.params.choice)[0] - GUMBEL_MAX
        return (z >= bound).nonzero()[:, 0]


def truncate(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids kept by min_p, then top_k (exactly k), then top_p (the smallest prefix reaching it), best first.

    z float32 [V], already divided by the temperature. top_p is measured on what min_p and top_k left.
    """
    limit = top_k if 0 < top_k < len(z) else len(z)
    ids = leading(z, min(limit, _CANDIDATES))
    kept = _prefix(z, ids, limit, top_p, min_p)
    if kept is None:  # the candidates did not reach the cut: decide on the exact order
        kept = _prefix(z, leading(z, limit), limit, top_p, min_p)
    assert kept is not None
    return kept


def _prefix(z: Tensor, ids: Tensor, limit: int, top_p: float, min_p: float) -> Tensor | None:
    """The kept prefix of `ids` (the leading ids of z), or None when the cut lies beyond them."""
    complete = len(ids) == limit
    if min_p > 0:
        floor = z[ids[0]] + math.log(min_p)
        above = ids[z[ids] >= floor]
        if len(above) < len(ids):
            complete = True
        ids = above
    if top_p >= 1:
        return ids if complete else None
    if complete:
        total = z[ids].logsumexp(0)
    elif limit == len(z) and min_p <= 0:
        total = z.logsumexp(0)
    else:
        return None
    mass = (z[ids] - total).exp().cumsum(0)
    keep = 1 + int((mass[:-1] < top_p).sum())
    return ids[:keep] if complete or float(mass[-1]) >= top_p else None


def leading(z: Tensor, count: int) -> Tensor:
    """The first `count` ids in the order (z descending, id ascending): int64 [count]."""
    values, found = z.topk(count, sorted=False)
    cut = values.min()
    above = found[values > cut]
    # topk breaks ties at the cut arbitrarily; take the lowest ids among them.
    equal = (z == cut).nonzero()[: count - len(above), 0]
    ids = torch.cat((above, equal)).sort().values
    return ids[z[ids].sort(descending=True, stable=True).indices]


def token_logprobs(logits: Tensor, token: int, alternatives: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-softmax of the raw logits [V]: that of `token`, and the leading `alternatives` as (id, logprob)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    best = leading(logits, min(alternatives, len(logits))) if alternatives else logits.new_empty(0, dtype=torch.int64)
    pairs = tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return float(logprobs[token]), pairs
