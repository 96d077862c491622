"""Partial rotary embedding, NeoX half-split, on the first `rotary_dim` dimensions of each head.

Qwen3.5 interleaves three M-RoPE axes; with text all three positions are equal, so one axis is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.ops.elementwise import cos, sin

Rotary = tuple[Tensor, Tensor]


def rotary_tables(positions: Tensor, rotary_dim: int, theta: float) -> Rotary:
    """positions int64 [B, T] → cos, sin float32 [B, T, 1, rotary_dim / 2].

    Pair i of a head turns by the angle p · theta^(-2i / rotary_dim).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    return cos(angles)[:, :, None], sin(angles)[:, :, None]


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [B, T, heads, D] → same shape and dtype; dimensions past the rotary ones pass through."""
    half = cosines.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    a32, b32 = a.float(), b.float()
    turned = torch.cat((a32 * cosines - b32 * sines, b32 * cosines + a32 * sines), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1)
