"""Gumbel noise keyed by (seed, token id, position, choice): what couples draft and target (DESIGN §5).

Counter-based, so the noise of a token does not depend on what else was sampled, in which order, or in which block.
Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
GUMBEL_MAX = 22.9  # no 32-bit draw gives more: -log(-log1p(-2^-33)) = 22.87


def philox4x32(counter: tuple[Words, Words, Words, Words], key: int) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over int64 tensors or arrays holding uint32 values, of shapes that broadcast; `key` is a uint64.

    The integers are the same everywhere.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2^64, which keeps all 64 bits of a 32 × 32 product.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, ids: Tensor, position: int, choice: int = 0) -> Tensor:
    """Noise of full-vocabulary token `ids` (int64 [n]) at an absolute position: float32 [n].

    `seed` is taken modulo 2^64. `position` is the index of the token being chosen; `choice` the i of n.
    """
    key = seed & 0xFFFFFFFFFFFFFFFF
    if ids.device.type == "cpu":  # a hundred operations on a few integers: numpy's take a third of the time
        array = ids.numpy()
        one = np.ones(1, np.int64)
        words = philox4x32((array >> 2, one * position, one * choice, one * 0), key)
        drawn = torch.from_numpy(np.choose(array & 3, words))
    else:
        unit = torch.ones(1, dtype=torch.int64, device=ids.device)
        stacked = torch.stack(philox4x32((ids >> 2, unit * position, unit * choice, unit * 0), key), dim=-1)  # [n, 4]
        drawn = stacked.gather(-1, (ids & 3)[:, None])[:, 0]
    return (-torch.log(-torch.log1p(-(drawn.double() + 0.5) * 2.0**-32))).float()
