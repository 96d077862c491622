"""Windows hold every anchor once, with its context and its slots; passes and schedules are told by their numbers."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from training.distillation.batches import epoch, stream, windows
from training.distillation.schedule import Schedule


@given(st.integers(0, 300), st.integers(0, 300), st.integers(16, 128), st.integers(1, 4))
def test_every_anchor_stands_in_one_window_with_what_it_needs(
    prompt: int, answer: int, longest: int, slots: int
) -> None:
    length = prompt + answer
    found = windows(7, prompt, length, longest, slots)
    anchors = [anchor for window in found for anchor in range(window.first, window.last)]
    assert anchors == list(range(max(prompt, 1), length - 1))
    for window in found:
        assert 0 <= window.start < window.first
        assert window.stop <= length
        assert window.length <= longest
        assert window.stop == min(window.last + slots, length) or window.stop == length
        assert window.first - window.start >= min(longest // 4, window.first)
    if length <= longest:
        assert [(window.start, window.stop) for window in found] in ([], [(0, length)])


@given(st.lists(st.integers(2, 60), min_size=1, max_size=80), st.integers(60, 300), st.integers(0, 9))
def test_a_pass_holds_every_window_once_in_batches_of_the_size_asked_for(
    lengths: list[int], tokens: int, seed: int
) -> None:
    batches = epoch(lengths, tokens, seed, 0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[i] for i in batch) <= tokens for batch in batches)
    assert epoch(lengths, tokens, seed, 0) == batches


def test_a_stream_can_begin_anywhere() -> None:
    lengths = [3, 9, 4, 7, 5, 8, 6] * 5
    whole = list(islice(stream(lengths, 20, 1, 0), 60))
    assert len(epoch(lengths, 20, 1, 0)) < 30
    assert epoch(lengths, 20, 1, 0) != epoch(lengths, 20, 1, 1)
    for skip in (1, 17, 40):
        assert list(islice(stream(lengths, 20, 1, skip), 60 - skip)) == whole[skip:]


def test_rates_rise_fall_and_end_and_the_teacher_goes_its_way() -> None:
    schedule = Schedule(steps=100, ce_steps=20, warmup=10, lr=1.0, ce_lr=0.1, floor=0.1, alpha_start=0.5, alpha=1.0)
    rates = [schedule.at(step).lr for step in range(schedule.total)]
    assert rates[0] < rates[5] < max(rates) <= 1.0
    assert rates[10:100] == sorted(rates[10:100], reverse=True)
    assert 0.1 <= rates[99] < 0.11
    assert rates[100] == 0.1
    assert 0 < rates[119] < 0.01
    assert [schedule.at(step).stage for step in (0, 99, 100, 119)] == ["kd", "kd", "ce", "ce"]
    assert [schedule.at(step).alpha for step in (0, 50, 110)] == [0.5, 0.75, 1.0]
