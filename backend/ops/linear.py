"""Row-invariant linear projections: a row's result never depends on how many rows came with it.

BLAS picks its kernel by the row count M, so the same row can differ in its last bits between M = 1 and M = 64. A
`RowTile` restricts M to values that agree; `engine/probe.py` finds the cheapest one that holds on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RowTile:
    """How many rows a matrix product may have.

    `rows`: M is zero-padded to a multiple of this. `fixed`: the product is split so that M is exactly `rows` each
    time, which is invariant by construction, at the price of reading the weight once per tile.
    """

    rows: int = 4
    fixed: bool = False


def linear(x: Tensor, weight: Tensor, tile: RowTile) -> Tensor:
    """x [..., in] @ weight [out, in]ᵀ → [..., out], in x's dtype, differentiable.

    Bitwise: row i of the result is a function of row i of `x` alone (within one build and for a probed `tile`).
    """
    lead = x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])  # [M, in]
    count = flat.shape[0]
    padding = -count % tile.rows
    if padding:
        flat = F.pad(flat, (0, 0, 0, padding))  # [M', in]
    if tile.fixed and flat.shape[0] > tile.rows:
        out = torch.cat([F.linear(part, weight) for part in flat.split(tile.rows)])
    else:
        out = F.linear(flat, weight)  # [M', out]
    return out[:count].reshape(*lead, weight.shape[0])
