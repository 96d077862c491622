"""Bodies of /v1/responses, whatever is sent, and the items that any stream of events comes to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from backend.interface import ChatEvent, GenerationFailed, TokenInfo, ToolCallDelta
from serve.errors import from_validation
from serve.response_items import Output
from serve.schemas.response_input import ITEMS
from serve.schemas.responses import ELSEWHERE, NOT_SERVED, ResponsesRequest
from tests.responses import put_together

KEYS = ["type", "role", "content", "text", "name", "arguments", "call_id", "output", "summary", "format", "schema", "x"]
KEYS += ["mode", "tools", "effort", "parameters", "id", "strict", "verbosity"]
KNOWN = [*ResponsesRequest.model_fields, *NOT_SERVED, *ELSEWHERE]
words = st.sampled_from([*ITEMS, "item_reference", "function", "allowed_tools", "input_text", "output_text", "user"])
words |= st.sampled_from(["assistant", "json_schema", "text", "auto", "required", "{}", "f"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)

_EVENTS = TypeAdapter(list[dict[str, Any]])


@given(st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), values, max_size=5) | values)
def test_any_json_is_understood_or_refused_with_a_message(body: Any) -> None:
    body = {"input": "Hi", **body} if isinstance(body, dict) else body
    try:
        call = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        refusal = from_validation(error)
        assert refusal.status == 400
        assert refusal.message
        json.dumps(refusal.body())
        assert refusal.param is None or refusal.param in refusal.message
    else:
        call.sampling()
        call.offered()
        assert call.messages


turns = st.lists(
    st.one_of(
        st.builds(
            lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "developer"]), st.text()
        ),
        st.builds(lambda text: {"role": "assistant", "content": [{"type": "output_text", "text": text}]}, st.text()),
        st.builds(
            lambda text: {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]},
            st.text(),
        ),
        st.builds(
            lambda name: {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
            st.sampled_from("abc"),
        ),
        st.builds(
            lambda name, text: {"type": "function_call_output", "call_id": name, "output": text},
            st.sampled_from("abc"),
            st.text(),
        ),
    ),
    min_size=1,
    max_size=8,
)


def text_of(item: dict[str, Any]) -> str:
    """What an item adds to the conversation; of a call its id. An output has both, and its own text counts."""
    content = next(item[key] for key in ("content", "output", "call_id") if key in item)
    return content if isinstance(content, str) else str(content[0]["text"])


@given(turns)
def test_nothing_that_was_said_is_lost_or_told_out_of_turn(items: list[dict[str, Any]]) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for item in items:
        calls = {one["call_id"] for one in history if one.get("type") == "function_call"}
        if item.get("type") != "function_call_output" or item["call_id"] in calls:
            history.append(item)
    messages = ResponsesRequest(input=history).messages
    told = [
        (message.get("reasoning_content") or "")
        + (message["content"] or "")
        + "".join(call["id"] for call in message.get("tool_calls", ()))
        for message in messages
    ]
    # Within a turn of the model its words come before its calls, as templates have it.
    assert Counter("".join(told)) == Counter("".join(map(text_of, history)))
    others = [item for item in history if item.get("role") in ("user", "developer") or "output" in item]
    assert [one["content"] for one in messages if one["role"] != "assistant"] == list(map(text_of, others))
    assert all(one["role"] == "assistant" or "tool_calls" not in one for one in messages)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[ChatEvent], list[ChatEvent]]:
    """An answer as the events of its letters, and as events that hold several of them at once."""
    text = st.text("abc", min_size=1, max_size=4)
    parts = [("reasoning", draw(text))] * draw(st.integers(0, 1)) + [("content", draw(text))] * draw(st.integers(0, 1))
    letters = [ChatEvent(**{kind: letter}) for kind, said in parts for letter in said]
    for index in range(draw(st.integers(0, 3))):
        begun = ToolCallDelta(index, id=f"call_{index}", name=draw(text))
        deltas = [begun, *(ToolCallDelta(index, letter) for letter in draw(text))]
        letters += [ChatEvent(tool_calls=(delta,)) for delta in deltas]
    joined: list[ChatEvent] = []
    for event in letters:
        if joined and draw(st.booleans()):
            last = joined.pop()
            event = ChatEvent(
                content=last.content + event.content,
                reasoning=last.reasoning + event.reasoning,
                tool_calls=last.tool_calls + event.tool_calls,
            )
        joined.append(event)
    return letters, joined


def told(events: list[ChatEvent]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The items in the end, and those that a client puts together from the stream."""
    output = Output("row", logprobs=False)
    steps = [step for event in events for step in output.add(event)] + list(output.close("completed"))
    items = [item.model_dump() for item in output.items]
    return items, put_together(json.loads(_EVENTS.dump_json(steps)))


