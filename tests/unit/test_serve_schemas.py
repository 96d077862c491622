"""Request bodies: whatever is sent is either understood or refused naming the place."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serve.body import understood
from serve.errors import ApiError, from_validation
from serve.schemas.chat import NOT_YET, NOT_YET_IN_MESSAGES, ChatCompletionRequest
from serve.schemas.tools import offered

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
KEYS = ["role", "content", "type", "text", "x", "include_usage", "json", "regex", "json_schema", "schema", "5", "-5"]
KEYS += ["function", "name", "parameters", "arguments", "tool_calls", "allowed_tools", "tools", "mode", "effort", "id"]
KNOWN = [*ChatCompletionRequest.model_fields, *NOT_YET]

words = st.sampled_from(["function", "allowed_tools", "text", "tool", "assistant", "auto", "required", "f"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


def parse(**body) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], **body})


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), values, max_size=5) | values)
def test_any_json_is_understood_or_refused_with_a_message(body):
    try:
        ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        refusal = from_validation(error)
        assert refusal.status == 400
        assert refusal.message
        assert "\n" not in refusal.message or "\n" in str(body)
        json.dumps(refusal.body())
        assert refusal.param is None or refusal.param in refusal.message


def somewhere(body, strangers: list[bool]):
    """The body, and with `strangers` saying where, unknown fields in the objects that are not free in their fields."""
    if isinstance(body, list):
        return [somewhere(part, strangers) for part in body]
    if not isinstance(body, dict):
        return body
    free = ("parameters", "chat_template_kwargs", "metadata", "logit_bias", "schema", "arguments")
    known = {name: value if name in free else somewhere(value, strangers) for name, value in body.items()}
    return {**known, "mood": {"a": [1]}} if strangers and strangers.pop() else known


FULL = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ],
    "tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": {"mood": 1}}}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"mood": 1}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning": {"effort": "low"},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "d"}]},
    "chat_template_kwargs": {"mood": 1},
}


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=24, max_size=24))
def test_unknown_fields_change_nothing_where_they_are_ignored_and_are_named_where_they_are_not(strangers):
    sent = somewhere(FULL, list(strangers))
    known, kept = understood(json.dumps(sent).encode(), ChatCompletionRequest, "ignore")
    assert known == ChatCompletionRequest.model_validate(FULL)
    assert kept == sent
    if sent == FULL:
        understood(json.dumps(sent).encode(), ChatCompletionRequest, "refuse")
    else:
        with pytest.raises(ApiError) as caught:
            understood(json.dumps(sent).encode(), ChatCompletionRequest, "refuse")
        assert caught.value.code == "unknown_parameter"
        assert caught.value.param.endswith("mood")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), values, max_size=5))
def test_any_body_is_understood_or_refused_where_unknown_fields_are_ignored(body):
    try:
        call, _ = understood(json.dumps({"messages": [USER], **body}).encode(), ChatCompletionRequest, "ignore")
    except ApiError as error:
        refusal = error
    else:
        # What is understood can be said in the backend's words.
        call.sampling()
        asked = [message.plain() for message in call.messages], call.template_kwargs
        assert json.loads(json.dumps(asked))
        assert {"tools", "tool_choice"} <= offered(call.tools, call.tool_choice).keys()
        return
    assert refusal.status == 400
    assert refusal.code != "unknown_parameter"


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "messages"])
def test_null_means_absent(name):
    assert parse(**{name: None}) == parse()


@pytest.mark.parametrize(("name", "neutral"), [(name, value) for name in NOT_YET for value in NOT_YET[name]])
def test_what_asks_for_nothing_changes_nothing(name, neutral):
    assert parse(**{name: neutral}) == parse()


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_served_yet_is_refused_by_name(name):
    with pytest.raises(ValidationError) as caught:
        parse(**{name: {"something": "else"}})
    refusal = from_validation(caught.value)
    assert (refusal.param, refusal.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", NOT_YET_IN_MESSAGES)
def test_what_messages_cannot_hold_yet_is_refused_by_place(name):
    with pytest.raises(ValidationError) as caught:
        parse(messages=[USER, {**USER, name: "something"}])
    assert from_validation(caught.value).param == f"messages[1].{name}"


def test_no_parameter_is_both_served_and_not():
    assert not NOT_YET.keys() & ChatCompletionRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "minimal"}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "high"}}, {"enable_thinking": True}),
        ({"reasoning": {}}, {}),
        ({"reasoning_effort": "high", "enable_thinking": False}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "none", "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"other": None}},
            {"enable_thinking": False, "other": None},
        ),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
def test_thinking_is_asked_for_in_several_ways(asked, told):
    assert parse(**asked).template_kwargs == told


@pytest.mark.parametrize("names", [["thinking_budget"], ["thinking_token_budget"], ["thinking_budget"] * 2])
@pytest.mark.parametrize("budget", [0, 100])
def test_the_budget_of_thoughts_has_two_names(names, budget):
    assert parse(**dict.fromkeys(names, budget)).budget == budget
    assert parse().budget is None


def test_null_is_absent_inside_of_objects_too():
    nothing = {"description": None, "parameters": None, "strict": None}
    call = parse(
        tools=[{**TOOL, "function": {**TOOL["function"], **nothing}}],
        messages=[{"role": "user", "content": "Hi", "tool_calls": None, "name": None, "audio": None}],
        response_format={"type": "text", "json_schema": None},
    )
    assert call.tools == [TOOL]
    assert call.messages[0].plain() == USER


@given(st.lists(st.text(), min_size=1))
def test_text_parts_are_joined_without_anything_between(texts):
    message = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
    assert parse(messages=[message]).messages[0].plain() == {"role": "user", "content": "".join(texts)}


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), st.text(max_size=6))
def test_choices_match_themselves_and_nothing_else(choices, other):
    grammar = parse(structured_outputs={"choice": choices}).grammar
    assert grammar.kind == "regex"
    for text in (*choices, other):
        assert bool(re.fullmatch(grammar.source, text)) == (text in choices)


@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=4), st.text(max_size=6)
)
def test_the_grammar_compiler_reads_choices_as_they_were_meant(choices, other):
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_regex(parse(structured_outputs={"choice": choices}).grammar.source)
    tokenizer = llguidance.LLTokenizer("byte")
    for text in (*choices, other):
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        matches = matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()
        assert matches == (text in choices)


def test_content_may_be_null_or_missing():
    assert parse(messages=[{"role": "assistant"}]).messages[0].plain() == {"role": "assistant", "content": None}


def test_a_body_is_not_changed_by_reading_it():
    body = {"messages": [USER], "n": 1, "tools": None}
    before = json.dumps(body)
    ChatCompletionRequest.model_validate(body)
    assert json.dumps(body) == before


MANY = {
    "fields": ({f"a{i}": 1 for i in range(2000)}, None),
    "fields of a message": ({"messages": [{**USER, **{f"a{i}": 1 for i in range(2000)}}]}, "messages[0]"),
    "messages": ({"messages": [1] * 2000}, "messages[0]"),
    "parts": ({"messages": [{"role": "user", "content": [1] * 2000}]}, "messages[0].content[0]"),
    "tools": ({"tools": [1] * 2000}, "tools[0]"),
    "stops": ({"stop": [1] * 2000}, "stop[0]"),
    "metadata": ({"metadata": {f"a{i}": 1 for i in range(2000)}}, "metadata"),
    "biases": ({"logit_bias": {str(i): "x" for i in range(2000)}}, "logit_bias"),
}


@pytest.mark.parametrize("unknown", ["ignore", "refuse"])
@pytest.mark.parametrize("what", MANY)
def test_a_body_that_is_wrong_in_a_thousand_places_is_refused_at_the_first(what, unknown):
    wrong, param = MANY[what]
    with pytest.raises(ApiError) as caught:
        understood(json.dumps({"messages": [USER], **wrong}).encode(), ChatCompletionRequest, unknown)
    assert caught.value.param == param
    found = caught.value.__context__
    assert isinstance(found, ValidationError)
    assert found.error_count() == 1  # each costs memory
