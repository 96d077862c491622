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

    `rows`: M is padded to a multiple of this. `fixed`: the product is split so that M is exactly `rows` each time,
    which is invariant by construction, at the price of reading the weight once per tile.
    """

    rows: int = 4
    fixed: bool = False


def linear(x: Tensor, weight: Tensor, tile: RowTile, packed: bool = False) -> Tensor:
    """x [..., in] @ weight [out, in]ᵀ → [..., out], in x's dtype; differentiable unless the weight is `pack`ed.

    Bitwise: row i of the result is a function of row i of `x` alone (within one build and for a probed `tile`).
    """
    flat = x.reshape(-1, x.shape[-1])  # [M, in]
    count = flat.shape[0]
    padding = -count % tile.rows
    if padding:
        flat = torch.cat((flat, flat[:1].expand(padding, -1)))  # [M', in]
    product = _packed_product if packed else F.linear
    if tile.fixed and flat.shape[0] > tile.rows:
        out = torch.cat([product(part, weight) for part in flat.split(tile.rows)])
    else:
        out = product(flat, weight)  # [M', out]
    if padding:
        out = out[:count]
    return out.view(*x.shape[:-1], -1)


def can_pack(weight: Tensor) -> bool:
    """Does oneDNN, as torch's own compiler uses it, have a faster layout for this weight?"""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack(weight: Tensor) -> Tensor:
    """weight [out, in] in the layout oneDNN reads fastest: opaque, of use to `linear(packed=True)` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def _packed_product(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out