@given(answers())
def test_items_are_the_same_in_whatever_pieces_the_answer_comes(made: tuple[list[ChatEvent], list[ChatEvent]]) -> None:
    by_letters, joined = (told(events) for events in made)
    assert by_letters[0] == joined[0]
    for items, streamed in (by_letters, joined):
        assert streamed == items
        assert items[-1]["type"] in ("message", "function_call")
        assert [item["id"] for item in items] == [f"{item['id'].split('_')[0]}_row_{i}" for i, item in enumerate(items)]


def test_a_backend_that_goes_back_to_an_ended_call_is_not_believed() -> None:
    output = Output("row", logprobs=False)
    begun = ChatEvent(tool_calls=(ToolCallDelta(0, id="a", name="f"), ToolCallDelta(1, id="b", name="g")))
    list(output.add(begun))
    with pytest.raises(GenerationFailed):
        list(output.add(ChatEvent(tool_calls=(ToolCallDelta(0, "{}"),))))


def token(text: str) -> TokenInfo:
    return TokenInfo(0, text, text.encode(), -1.0)


CALL = ChatEvent(tool_calls=(ToolCallDelta(0, id="a", name="f"),))


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        # The text of the second comes with the third; of the last there is none.
        (
            [
                ChatEvent(content="a", tokens=(token("a"),)),
                ChatEvent(tokens=(token("b"),)),
                ChatEvent(content="bc", tokens=(token("c"),)),
                ChatEvent(tokens=(token("<end>"),)),
            ],
            [["a", "b", "c", "<end>"]],
        ),
        ([ChatEvent(tokens=(token("<end>"),))], [["<end>"]]),
        ([ChatEvent(tokens=(token(" "),)), CALL], []),
        ([ChatEvent(tokens=(token(" "),)), CALL, ChatEvent(content="a", tokens=(token("a"),))], [["a"]]),
    ],
    ids=["held back", "nothing said", "a call alone", "a call between"],
)
def test_a_message_tells_of_its_own_tokens_each_once(events: list[ChatEvent], texts: list[list[str]]) -> None:
    output = Output("row", logprobs=True)
    steps = [step for event in events for step in output.add(event)] + list(output.close("completed"))
    items = put_together(json.loads(_EVENTS.dump_json(steps)))
    assert items == [item.model_dump() for item in output.items]
    found = [part["logprobs"] for item in items if item["type"] == "message" for part in item["content"]]
    assert [[one["token"] for one in told] for told in found] == texts


def test_the_model_thinks_anew_in_a_new_turn() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    history = [{"role": "user", "content": "Hi"}, {**call, "call_id": "a"}, thought, {**call, "call_id": "b"}]
    _, first, second = ResponsesRequest(input=history).messages
    assert ("reasoning_content" in first, second["reasoning_content"]) == (False, "hm")
    assert [[one["id"] for one in turn["tool_calls"]] for turn in (first, second)] == [["a"], ["b"]]


def test_a_message_that_is_cut_tells_of_the_tokens_whose_text_never_came() -> None:
    output = Output("row", logprobs=True)
    for event in (ChatEvent(content="a", tokens=(token("a"),)), ChatEvent(tokens=(token("\ufffd"),))):
        list(output.add(event))
    list(output.close("incomplete"))
    (message,) = output.items
    assert [one["token"] for one in message.model_dump()["content"][0]["logprobs"]] == ["a", "\ufffd"]
