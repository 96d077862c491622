"""The short causal depthwise convolution in front of the gated delta rule."""

from __future__ import annotations

from torch import Tensor

from backend.ops.elementwise import silu


def causal_conv_silu(columns: Tensor, weight: Tensor) -> Tensor:
    """columns [B, T + W - 1, C] raw inputs, the first W - 1 being history; weight [C, 1, W], last tap = current token.

    Returns SiLU of the convolution, [B, T, C] in columns' dtype. Written as W shifted products in fixed order, so a
    row is a function of its own W columns alone.
    """
    width = weight.shape[-1]
    rows = columns.shape[1] - width + 1
    taps = weight.float().squeeze(1).t()  # [W, C]
    x = columns.float()
    total = x[:, :rows] * taps[0]
    for tap in range(1, width):
        total = total + x[:, tap : tap + rows] * taps[tap]
    # The reference implementation rounds the convolution to the model's dtype before the activation.
    return silu(total.to(columns.dtype).float()).to(columns.dtype)
