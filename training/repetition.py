"""Repetition in answers, as token ids: a drafter foresees a loop easily, so acceptance alone would reward it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_GRAM = 4
_LOOP_GRAM, _LOOP_COUNT = 8, 3


def loops(ids: Sequence[int]) -> bool:
    """Whether some 8 tokens in a row stand three times in the answer."""
    counts = Counter(tuple(ids[i : i + _LOOP_GRAM]) for i in range(len(ids) - _LOOP_GRAM + 1))
    return any(count >= _LOOP_COUNT for count in counts.values())


def distinct_ratio(answers: Sequence[Sequence[int]]) -> float:
    """Different 4-grams over all 4-grams, each answer counted by itself; 1.0 where there are none."""
    grams = [[tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)] for ids in answers]
    total = sum(map(len, grams))
    return sum(len(set(found)) for found in grams) / total if total else 1.0
