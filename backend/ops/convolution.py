"""The short causal depthwise convolution in front of the gated delta rule."""

from __future__ import annotations

from torch import Tensor

from backend.ops.elementwise import silu


def causal_conv_silu(columns: Tensor, taps: Tensor) -> Tensor:
    """columns [B, T + W - 1, C] raw inputs, the first W - 1 being history; taps float32 [W, C], the last for the token.

    Returns SiLU of the convolution, [B, T, C] in columns' dtype: W products summed in fixed order, so that a row is a
    function of its own W columns alone.
    """
    first, *others = (columns.float().unfold(1, len(taps), 1) * taps.t()).unbind(-1)  # W times [B, T, C]
    total = first
    for product in others:  # a reduction's order would be the kernel's choice
        total = total + product
    # The reference implementation rounds the convolution to the model's dtype before the activation.
    return silu(total.to(columns.dtype))
