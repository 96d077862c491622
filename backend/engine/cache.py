"""What a sequence remembers: keys and values per attention layer, recurrent state per DeltaNet layer.

The recurrent state is rolled back by deferred commit: rows of a verify step wait beside the committed state until
the engine says how many of them were accepted, and only those are folded in, at the start of the next verify.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.models.config import ModelConfig
from backend.ops.attention import KEY_BLOCK


class KeyValueCache:
    """Keys and values of one layer at absolute positions, [1, Hkv, capacity, D], zero where never written."""

    def __init__(self, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.k = torch.zeros(1, heads, KEY_BLOCK, head_dim, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """k, v [1, R, Hkv, D] to positions start … start + R - 1; grows by whole key blocks."""
        end = start + k.shape[1]
        capacity = self.k.shape[2]
        if end > capacity:
            # Doubling keeps the copying linear in the final length.
            grown = _ceil(max(end, 2 * capacity))
            self.k = torch.cat((self.k, self.k.new_zeros(*self.k.shape[:2], grown - capacity, self.k.shape[3])), dim=2)
            self.v = torch.cat((self.v, self.v.new_zeros(*self.v.shape[:2], grown - capacity, self.v.shape[3])), dim=2)
        self.k[:, :, start:end] = k.transpose(1, 2)
        self.v[:, :, start:end] = v.transpose(1, 2)

    def blocks(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all whole blocks that hold positions below `end`."""
        length = _ceil(end)
        return self.k[:, :, :length], self.v[:, :, :length]


def _ceil(n: int) -> int:
    return -(-n // KEY_BLOCK) * KEY_BLOCK


@dataclass
class PendingRows:
    """Rows a verify step ran but has not committed, exactly as the recurrence consumed them (float32)."""

    k: Tensor  # [1, R, H, dk]
    v: Tensor  # [1, R, H, dv]
    g: Tensor  # [1, R, H]
    beta: Tensor  # [1, R, H]


class DeltaNetState:
    """One DeltaNet layer of one sequence: committed S [1, H, dk, dv] float32, and what may join it."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        heads, width = config.linear_num_value_heads, config.linear_conv_kernel_dim
        channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + heads * config.linear_value_head_dim
        self.S = torch.zeros(1, heads, config.linear_key_head_dim, config.linear_value_head_dim, device=device)
        # Raw convolution inputs: width - 1 committed columns, then those of the pending rows.
        self.columns = torch.zeros(1, width - 1, channels, device=device, dtype=dtype)
        self.pending: PendingRows | None = None


class SequenceCache:
    """All layers of one sequence, and how many of the last verify step's rows were accepted."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.attention: dict[int, KeyValueCache] = {}
        self.deltanet: dict[int, DeltaNetState] = {}
        for layer, kind in enumerate(config.layer_types):
            if kind == "full_attention":
                self.attention[layer] = KeyValueCache(config.num_key_value_heads, config.head_dim, device, dtype)
            else:
                self.deltanet[layer] = DeltaNetState(config, device, dtype)
        self.accepted = 0

    def accept(self, rows: int) -> None:
        """Of the last verify step, `rows` leading rows are now part of the sequence; the rest never happened."""
        self.accepted = rows
