"""One sequence's emissions as the events of its answer: reasoning, content, calls, and the tokens that were thought."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.answer import Answer
from backend.engine.parameters import SamplingParams
from backend.engine.sequence import Emission
from backend.interface import ChatEvent, ChatRequest, Fingerprints
from backend.text.answer import AnswerText
from backend.text.tokenizer import Prompt
from tests.checkpoints import tiny

TOKENIZER = tiny().tokenizer
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
LOADED = SimpleNamespace(tokenizer=TOKENIZER, fingerprints=Fingerprints("w", "t", "c", "d", "b"))
NEVER = SimpleNamespace(
    drafter=None, prediction=None, steps=[], logprobs=[], cached=0, max_tokens=0, stop_string=None, prefilled=0
)
TIMES = SimpleNamespace(submitted_at=0.0, admitted_at=0.0, first_token_at=0.0, finished_at=0.0)


def ids_of(text: str) -> list[int]:
    """Its tags as the tokens they are."""
    pieces = TOKENIZER._literals.split(text)
    return [
        token
        for plain, tag in itertools.zip_longest(pieces[::2], pieces[1::2])
        for token in [*TOKENIZER.plain(plain), *([TOKENIZER.literal_id(tag)] if tag else [])]
        if token is not None
    ]


def events(
    ids: list[int], blocks: list[int], finish: Any = "stop", *, thinking: bool = True, **asked: Any
) -> list[ChatEvent]:
    """What an answer of these tokens is told as, in blocks of so many of them; the last takes the rest."""
    sequence = SimpleNamespace(
        **{**vars(NEVER), **vars(TIMES)},
        prompt=(1,),
        tokens=ids,
        sampler=SimpleNamespace(params=SamplingParams()),
    )
    prompt = Prompt((1,), "", 0, in_reasoning=thinking)
    answer = Answer(cast(Any, LOADED), prompt, cast(Any, sequence), ChatRequest("id", **{"tools": TOOLS, **asked}))
    text, todo, told = AnswerText(TOKENIZER.text_bytes, ()), list(ids), []
    for block in blocks:
        taken = [text.push(todo.pop(0)).text for _ in range(min(block, len(todo)))]
        told.append(answer.event(Emission("".join(taken), ())))
    rest = "".join(text.push(token).text for token in todo)
    return [*told, answer.event(Emission(rest + text.finish().text, (), finish))]


def whole(text: str, finish: Any = "stop", **asked: Any) -> Any:
    return events(ids_of(text), [], finish, **asked)[-1].result


PIECES = ["</think>", "<tool_call>", "\n<function=now>", "\n</function>\n</tool_call>", CALL, "why", "\n\n", "é🤖", "<"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(0, 5), max_size=12),
    st.sampled_from(["stop", "length", "cancelled", "error"]),
    st.booleans(),
)
@example(f"why</think>{CALL}", [1], "stop", True)
@settings(deadline=None, max_examples=200)
def test_events_add_up_to_the_result_whatever_the_steps(
    text: str, blocks: list[int], finish: Any, thinking: bool
) -> None:
    ids = ids_of(text)
    told = events(ids, blocks, finish, thinking=thinking)
    result, at_once = told[-1].result, events(ids, [], finish, thinking=thinking)[-1].result
    assert result is not None
    assert at_once is not None
    assert [event.result for event in told[:-1]] == [None] * len(blocks)
    assert "".join(event.content for event in told) == result.content == at_once.content
    assert "".join(event.reasoning for event in told) == result.reasoning == at_once.reasoning
    arguments = [""] * len(result.tool_calls)
    for delta in (delta for event in told for delta in event.tool_calls):
        arguments[delta.index] += delta.arguments
    assert arguments == [call.arguments for call in result.tool_calls] == [c.arguments for c in at_once.tool_calls]
    assert result.completion_ids == tuple(ids)
    assert result.reasoning_tokens == at_once.reasoning_tokens
    assert 0 <= (result.reasoning_tokens or 0) <= len(ids)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "thought"),
    [
        ("why\n</think>\n\nYes.", "why", "Yes.", 0, "why\n"),
        (f"why\n</think>\n\n{CALL}", "why", "", 1, "why\n"),
        (f"why\n</think>{CALL}", "why", "", 1, "why\n"),
        (f"why\n\n{CALL}", "why", "", 1, "why\n\n"),
        (f"a <tool_call> is\n{CALL}\n</think>\nYes.", "a <tool_call> is", "Yes.", 1, "a <tool_call> is\n"),
        ("why not", "why not", "", 0, "why not"),
        ("", "", "", 0, ""),
    ],
)
def test_reasoning_ends_where_it_is_closed_or_something_is_called(
    text: str, reasoning: str, content: str, calls: int, thought: str
) -> None:
    result = whole(text)
    assert (result.reasoning, result.content, len(result.tool_calls)) == (reasoning, content, calls)
    assert result.reasoning_tokens == len(ids_of(thought))


def test_a_call_ends_no_reasoning_where_a_grammar_has_to_end_it_first_or_nothing_can_be_called() -> None:
    for asked in ({"tool_choice": "required"}, {"tool_choice": "none"}, {"tools": ()}):
        result = whole(f"why\n{CALL}", **asked)
        assert (result.reasoning, result.content, result.tool_calls) == (f"why\n{CALL}", "", ())
        assert result.reasoning_tokens == len(result.completion_ids)


def test_without_thinking_nothing_is_thought() -> None:
    result = whole(f"Yes.</think>{CALL}", thinking=False)
    assert (result.reasoning, result.content, result.reasoning_tokens) == ("", "Yes.", 0)
    assert whole("a</think>", thinking=False, tools=()).content == "a</think>"
    assert whole(CALL, thinking=False, tool_choice="none").content == CALL


@pytest.mark.parametrize(("finish", "arguments"), [("stop", "{}"), ("length", ""), ("cancelled", ""), ("error", "")])
def test_only_a_model_that_has_ended_has_its_call_closed(finish: str, arguments: str) -> None:
    (call,) = whole("<tool_call>\n<function=now>\n", finish, thinking=False).tool_calls
    assert call.arguments == arguments


def test_one_call_where_no_more_are_wanted() -> None:
    assert len(whole(CALL + CALL, thinking=False).tool_calls) == 2
    assert len(whole(CALL + CALL, thinking=False, parallel_tool_calls=False).tool_calls) == 1
