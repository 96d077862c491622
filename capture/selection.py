"""Which rows of many are taken: a sample that is the same every time, no near-duplicates, no loops.

Knows ids of rows and token ids; knows no file, no format and no tokenizer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOOP_GRAM, LOOP_COUNT = 8, 3
KEY_BITS = 63  # of a sample key: SQLite's integers are signed

SHINGLE = 5  # tokens
HASHES, BANDS = 64, 16
NEAR = 0.8  # of two texts' shingles, the share that both have
REMEMBERED = 1 << 17  # rows; older ones are forgotten
SLOT_BITS = 19
SLOTS = 1 << SLOT_BITS  # of each band
LEAST_PROMPT = 32  # tokens of the prompt's end that count, however short the answer

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sample:
    """So many rows, or so large a share of them; `seed` chooses which."""

    rows: int | None = None
    share: float | None = None
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Sample:
        """Of "500", "0.1" or "10%". Raises ValueError."""
        number, percent, rest = text.strip().partition("%")
        if number.isdecimal() and not percent:
            if int(number) < 1:
                raise ValueError("a sample has at least one row")
            return cls(rows=int(number), seed=seed)
        share = float(number) / (100 if percent else 1)
        if rest or not 0 < share < 1:
            raise ValueError("a share lies between 0 and 1")
        return cls(share=share, seed=seed)


def sample_key(row_id: str, seed: int) -> int:
    """Where a row stands in the order in which samples of a seed take rows: 0 … 2**63 - 1, evenly spread."""
    digest = hashlib.blake2b(f"{seed}/{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 64 - KEY_BITS


def loops(ids: NDArray[np.uint32]) -> bool:
    """Whether some 8 tokens in a row stand three times in the answer."""
    if len(ids) < LOOP_GRAM + LOOP_COUNT - 1:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, dtype=np.uint32), LOOP_GRAM)
    as_one = np.ascontiguousarray(grams).view(np.dtype((np.void, 4 * LOOP_GRAM))).ravel()
    return bool(np.unique(as_one, return_counts=True)[1].max() >= LOOP_COUNT)


class NearDuplicates:
    """`seen` each row in turn: whether one of the last 2**17 that were new says nearly the same.

    That is: of the answers, and of as much of the ends of what was asked, 0.8 of the runs of 5 tokens are the same.
    Both are estimated by 64 minhashes, and rows to compare are looked up by 16 bands of them in tables of fixed size:
    with 0.9 in common a row is found nearly always. At most 110 MB, however many rows there are.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._factors = random.integers(1, 2**64, (HASHES, 1), dtype=np.uint64) | np.uint64(1)
        self._offsets = random.integers(0, 2**64, (HASHES, 1), dtype=np.uint64)
        self._signatures = np.zeros((REMEMBERED, 2, HASHES), dtype=np.uint32)
        self._slots = np.zeros((BANDS, SLOTS), dtype=np.int32)  # 1 + the place of a signature; 0 is none
        self._next = 0

    def seen(self, prompt: NDArray[np.uint32], completion: NDArray[np.uint32]) -> bool:
        asked = prompt[-max(len(completion), LEAST_PROMPT) :]
        signature = np.stack([self._signature(asked), self._signature(completion)])  # [2, hashes]
        keys = np.zeros(BANDS, dtype=np.uint64)
        for part in signature.reshape(-1, BANDS):  # a hash of every band, four times asked and four times answered
            keys = (keys ^ part) * _MIX
            keys ^= keys >> np.uint64(29)
        at = np.arange(BANDS), (keys >> np.uint64(KEY_BITS + 1 - SLOT_BITS)).astype(np.int64)
        found = np.unique(self._slots[at])
        found = found[found > 0] - 1
        if len(found) and ((self._signatures[found] == signature).mean(axis=2) >= NEAR).all(axis=1).any():
            return True
        self._signatures[self._next] = signature
        self._slots[at] = self._next + 1
        self._next = (self._next + 1) % REMEMBERED
        return False

    def _signature(self, tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The least of each hash over all shingles; of fewer tokens than one has, over them all as one."""
        ids = tokens.astype(np.uint64) + np.uint64(1)
        shingles = np.zeros(max(1, len(ids) - SHINGLE + 1), dtype=np.uint64)
        for i in range(min(SHINGLE, len(ids))):
            shingles = (shingles ^ ids[i : i + len(shingles)]) * _MIX
            shingles ^= shingles >> np.uint64(29)
        shingles = np.unique(shingles)
        least = np.full(HASHES, 2**32 - 1, dtype=np.uint32)
        for start in range(0, len(shingles), 4096):  # 2 MB at a time, however long the row
            hashes = (shingles[start : start + 4096] * self._factors + self._offsets) >> np.uint64(32)
            np.minimum(least, hashes.min(axis=1).astype(np.uint32), out=least)
        return least
