"""Stop strings are cut out whole, wherever the pieces of a text fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.interface import InvalidRequest
from backend.text.stops import StopMatcher

LETTERS = st.text("ab\n", max_size=6)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, letter by letter over the whole text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_any_split_of_a_text_gives_the_same_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, matched = "", None
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown, matched = shown + text, matched or stop
    assert (shown + matcher.flush(), matched) == cut("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, pushed = StopMatcher(stops), "", ""
    for piece in pieces:
        pushed += piece
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            break
        held = pushed[len(shown) :]
        ends = [pushed[at:] for at in range(len(pushed) + 1)]
        assert held == max((end for end in ends if any(s.startswith(end) for s in stops)), key=len, default="")


def test_nothing_is_shown_after_the_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one END two") == ("one ", "END")
    assert matcher.push("three") == ("", "END")
    assert matcher.flush() == ""


def test_of_overlapping_stop_strings_the_first_to_be_complete_counts() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopMatcher(["bc", "abc"]).push("abcd") == ("", "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must not be empty") as refused:
        StopMatcher(["x", ""])
    assert refused.value.param == "stop"
