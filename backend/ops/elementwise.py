"""Transcendental functions whose results do not depend on where in a tensor an element stands.

torch's CPU loops use vector instructions for whole vectors and scalar library calls for the tail, and the two differ
in the last bit; a loop over enough elements is also cut at arbitrary places for threads. Here every call starts on
a row, ends on a whole vector and stays below the threading grain, so a row's bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LOOP_BYTES = 128  # twice the widest vector: the unit of torch's unrolled vector loop
GRAIN = 32768  # elements up to which torch runs an elementwise loop on one thread


def exp(x: Tensor) -> Tensor:
    """e^x over [..., W], same shape and dtype."""
    return _rowwise(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) over [..., W]."""
    return _rowwise(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) over [..., W]."""
    return _rowwise(F.silu, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) over [..., W]."""
    return _rowwise(F.softplus, x)


def cos(x: Tensor) -> Tensor:
    """cosine over [..., W]."""
    return _rowwise(torch.cos, x)


def sin(x: Tensor) -> Tensor:
    """sine over [..., W]."""
    return _rowwise(torch.sin, x)


def _rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # Gradients are never compared bit by bit, and other devices have no scalar tails.
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return function(x)
    width, lanes = x.shape[-1], LOOP_BYTES // x.element_size()
    if width % lanes == 0 and x.is_contiguous() and _threads_end_on_vectors(x.numel(), lanes):
        return function(x)
    flat = x.reshape(-1, width).contiguous()
    padding = -width % lanes
    if padding:
        flat = F.pad(flat, (0, padding))
    rows = max(GRAIN // (width + padding), 1)
    out = function(flat) if len(flat) <= rows else torch.cat([function(part) for part in flat.split(rows)])
    return out[:, :width].reshape(x.shape)


def _threads_end_on_vectors(count: int, lanes: int) -> bool:
    """Does every thread's share of a loop over `count` elements end on a whole vector?"""
    if count <= GRAIN:
        return True
    shares = min(torch.get_num_threads(), -(-count // GRAIN))
    return -(-count // shares) % lanes == 0
