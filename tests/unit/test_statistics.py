"""The engine's counters, by DESIGN §6's words: what a slot's figures stand for, whose they are, how long they last."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backend.engine.statistics as statistics_module
from backend.engine.statistics import SpeculationCounts, TimedStep
from backend.interface import DrafterStats, Step, StepTimes

STEPS = st.lists(st.integers(0, 4).flatmap(lambda k: st.builds(Step, st.just(k), st.integers(0, k))), max_size=30)


class Clock:
    """The module's, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(statistics_module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def counted(*steps: Step, slots: int) -> DrafterStats:
    counts = SpeculationCounts(["mtp"], slots)
    for step in steps:
        counts.add("mtp", step)
    (stats,) = counts.snapshot()
    return stats


def test_a_slot_is_accepted_only_with_all_before_it() -> None:
    stats = counted(Step(3, 3), Step(3, 1), Step(2, 0), Step(1, 1), Step(0, 0), slots=3)
    assert stats == DrafterStats("mtp", 4, (4, 3, 2), (3, 1, 1), (4, 3, 2), (3, 1, 1))
    assert (stats.draft_tokens, stats.accepted_tokens) == (9, 5)


@given(STEPS)
def test_the_counts_are_the_sums_over_the_steps(steps: list[Step]) -> None:
    stats = counted(*steps, slots=4)
    proposed = tuple(sum(step.drafted > slot for step in steps) for slot in range(4))
    accepted = tuple(sum(step.accepted > slot for step in steps) for slot in range(4))
    assert stats == DrafterStats("mtp", proposed[0], proposed, accepted, proposed, accepted)


def test_every_drafter_has_its_own_counts_and_shows_before_it_drafts() -> None:
    counts = SpeculationCounts(["mtp", "prediction", "none"], 2)
    counts.add("prediction", Step(2, 1))
    counts.add("none", Step(0, 0))
    zeros = (0, (0, 0), (0, 0), (0, 0), (0, 0))
    assert counts.snapshot() == (
        DrafterStats("mtp", *zeros),
        DrafterStats("prediction", 1, (1, 1), (1, 0), (1, 1), (1, 0)),
        DrafterStats("none", *zeros),
    )


def test_an_unknown_drafter_and_a_slot_too_many_are_refused() -> None:
    counts = SpeculationCounts(["mtp"], 2)
    with pytest.raises(KeyError):
        counts.add("student", Step(1, 1))
    with pytest.raises(IndexError):
        counts.add("mtp", Step(3, 0))


def test_the_time_of_a_step_that_ends_after_its_drafter_has_gone_is_nobodys() -> None:
    counts = SpeculationCounts(["student"], 2)
    for batch in (3, 4):
        counts.add_timed(TimedStep("student", batch, 1, 0.5))
    counts.add_timed(TimedStep("none", 1, 0, 0.25))
    assert counts.times("student") == (StepTimes(4, 2, 7, 2, 1.0),)
    counts.forget("student")
    counts.add_timed(TimedStep("student", 1, 1, 0.5))
    counts.begin("student")  # another one, of that name
    assert counts.times("student") == ()
    assert counts.times("none") == (StepTimes(1, 1, 1, 0, 0.25),)


def test_the_recent_counts_are_those_of_the_last_minute(clock: Clock) -> None:
    counts = SpeculationCounts(["mtp"], 2)

    def recent() -> tuple[tuple[int, ...], tuple[int, ...]]:
        (stats,) = counts.snapshot()
        return stats.recent_draft_tokens_per_pos, stats.recent_accepted_tokens_per_pos

    counts.add("mtp", Step(2, 2))
    clock.now += 30
    counts.add("mtp", Step(1, 0))
    clock.now += 30
    assert recent() == ((2, 1), (1, 1))
    clock.now += 0.5
    assert recent() == ((1, 0), (0, 0))
    clock.now += 30
    assert recent() == ((0, 0), (0, 0))
    counts.add("mtp", Step(2, 1))
    assert recent() == ((1, 1), (1, 0))
    (stats,) = counts.snapshot()
    assert (stats.drafts, stats.draft_tokens_per_pos, stats.accepted_tokens_per_pos) == (3, (3, 2), (2, 1))


def test_a_reader_sees_no_step_half_counted() -> None:
    counts, done = SpeculationCounts(["mtp"], 8), threading.Event()

    def write() -> None:
        for _ in range(3000):
            counts.add("mtp", Step(8, 8))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        (stats,) = counts.snapshot()
        assert set(stats.draft_tokens_per_pos) | set(stats.accepted_tokens_per_pos) == {stats.drafts}
    writer.join()
