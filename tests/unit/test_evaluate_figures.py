"""Ratios over documents, their intervals, and differences that are paired."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluate.figures import Bootstrap, Walked
from training.evaluate.walk import DocumentCounts


def test_a_figure_weighs_documents_by_their_n() -> None:
    figure = Bootstrap(2, 200, seed=1).figure((np.array([1.0, 30.0]), np.array([10.0, 40.0])))
    assert (figure.value, figure.n) == (31 / 50, 50)
    assert figure.low == pytest.approx(0.1)  # only the first document drawn
    assert figure.high == pytest.approx(0.75)


def test_nothing_to_divide_by_is_told_as_such() -> None:
    figure = Bootstrap(3, 20, seed=1).figure((np.zeros(3), np.zeros(3)))
    assert (figure.value, figure.low, figure.high, figure.n) == (None, None, None, 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=2, max_size=20), st.integers(0, 2**32))
def test_intervals_are_a_function_of_the_seed_and_lie_among_the_documents(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    hits = np.array([min(pair) for pair in pairs], float)
    tried = np.array([max(pair) for pair in pairs], float)
    figure = Bootstrap(len(pairs), 50, seed).figure((hits, tried))
    assert figure == Bootstrap(len(pairs), 50, seed).figure((hits, tried))
    assert figure.low is not None
    assert figure.high is not None
    assert (hits / tried).min() - 1e-12 <= figure.low <= figure.high <= (hits / tried).max() + 1e-12


def test_a_constant_lead_on_each_document_has_no_interval_although_the_figures_have_one() -> None:
    rng = np.random.default_rng(0)
    tried = np.full(30, 20.0)
    theirs = rng.integers(0, 16, 30).astype(float)
    bootstrap = Bootstrap(30, 300, seed=2)
    found = bootstrap.difference((theirs + 2, tried), (theirs, tried))
    assert found.value == pytest.approx(0.1)
    assert found.low == pytest.approx(found.high)
    alone = bootstrap.figure((theirs, tried))
    assert alone.high is not None
    assert alone.low is not None
    assert alone.high - alone.low > 0.1


def test_walked_counts_become_the_three_per_slot_words_and_tau() -> None:
    counts = [DocumentCounts("a", 4, (3, 3), (3, 2), (2, 1)), DocumentCounts("b", 2, (2, 1), (2, 1), (2, 1))]
    found = Walked.of(counts).figures(Bootstrap(2, 20, seed=0))
    assert (found["steps"], found["proposed"], found["accepted"]) == (6, [5, 4], [4, 2])
    assert [one.value for one in found["surv"]] == [4 / 5, 2 / 4]
    assert [one.value for one in found["cond"]] == [4 / 5, 2 / 3]
    assert found["chain"].value == pytest.approx(6 / 9)
    assert found["tau"].value == pytest.approx(1 + 6 / 6)
