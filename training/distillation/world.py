"""The processes of a run: torchrun starts them, each takes its share of every batch, gradients and counts are summed.

One process is the same run: what a step computes depends on the whole batch alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from backend.loading import device_of


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes, on `device`."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process is the one that evaluates, reports and writes."""
        return self.rank == 0

    def share(self, batch: Sequence[int]) -> Sequence[int]:
        """This process's part of a batch, possibly nothing."""
        return batch[self.rank :: self.size]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all processes, in one message per dtype."""
        if self.size == 1:
            return
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            members = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in members])
            for tensor, part in zip(members, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def follow_first(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the first process's."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str) -> Iterator[World]:
    """The world that torchrun's environment names, or one process alone. `device`: auto, cpu, cuda or cuda:N.

    Raises BackendError for a device that is not there.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    at = device_of(device)
    if at.type == "cuda":
        torch.cuda.set_device(at)
    if size > 1:
        dist.init_process_group("nccl" if at.type == "cuda" else "gloo")
    try:
        yield World(rank, size, at)
    finally:
        if size > 1:
            dist.destroy_process_group()
