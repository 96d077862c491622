"""Held-out answers are told apart by whether training has a part of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.evaluate.overlap import GRAM, Learned

ids = st.lists(st.integers(0, 2), max_size=3 * GRAM)
FAR = 248_319


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def grams(tokens: list[int]) -> set[tuple[int, ...]]:
    """As a gram is defined: so many tokens in a row, or all of an answer that has fewer."""
    return {tuple(tokens[i : i + GRAM]) for i in range(max(len(tokens) - GRAM, 0) + 1)}


@given(st.lists(ids, max_size=4), ids)
def test_an_answer_is_known_by_any_gram_that_training_has(training: list[list[int]], answer: list[int]) -> None:
    known = any(grams(one) & grams(answer) for one in training)
    assert Learned(map(array, training)).has_part_of(array(answer)) == known


def test_a_part_is_found_wherever_it_stands_and_one_token_less_is_none() -> None:
    part = list(range(FAR - GRAM + 1, FAR + 1))
    learned = Learned([array([0] * 50), array([1, 2, 3, *part, 4])])
    assert learned.has_part_of(array([9, *part]))
    assert not learned.has_part_of(array([9, *part[:-1], 8]))
    assert not learned.has_part_of(array(part[:-1]))  # an answer as short is known as a whole


def test_without_training_nothing_is_known() -> None:
    assert not Learned([]).has_part_of(array([1] * 40))
