"""The seam between the model's weights and its regimes (law L1).

A form says how rows of tokens see the past: `CausalForm` here is whole sequences without a cache (training); the
engine adds the prefill and verify forms over its caches. The trunk is written once, against this protocol.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.ops.attention import causal_attention
from backend.ops.convolution import causal_conv_silu
from backend.ops.delta_rule import chunked_delta_rule


class Form(Protocol):
    """B sequences × T rows. `layer` is the trunk's layer index and keys the form's caches."""

    positions: Tensor  # int64 [B, T], absolute

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, Hq, D], k and v [B, T, Hkv, D], rotated → [B, T, Hq, D]."""

    def convolve(self, layer: int, columns: Tensor, taps: Tensor) -> Tensor:
        """Raw qkv columns [B, T, C], taps float32 [W, C] → SiLU of the causal convolution [B, T, C]."""

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k [B, T, H, dk], v [B, T, H, dv], g and beta [B, T, H], all float32 → [B, T, H, dv]."""


class CausalForm:
    """Whole sequences that start at position `start`, differentiable, no cache."""

    def __init__(self, batch: int, length: int, chunk: int = 32, start: int = 0, device: torch.device | None = None):
        self.positions = torch.arange(start, start + length, device=device).expand(batch, length)
        self.chunk = chunk

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v)

    def convolve(self, layer: int, columns: Tensor, taps: Tensor) -> Tensor:
        return causal_conv_silu(F.pad(columns, (0, 0, len(taps) - 1, 0)), taps)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        return chunked_delta_rule(q, k, v, g, beta, state, self.chunk)[0]
