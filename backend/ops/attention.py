"""Softmax attention: over whole sequences (training) and over a key-value cache (prefill and verify).

Row invariance of the cached form rests on two paddings: query rows to a multiple of `QUERY_ROWS`, and keys to whole
blocks of `KEY_BLOCK` absolute positions whose unused tail is zero and masked. A fully masked block changes nothing,
bit for bit, so neither the cache's length nor the companions of a row can show in its result.
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


def cached_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, first_key: int = 0) -> Tensor:
    """Attend from query rows at absolute `positions` to cached keys at absolute indices.

    q [1, R, Hq, D]; k, v [1, Hkv, L, D] with L a multiple of KEY_BLOCK, finite everywhere; positions int64 [R].
    A row sees keys first_key … its own position (and always its own). Returns [1, R, Hq, D].
    """
    rows = q.shape[1]
    padding = -rows % QUERY_ROWS
    queries = F.pad(q, (0, 0, 0, 0, 0, padding)).transpose(1, 2)  # [1, Hq, R', D]
    at = F.pad(positions, (0, padding))[:, None]  # [R', 1]
    keys = torch.arange(k.shape[2], device=q.device)[None]  # [1, L]
    visible = (keys <= at) & ((keys >= first_key) | (keys == at))  # [R', L]
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=visible, enable_gqa=True)
    return out[:, :, :rows].transpose(1, 2)
