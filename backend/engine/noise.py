"""Gumbel noise keyed by (seed, token id, position, choice): what couples draft and target (DESIGN §5).

Counter-based, so the noise of a token does not depend on what else was sampled, in which order, or in which block.
Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Four ids share a
counter. numpy on the host, whose functions do not care where in an array an element stands; torch on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
GUMBEL_MAX = 22.9  # no 32-bit draw gives more: -log(-log1p(-2^-33)) = 22.87
LANES = 4  # ids per counter
_PIECE = 16384  # counters


@dataclass(frozen=True)
class Stream:
    """The noise of one position: seed (uint64), absolute index of the token being chosen, and choice i of n."""

    seed: int
    position: int
    choice: int = 0


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor] | tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over int64 holding uint32 values, of shapes that broadcast; `key` is (low word, high word).

    The integers are the same everywhere.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64, which keeps all 64 bits of a 32 × 32 product.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """The two key words of a seed, which is taken modulo 2^64."""
    return seed & _MASK, (seed >> 32) & _MASK


def host_words(stream: Stream, counters: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The draws of ids 4c, 4c + 1, 4c + 2, 4c + 3 for each counter c: int64 [n] → uint32 [n, 4].

    `philox4x32` in pieces that stay in a core's cache, and with half the masks: high halves that no product meets
    may hold anything.
    """
    out = np.empty((len(counters), LANES), np.uint32)
    half, mask, m0, m1 = (np.array([value], np.uint64) for value in (32, _MASK, _M0, _M1))
    for start in range(0, len(counters), _PIECE):
        c0 = counters[start : start + _PIECE].astype(np.uint64)
        c1, c2, c3 = (np.array([value], np.uint64) for value in (stream.position, stream.choice, 0))
        k0, k1 = (np.array([word], np.uint64) for word in split_seed(stream.seed))
        for _ in range(10):
            p0, p1 = c0 * m0, c2 * m1
            c0, c1, c2, c3 = ((p1 >> half) ^ (c1 ^ k0)) & mask, p1, ((p0 >> half) ^ (c3 ^ k1)) & mask, p0
            k0, k1 = (k0 + _W0) & mask, (k1 + _W1) & mask
        piece = out[start : start + _PIECE]
        for lane, word in enumerate((c0, c1, c2, c3)):
            piece[:, lane] = word & mask
    return out


def host_gumbel(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Noise of uint32 draws, any shape."""
    uniform = (words + 0.5) * 2.0**-32
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-uniform))).astype(np.float32)
    return noise


def host_noise(stream: Stream, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Noise of full-vocabulary token ids: int64 [n] → float32 [n]."""
    words = host_words(stream, ids // LANES)
    return host_gumbel(np.take_along_axis(words, ids[:, None] % LANES, axis=-1)[:, 0])


class Streams(Protocol):
    """One stream a row, each word int64 [M, 1]."""

    @property
    def key_low(self) -> Tensor: ...
    @property
    def key_high(self) -> Tensor: ...
    @property
    def position(self) -> Tensor: ...
    @property
    def choice(self) -> Tensor: ...


def device_noise(streams: Streams, ids: Tensor) -> Tensor:
    """Noise of token ids: int64 [M, n] → float32 [M, n]."""
    words = _device_words(streams, ids >> 2)  # [M, n, 4]
    return _device_gumbel(words.gather(-1, (ids & 3)[..., None])[..., 0])


def device_vocabulary_noise(streams: Streams, vocab: int) -> Tensor:
    """Noise of every id below `vocab`: float32 [M, vocab]."""
    counters = torch.arange(-(-vocab // LANES), device=streams.position.device)[None]  # [1, ⌈V/4⌉]
    return _device_gumbel(_device_words(streams, counters).flatten(-2)[:, :vocab])


def _device_words(streams: Streams, counters: Tensor) -> Tensor:
    choice = streams.choice
    counter = (counters, streams.position, choice, torch.zeros_like(choice))
    return torch.stack(philox4x32(counter, (streams.key_low, streams.key_high)), dim=-1)


def _device_gumbel(words: Tensor) -> Tensor:
    return (-torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))).float()
