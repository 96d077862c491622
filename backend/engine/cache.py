"""What the engine remembers of its sequences: pages of keys and values, and slots of recurrent state.

Everything a step writes is addressed by position, so a rejected row needs no undoing: it is overwritten before anything
can look at it. Pages are shared by sequences with a common prefix; slots are dense, so that a batch is a slice of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.models.config import ModelConfig
from backend.ops.attention import KEY_BLOCK
from backend.ops.delta_replay import CHUNK, MAX_ROWS, RING, Records, base_of, folded

PAGE = KEY_BLOCK  # positions
COLUMN_RING = 16  # raw convolution inputs kept: MAX_ROWS and the history of the widest supported convolution


class KeyValuePages:
    """Keys and values of some attention layers, [layers, Hkv, pages · PAGE, D]; finite everywhere."""

    def __init__(
        self,
        layers: Iterable[int],
        heads: int,
        head_dim: int,
        pages: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`heads`: of keys and values, each of `head_dim`."""
        self.index = {layer: at for at, layer in enumerate(layers)}
        shape = (len(self.index), heads, pages * PAGE, head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [B, R, Hkv, D] to `places` int64 [B · R], positions in the pool."""
        at = self.index[layer]
        self.k[at].index_copy_(1, places, k.flatten(0, 1).transpose(0, 1))
        self.v[at].index_copy_(1, places, v.flatten(0, 1).transpose(0, 1))

    def read(self, layer: int, pages: Tensor | slice, batch: int) -> tuple[Tensor, Tensor]:
        """All positions of the given pages: keys and values [batch, Hkv, pages of one · PAGE, D].

        `pages`: int64 [batch · n], or for one sequence on neighbouring pages a slice of positions, which is free.
        """
        at = self.index[layer]
        return self._of(self.k[at], pages, batch), self._of(self.v[at], pages, batch)

    def _of(self, pool: Tensor, pages: Tensor | slice, batch: int) -> Tensor:
        heads, _, width = pool.shape
        if isinstance(pages, slice):
            return pool[None, :, pages]
        taken = pool.view(heads, -1, PAGE * width).index_select(1, pages)
        return taken.view(heads, batch, -1, width).transpose(0, 1)

    def clear(self, page: int) -> None:
        """Zero one page: what stood there may have been anything, and a masked infinity is still not a number."""
        self.k[:, :, page * PAGE : (page + 1) * PAGE] = 0
        self.v[:, :, page * PAGE : (page + 1) * PAGE] = 0

    def copy(self, source: int, target: int, rows: int) -> None:
        """The first `rows` positions of one page to another."""
        for pool in (self.k, self.v):
            pool[:, :, target * PAGE : target * PAGE + rows] = pool[:, :, source * PAGE : source * PAGE + rows]


@dataclass
class PromptState:
    """Recurrent state after some prompt rows: S [L, H, dk, dv] float32, the last convolution inputs [L, W - 1, C]."""

    S: Tensor
    columns: Tensor

    def copy(self) -> PromptState:
        return PromptState(self.S.clone(), self.columns.clone())

    @property
    def bytes(self) -> int:
        return self.S.numel() * self.S.element_size() + self.columns.numel() * self.columns.element_size()


class DeltaNetSlots:
    """Recurrent state of the sequences being decoded: sequence i of the batch is slot i, in every layer.

    See `ops/delta_replay`: a base state per slot and rings of what came since. `bases` counts rows as it does.
    """

    def __init__(self, config: ModelConfig, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        kinds = enumerate(config.layer_types)
        self.index = {layer: at for at, layer in enumerate(i for i, kind in kinds if kind == "linear_attention")}
        layers, self.heads = len(self.index), config.linear_num_value_heads
        dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
        self.history = config.linear_conv_kernel_dim - 1
        self.channels = 2 * config.linear_num_key_heads * dk + self.heads * dv
        self.device, self.dtype = device, dtype

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, slots, *shape, device=device, dtype=dtype)

        self.S = zeros(self.heads, dk, dv)
        self.k = zeros(self.heads, RING, dk)
        self.u = zeros(self.heads, RING, dv)
        self.G = zeros(self.heads, RING, dtype=torch.float64)
        self.columns = zeros(COLUMN_RING, self.channels, dtype=dtype)
        self.bases = [0] * slots

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.S, self.k, self.u, self.G, self.columns

    def new_prompt_state(self) -> PromptState:
        layers, _, *shape = self.S.shape
        columns = torch.zeros(layers, self.history, self.channels, device=self.device, dtype=self.dtype)
        return PromptState(torch.zeros(layers, *shape, device=self.device), columns)

    def join(self, slot: int, prompt: PromptState) -> None:
        """Begin decoding after a prompt: its state is the base of the first rows."""
        for tensor in self._tensors:
            tensor[:, slot] = 0
        self.S[:, slot] = prompt.S
        self.columns[:, slot, COLUMN_RING - self.history :] = prompt.columns  # rows -3, -2, -1
        self.bases[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Let the sequence of one slot go on in another."""
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]
        self.bases[target] = self.bases[source]

    def records(self, layer: int, batch: int) -> Records:
        """Views of one layer's first `batch` slots."""
        at = self.index[layer]
        return Records(self.S[at, :batch], self.k[at, :batch], self.u[at, :batch], self.G[at, :batch])

    def advance(self, slot: int, start: int) -> None:
        """Fold what no row from index `start` on can take back."""
        while self.bases[slot] < base_of(start):
            self.S[:, slot] = self.next_base(slot)
            self.bases[slot] += CHUNK

    def next_base(self, slot: int) -> Tensor:
        """S one chunk after the slot's base, [layers, H, dk, dv]."""
        return folded(Records(*(t[:, slot] for t in (self.S, self.k, self.u, self.G))), self.bases[slot])

    @property
    def slot_bytes(self) -> int:
        return sum(tensor[:, 0].numel() * tensor.element_size() for tensor in self._tensors)


class PageTable:
    """Who holds which page: a free list and reference counts. Page 0 belongs to nobody: padding rows write there."""

    def __init__(self, pages: int) -> None:
        self.total = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, after: int | None = None) -> int:
        """A page nobody holds, the neighbour of `after` where that is one. Raises IndexError when none is left."""
        page = self._free.pop()
        wanted = None if after is None else after + 1
        if wanted is not None and page != wanted and wanted in self._free:
            self._free[self._free.index(wanted)] = page
            page = wanted
        self._holders[page] = 1
        return page

    def holders(self, page: int) -> int:
        return self._holders[page]

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less; a page without any is free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


def pages_for(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE)


assert COLUMN_RING >= MAX_ROWS + 3
