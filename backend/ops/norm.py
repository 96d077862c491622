"""Normalisations of Qwen3.5. All compute in float32 and return the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.ops.elementwise import silu


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """RMSNorm: x / sqrt(mean(x²) + eps) · scale over the last dimension; scale float32."""
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * scale).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
    """RMSNorm, then · SiLU(gate). x may be float32; the result has gate's dtype."""
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * scale * silu(gate.float())).to(gate.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σx² + eps) over the last dimension, in float32 (the DeltaNet's q and k)."""
    x32 = x.float()
    return x32 * torch.rsqrt((x32 * x32).sum(-1, keepdim=True) + eps)
