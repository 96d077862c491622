"""Which part of an answer a token belongs to."""

from __future__ import annotations

import pytest

from backend.text.parts import Parts
from tests.checkpoints import tiny

TOKENIZER = tiny().tokenizer


def parts(text: str, *, in_reasoning: bool = False, calls: bool = True) -> list[tuple[str, str]]:
    """The text's runs of tokens of one part."""
    told = Parts(TOKENIZER, in_reasoning=in_reasoning, calls=calls)
    runs: list[tuple[str, str]] = []
    for token in TOKENIZER.encode_text(text).ids:
        piece, part = TOKENIZER.token_bytes(token).decode(), told.of(token)
        if runs and runs[-1][0] == part:
            piece = runs.pop()[1] + piece
        runs.append((part, piece))
    return runs


@pytest.mark.parametrize(
    ("text", "in_reasoning", "runs"),
    [
        ("a b", False, [("content", "a b")]),
        ("a </think> b", False, [("content", "a </think> b")]),
        ("a </think> b</think>", True, [("reasoning", "a </think>"), ("content", " b</think>")]),
        (
            "x <tool_call>f</tool_call> y<tool_call>",
            False,
            [("content", "x "), ("call", "<tool_call>f</tool_call>"), ("content", " y"), ("call", "<tool_call>")],
        ),
        ("a<tool_call></think><tool_call>", True, [("reasoning", "a<tool_call></think>"), ("call", "<tool_call>")]),
    ],
)
def test_markup_belongs_to_what_it_begins_or_ends(text: str, in_reasoning: bool, runs: list[tuple[str, str]]) -> None:
    assert parts(text, in_reasoning=in_reasoning) == runs


def test_without_tools_there_are_no_calls() -> None:
    assert parts("x <tool_call>f</tool_call>", calls=False) == [("content", "x <tool_call>f</tool_call>")]
