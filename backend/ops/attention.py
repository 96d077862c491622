"""Softmax attention: over whole sequences (training) and over cached keys (prefill and verify).

Row invariance of the cached form rests on two paddings: query rows to a multiple of `QUERY_ROWS`, and keys to whole
blocks of `KEY_BLOCK` absolute positions, masked where a row may not look. A fully masked block changes nothing, bit
for bit, so neither the cache's length nor the companions of a row can show in its result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_ROWS = 4
KEY_BLOCK = 512


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, T, Hq, D], k and v [B, T, Hkv, D] → [B, T, Hq, D]; softmax scale D^-½; differentiable."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


def visibility(positions: Tensor, length: int, groups: int, dtype: torch.dtype, first_key: int = 0) -> Tensor:
    """The additive mask of `cached_attention`: positions int64 [B, R] → [B, 1, M, length], 0 or -inf.

    A row at position p sees keys first_key … p, and always its own. M is R · groups, padded.
    """
    B, R = positions.shape
    at = positions.view(B, R, 1, 1)
    keys = torch.arange(length, device=positions.device)  # [L]
    hidden = keys > at  # [B, R, 1, L]
    if first_key:
        hidden |= (keys < first_key) & (keys != at)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
    if groups > 1:
        mask = mask.expand(-1, -1, groups, -1)
    mask = mask.reshape(B, 1, R * groups, length)
    padding = -(R * groups) % QUERY_ROWS
    return F.pad(mask, (0, 0, 0, padding)) if padding else mask


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from query rows to cached keys at absolute indices.

    q [B, R, Hq, D]; k, v [B, Hkv, L, D] with L a multiple of KEY_BLOCK, finite everywhere; `mask` of `visibility`.
    Query heads that share a key head become rows of it, so that its keys are read once. Returns [B, R, Hq, D].
    """
    B, R, heads, D = q.shape
    groups = heads // k.shape[1]
    queries = q.view(B, R, k.shape[1], groups, D).transpose(1, 2).reshape(B, k.shape[1], R * groups, D)
    padding = -(R * groups) % QUERY_ROWS
    if padding:
        queries = F.pad(queries, (0, 0, 0, padding))  # [B, Hkv, M, D]
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)[:, :, : R * groups]
    return out.reshape(B, k.shape[1], R, groups, D).transpose(1, 2).reshape(B, R, heads, D)
