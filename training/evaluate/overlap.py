"""Held-out answers that say what answers of training say: whoever learned these may know them by heart.

Knows token ids alone. Grams are compared by hash: of 20 million against 2 million one pair in 400,000 runs collides.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

GRAM = 13  # tokens in a row
_FACTORS = np.random.default_rng(GRAM).integers(2**64, size=GRAM, dtype=np.uint64, endpoint=False)


class Learned:
    """Answers of training, as the grams in them; one shorter than a gram is one as a whole."""

    def __init__(self, answers: Iterable[NDArray[np.int32]]) -> None:
        self._grams = np.unique(np.concatenate([np.empty(0, np.uint64), *map(_grams, answers)]))

    def has_part_of(self, answer: NDArray[np.int32]) -> bool:
        """Whether some gram of the answer is one of theirs."""
        grams = _grams(answer)
        places = np.searchsorted(self._grams, grams)
        inside = places < len(self._grams)
        return bool((self._grams[places[inside]] == grams[inside]).any())


def _grams(answer: NDArray[np.int32]) -> NDArray[np.uint64]:
    ids = answer.astype(np.uint64) + np.uint64(1)  # so that no token is as none
    if len(ids) < GRAM:
        ids = np.pad(ids, (0, GRAM - len(ids)))
    grams: NDArray[np.uint64] = np.lib.stride_tricks.sliding_window_view(ids, GRAM) @ _FACTORS
    return grams
