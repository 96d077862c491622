"""At start: which row counts are bitwise equal on this machine, for every distinct projection of the loaded weights.

The prefix law needs one fact of the BLAS below us: that a row's result does not depend on its companions. Where that
holds only for some row counts, projections are padded to those; where it never holds, rows are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.engine.runner import Runner
from backend.models.layers import Linear
from backend.ops.linear import RowTile

_MULTIPLES = (1, 2, 4, 8, 16)
_MOST_ROWS = 64
_CUDA_TILE = RowTile(rows=64, fixed=True)
_PROMPT = (1, 2, 3, 5, 8)
_TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)


@dataclass(frozen=True)
class ProbeReport:
    """What `/version` says: the tile of each projection shape, and whether whole blocks agree with single rows."""

    tiles: dict[str, RowTile]  # "in x out dtype" → tile
    blocks_agree: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "row_tiles": {shape: {"rows": tile.rows, "fixed": tile.fixed} for shape, tile in self.tiles.items()},
            "verify_blocks_bitwise_equal": self.blocks_agree,
        }


def probe(runner: Runner) -> ProbeReport:
    """Set the `tile` of every Linear of the runner's model, then check whole verify blocks against single rows.

    Runs on the calling thread's thread count, which must be the one that serves.
    """
    tiles: dict[str, RowTile] = {}
    for module in runner.model.modules():
        if isinstance(module, Linear):
            outputs, inputs = module.weight.shape
            shape = f"{inputs} x {outputs} {str(module.weight.dtype).removeprefix('torch.')}"
            if shape not in tiles:
                tiles[shape] = find_tile(module.weight)
            module.tile = tiles[shape]
    return ProbeReport(tiles, blocks_agree(runner, _PROMPT, _TOKENS, (2, 3, 5)))


def find_tile(weight: Tensor) -> RowTile:
    """The cheapest RowTile under which rows of `x @ weight.T` are invariant; CUDA always takes fixed tiles."""
    if weight.device.type == "cuda":
        return _CUDA_TILE
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_MOST_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    reference = F.linear(x, weight)
    for rows in _MULTIPLES:
        counts = sorted({*range(rows, 16 * rows, rows), 32, 48, _MOST_ROWS} - {0})
        if all(_rows_agree(x, weight, reference, count) for count in counts if count <= _MOST_ROWS):
            return RowTile(rows)
    return RowTile(1, fixed=True)


def _rows_agree(x: Tensor, weight: Tensor, reference: Tensor, count: int) -> bool:
    """The first and the last `count` rows alone give what they gave among all: neither count nor place matters."""
    first, last = F.linear(x[:count], weight), F.linear(x[-count:], weight)
    return torch.equal(first, reference[:count]) and torch.equal(last, reference[-count:])


def blocks_agree(runner: Runner, prompt: Sequence[int], tokens: Sequence[int], blocks: Sequence[int]) -> bool:
    """Do the logits of forced tokens come out bitwise equal in blocks of one row and in blocks of these sizes?"""
    single = torch.cat([rows.logits for rows in runner.force(prompt, tokens, 1)])
    grouped = torch.cat([rows.logits for rows in runner.force(prompt, tokens, blocks)])
    return torch.equal(single, grouped)
