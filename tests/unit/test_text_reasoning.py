"""Reasoning and content are told apart the same way however the answer arrives."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from backend.text.reasoning import ReasoningSplitter, Split

PIECES = st.lists(
    st.one_of(st.sampled_from(["\n", "\n\n", "</think>", "</thi", "nk>", "<", "why", " ", ""]), st.text(max_size=3)),
    max_size=10,
)


def whole(text: str) -> Split:
    before, _, after = text.partition("</think>")
    return Split(before.strip("\n"), after.lstrip("\n"))


def streamed(pieces: list[str], in_reasoning: bool) -> Split:
    splitter = ReasoningSplitter(in_reasoning)
    splits = [*map(splitter.push, pieces), splitter.finish()]
    return Split("".join(s.reasoning for s in splits), "".join(s.content for s in splits))


@given(PIECES)
@example(["\nwhy\n", "\n</th", "ink>\n", "\nbecause\n"])
@example(["why\n", "</thi"])
@example(["</think>", "\n\n", "</think>\n"])
def test_any_split_of_an_answer_gives_the_same_two_sides(pieces: list[str]) -> None:
    assert streamed(pieces, in_reasoning=True) == whole("".join(pieces))


@given(PIECES)
def test_without_open_reasoning_everything_is_content_unchanged(pieces: list[str]) -> None:
    assert streamed(pieces, in_reasoning=False) == Split("", "".join(pieces))


CALLING = st.lists(st.sampled_from(["<tool_call>", "\n", " ", "<function=", "</think>", "<tool_", "x"]), max_size=10)


@given(CALLING.map("".join))
@example("\n\na <tool_call> b\n<tool_call>\n <function=x</think>y")
@example("a\n<tool_call>\n")
def test_a_function_called_ends_it_too_where_calls_are_looked_for(text: str) -> None:
    found = re.search(r"</think>|<tool_call>\s*<function=", text)
    end = None if found is None else found.start()
    content = "" if found is None else text[end:].removeprefix("</think>").lstrip("\n")
    for pieces in ([text], list(text), [text[:3], text[3:]]):
        splitter = ReasoningSplitter(True, calls=True)
        splits = [*map(splitter.push, pieces), splitter.finish()]
        assert "".join(split.reasoning for split in splits) == text[:end].strip("\n")
        assert "".join(split.content for split in splits) == content
        assert splitter.end == end


def test_reasoning_is_shown_while_it_arrives() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.push("\nbecause") == Split("because", "")
    assert splitter.push(" it\n") == Split(" it", "")
    assert splitter.push("is</th") == Split("\nis", "")
    assert splitter.push("ink>\n\nYes") == Split("", "Yes")
    assert splitter.push("\n") == Split("", "\n")


def test_an_answer_cut_inside_its_reasoning_has_no_content() -> None:
    assert streamed(["I wonder", "\n"], in_reasoning=True) == Split("I wonder", "")
