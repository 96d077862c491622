"""Partial rotary embedding, NeoX half-split, on the first `rotary_dim` dimensions of each head.

Qwen3.5 interleaves three M-RoPE axes; with text all three positions are equal, so one axis is exact.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from backend.ops.elementwise import cos, sin

Rotary = tuple[Tensor, Tensor]


def rotary_tables(positions: Tensor, rotary_dim: int, theta: float) -> Rotary:
    """positions int64 [B, T] → cos, sin float32 [B, T, 1, rotary_dim], both halves alike.

    Pair i of a head turns by the angle p · theta^(-2i / rotary_dim).
    """
    angles = (positions[..., None] * _frequencies(rotary_dim, theta, positions.device))[:, :, None]
    return cos(angles), sin(angles)


@cache
def _frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [rotary_dim], both halves alike."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return (1.0 / theta**exponents).repeat(2)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [B, T, heads, D] → same shape and dtype; dimensions past the rotary ones pass through."""
    width = cosines.shape[-1]
    x32 = x[..., :width].float()
    a, b = x32.chunk(2, dim=-1)
    turned = (x32 * cosines + torch.cat((-b, a), dim=-1) * sines).to(x.dtype)
    return torch.cat((turned, x[..., width:]), dim=-1)
