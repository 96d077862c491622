"""The engine's memory as one budget: pages that sequences and the prefix cache share, slots for those being decoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.engine.cache import PAGE, DeltaNetSlots, KeyValuePages, PageTable, PromptState
from backend.models.config import ModelConfig


class Memory:
    """Everything a page holds is one allocation a kind: the trunk's keys and values, prompts' hidden states, and the
    keys and values of drafter blocks, made when the first drafter asks for its block's.

    `pages` can be held; page 0 is one more, for padding. `hidden` is [positions, hidden_size].
    """

    def __init__(self, config: ModelConfig, pages: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._pages, self._device, self._dtype = pages + 1, device, dtype
        self.table = PageTable(pages + 1)
        attention = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
        self.cache = self._pool(attention, config.num_key_value_heads, config.head_dim)
        self.slots = DeltaNetSlots(config, slots, device, dtype)
        self.hidden = torch.zeros(self._pages * PAGE, config.hidden_size, device=device, dtype=dtype)
        self._blocks: dict[str, KeyValuePages] = {}

    def renew(self) -> None:
        """Every page is free again. What stood in one is cleared when it is taken."""
        self.table = PageTable(self._pages)

    def block(self, fingerprint: str, heads: int, head_dim: int) -> KeyValuePages:
        """Keys and values of a drafter's block (one attention layer, 0), shared by all that have that block."""
        if fingerprint not in self._blocks:
            self._blocks[fingerprint] = self.new_block(heads, head_dim)
        return self._blocks[fingerprint]

    def has_block(self, fingerprint: str) -> bool:
        return fingerprint in self._blocks

    def new_block(self, heads: int, head_dim: int) -> KeyValuePages:
        """Room for a block's keys and values that nobody uses yet; on any thread, for it takes its time."""
        return self._pool([0], heads, head_dim)

    def block_bytes(self, heads: int, head_dim: int) -> int:
        """Of one block's keys and values in all pages."""
        return 2 * heads * head_dim * self._pages * PAGE * self._dtype.itemsize

    def add_block(self, fingerprint: str, pool: KeyValuePages) -> None:
        """Use `new_block`'s room for that block; without effect where it has some."""
        self._blocks.setdefault(fingerprint, pool)

    def drop_block(self, fingerprint: str) -> None:
        """Let a block's keys and values go, which no drafter will ask for any more."""
        self._blocks.pop(fingerprint, None)

    def take(self, pages: list[int]) -> None:
        """Append a page, zeroed. Raises IndexError when none is free."""
        page = self.table.take(pages[-1] if pages else None)
        for pool in (self.cache, *self._blocks.values()):
            pool.clear(page)
        pages.append(page)

    def copy(self, source: int, target: int, rows: int) -> None:
        """The first `rows` positions of a page to another, with all they hold."""
        for pool in (self.cache, *self._blocks.values()):
            pool.copy(source, target, rows)
        self.hidden[target * PAGE : target * PAGE + rows] = self.hidden[source * PAGE : source * PAGE + rows]

    def places(self, pages: list[int], start: int, count: int) -> Tensor:
        """Where positions start … start + count - 1 of a sequence on these pages are kept: int64 [count]."""
        positions = torch.arange(start, start + count, device=self._device)
        held = torch.tensor(pages, device=self._device)
        return held[positions // PAGE] * PAGE + positions % PAGE

    def _pool(self, layers: list[int], heads: int, head_dim: int) -> KeyValuePages:
        return KeyValuePages(layers, heads, head_dim, self._pages, self._device, self._dtype)


@dataclass
class Place:
    """What one sequence holds. `slot` is None until its prompt has been run, `state` until a row of it has."""

    prompt: int  # its length
    pages: list[int] = field(default_factory=list)
    state: PromptState | None = None
    slot: int | None = None


def page_bytes(config: ModelConfig, dtype: torch.dtype, blocks: Iterable[tuple[int, int]]) -> int:
    """Of one page with everything in it. `blocks`: key heads and their width of each drafter block."""
    layers = [(config.num_key_value_heads, config.head_dim) for kind in config.layer_types if kind == "full_attention"]
    keys_and_values = sum(2 * heads * head_dim for heads, head_dim in (*layers, *blocks))
    return PAGE * (keys_and_values + config.hidden_size) * dtype.itemsize
