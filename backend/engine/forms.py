"""The two regimes of law L1 over a sequence's cache: how prompt rows and how generated rows see the past.

`PrefillForm` is one chunk of the absolute grid, always computed at the full grid width. `VerifyForm` is a block of
generated rows run through the sequential recurrence; one row is a plain decode step. Nothing else computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.engine.cache import DeltaNetState, KeyValueCache, PendingRows, SequenceCache
from backend.ops.attention import cached_attention
from backend.ops.convolution import causal_conv_silu
from backend.ops.delta_rule import chunked_delta_rule, recurrent_delta_rule

GRID = 64  # prompt rows per prefill chunk
DELTA_CHUNK = 64  # rows per chunk of the chunked delta rule; divides GRID


class AttentionForm:
    """Rows at start, start + 1, … of one sequence over key-value caches alone (the MTP block needs no more)."""

    def __init__(self, caches: dict[int, KeyValueCache], start: int, rows: int, valid: int, first_key: int = 0) -> None:
        device = next(iter(caches.values())).k.device if caches else None
        self.positions = torch.arange(start, start + rows, device=device)[None]  # [1, R]
        self.caches = caches
        self.start = start
        self.valid = valid
        self.first_key = first_key

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.caches[layer]
        skip = max(self.first_key - self.start, 0)
        if self.valid > skip:
            cache.write(self.start + skip, k[:, skip : self.valid], v[:, skip : self.valid])
        keys, values = cache.blocks(self.start + q.shape[1])
        return cached_attention(q, keys, values, self.positions[0], self.first_key)

    def convolve(self, layer: int, columns: Tensor, weight: Tensor) -> Tensor:
        raise TypeError("an attention-only form has no convolution")

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise TypeError("an attention-only form has no recurrent state")


class PrefillForm(AttentionForm):
    """Prompt rows [start, start + GRID) of which the first `valid` exist; start is a multiple of GRID."""

    def __init__(self, cache: SequenceCache, start: int, valid: int) -> None:
        super().__init__(cache.attention, start, GRID, valid)
        self.deltanet = cache.deltanet

    def convolve(self, layer: int, columns: Tensor, weight: Tensor) -> Tensor:
        state = self.deltanet[layer]
        history = weight.shape[-1] - 1
        window = torch.cat((state.columns, columns), dim=1)  # [1, history + GRID, C]
        state.columns = window[:, self.valid : self.valid + history].clone()
        return causal_conv_silu(window, weight)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state = self.deltanet[layer]
        for x in (q, k, v, g, beta):
            x[:, self.valid :] = 0  # rows past the prompt's end must leave the state as it is
        out, state.S = chunked_delta_rule(q, k, v, g, beta, state.S, DELTA_CHUNK)
        return out


class VerifyForm(AttentionForm):
    """Generated rows at start, start + 1, …; commits the rows accepted from the step before, keeps its own pending."""

    def __init__(self, cache: SequenceCache, start: int, rows: int) -> None:
        super().__init__(cache.attention, start, rows, rows)
        self.deltanet = cache.deltanet
        self.accepted = cache.accepted

    def convolve(self, layer: int, columns: Tensor, weight: Tensor) -> Tensor:
        state = self.deltanet[layer]
        history = weight.shape[-1] - 1
        committed = state.columns[:, self.accepted : self.accepted + history]
        state.columns = torch.cat((committed, columns), dim=1)
        return causal_conv_silu(state.columns, weight)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state = self.deltanet[layer]
        self._fold(state)
        state.pending = PendingRows(k, v, g, beta)
        return recurrent_delta_rule(q, k, v, g, beta, state.S)[0]

    def _fold(self, state: DeltaNetState) -> None:
        rows, count = state.pending, self.accepted
        if rows is not None and count:
            k = rows.k[:, :count]
            state.S = recurrent_delta_rule(
                torch.zeros_like(k), k, rows.v[:, :count], rows.g[:, :count], rows.beta[:, :count], state.S
            )[1]
