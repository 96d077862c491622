"""The two regimes of law L1 over the engine's memory: how prompt rows and how generated rows see the past.

`PrefillForm` is one chunk of the absolute grid of one prompt, always computed at the full grid width. `VerifyForm` is a
block of generated rows of every sequence of the batch; one row is a plain decode step. Nothing else computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.cache import COLUMN_RING, PAGE, DeltaNetSlots, KeyValuePages, PromptState, pages_for
from backend.models.config import ModelConfig
from backend.ops.attention import cached_attention, visibility
from backend.ops.convolution import causal_conv_silu
from backend.ops.delta_replay import Ahead, Window, base_of, replayed_delta_rule
from backend.ops.delta_rule import chunked_delta_rule

GRID = 64  # prompt rows per prefill chunk; divides PAGE
DELTA_CHUNK = 64  # rows per chunk of the chunked delta rule; divides GRID


@dataclass(frozen=True)
class _Reach:
    """Sequences that look at equally many pages: their rows in the batch (None: all of it), pages and mask."""

    owners: Tensor | None
    batch: int
    pages: Tensor | slice
    mask: Tensor


class PagedRows:
    """R rows of each of B sequences at starts[i], starts[i] + 1, …: where they are kept and what they see.

    `tables[i]` are the pages of sequence i; `counts[i]` of its rows exist, the others are padding whose writes go to
    positions that are yet to come, or to page 0. No row sees a key before `first_key`, save its own.
    """

    def __init__(
        self,
        groups: int,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        first_key: int = 0,
    ) -> None:
        """`groups`: query heads to one of keys and values."""
        positions = [range(start, start + rows) for start in starts]
        places = [
            (pages[at // PAGE] if at // PAGE < len(pages) else 0) * PAGE + at % PAGE
            for pages, row in zip(tables, positions, strict=True)
            for at in row
        ]
        self.positions = torch.tensor([list(row) for row in positions], device=device)  # [B, R]
        self.places = torch.tensor(places, device=device)
        needed = [pages_for(start + count) for start, count in zip(starts, counts, strict=True)]
        self.reaches: list[_Reach] = []
        for length in sorted(set(needed)):
            members = [i for i, n in enumerate(needed) if n == length]
            owners = None if len(members) == len(needed) else torch.tensor(members, device=device)
            at = self.positions if owners is None else self.positions[owners]
            mask = visibility(at, length * PAGE, groups, dtype, first_key)
            pages = _pages([list(tables[i][:length]) for i in members], device)
            self.reaches.append(_Reach(owners, len(members), pages, mask))

    def attend(self, cache: KeyValuePages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, R, Hq, D], k and v [B, R, Hkv, D] → [B, R, Hq, D], after keeping k and v."""
        cache.write(layer, self.places, k, v)
        if len(self.reaches) == 1:
            reach = self.reaches[0]
            return cached_attention(q, *cache.read(layer, reach.pages, reach.batch), reach.mask)
        out = torch.empty_like(q)
        for reach in self.reaches:
            assert reach.owners is not None
            keys, values = cache.read(layer, reach.pages, reach.batch)
            out[reach.owners] = cached_attention(q[reach.owners], keys, values, reach.mask)
        return out


def _pages(tables: list[list[int]], device: torch.device) -> Tensor | slice:
    first, length = tables[0][0], len(tables[0])
    if len(tables) == 1 and tables[0] == list(range(first, first + length)):
        return slice(first * PAGE, (first + length) * PAGE)
    return torch.tensor(tables, device=device).view(-1)


class AttentionForm:
    """Rows over pages of keys and values alone (a drafter's block needs no more)."""

    def __init__(self, rows: PagedRows, cache: KeyValuePages) -> None:
        self._rows, self._cache = rows, cache
        self.positions = rows.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._rows.attend(self._cache, layer, q, k, v)

    def convolve(self, layer: int, columns: Tensor, taps: Tensor) -> Tensor:
        raise TypeError("an attention-only form has no convolution")

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise TypeError("an attention-only form has no recurrent state")


class PrefillForm:
    """Prompt rows [start, start + GRID) of one sequence, of which the first `valid` exist; start is on the grid."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KeyValuePages,
        index: dict[int, int],
        state: PromptState,
        pages: Sequence[int],
        start: int,
        valid: int,
    ) -> None:
        device, dtype = cache.k.device, cache.k.dtype
        self._rows = PagedRows(config.query_groups, [pages], [start], [valid], GRID, device, dtype)
        # Rows past the prompt's end keep nothing: the page may be somebody else's from there on.
        self._rows.places[valid:] = 0
        self.positions = self._rows.positions
        self._cache, self._index, self._state, self._valid = cache, index, state, valid

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._rows.attend(self._cache, layer, q, k, v)

    def convolve(self, layer: int, columns: Tensor, taps: Tensor) -> Tensor:
        history = self._state.columns[self._index[layer]]  # [W - 1, C]
        window = torch.cat((history[None], columns), dim=1)  # [1, W - 1 + GRID, C]
        history.copy_(window[0, self._valid : self._valid + len(history)])
        return causal_conv_silu(window, taps)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        for x in (q, k, v, g, beta):
            x[:, self._valid :] = 0  # rows past the prompt's end must leave the state as it is
        S = self._state.S[self._index[layer]]
        out, after = chunked_delta_rule(q, k, v, g, beta, S[None], DELTA_CHUNK)
        S.copy_(after[0])
        return out


class VerifyForm:
    """Generated rows of the sequences in slots 0 … B - 1: R rows each from `starts`, `counts` of them real.

    `prompts[i]` is the length of sequence i's prompt: rows are counted from there.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KeyValuePages,
        slots: DeltaNetSlots,
        tables: Sequence[Sequence[int]],
        prompts: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        rows: int,
    ) -> None:
        device, dtype = cache.k.device, cache.k.dtype
        self._rows = PagedRows(config.query_groups, tables, starts, counts, rows, device, dtype)
        self.positions = self._rows.positions
        self._cache, self._slots, self._batch = cache, slots, len(tables)
        first = [start - prompt for start, prompt in zip(starts, prompts, strict=True)]
        self._ahead: list[tuple[int, int, Tensor]] = []
        for slot, start in enumerate(first) if slots.index else ():
            slots.advance(slot, start)
            further = next((t for t in range(1, rows) if base_of(start + t) > slots.bases[slot]), None)
            if further is not None:
                self._ahead.append((slot, further, slots.next_base(slot)))
        self._window = Window.at(first, rows, slots.heads, device)
        # Places in the ring of raw columns, of the history and of the rows themselves.
        ring = [
            [slot * COLUMN_RING + index % COLUMN_RING for index in range(start - slots.history, start + rows)]
            for slot, start in enumerate(first)
        ]
        self._taps = torch.tensor(ring, device=device).view(-1)
        self._columns = torch.tensor([row[slots.history :] for row in ring], device=device).view(-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._rows.attend(self._cache, layer, q, k, v)

    def convolve(self, layer: int, columns: Tensor, taps: Tensor) -> Tensor:
        channels = columns.shape[-1]
        ring = self._slots.columns[self._slots.index[layer]].view(-1, channels)
        ring.index_copy_(0, self._columns, columns.reshape(-1, channels))
        return causal_conv_silu(ring.index_select(0, self._taps).view(self._batch, -1, channels), taps)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        at = self._slots.index[layer]
        ahead = [Ahead(owner, first, S[at]) for owner, first, S in self._ahead]
        return replayed_delta_rule(q, k, v, g, beta, self._slots.records(layer, self._batch), self._window, ahead)
