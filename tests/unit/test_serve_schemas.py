"""Request bodies: whatever is sent is either understood or refused naming the place."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve.errors import from_validation
from serve.schemas.chat import NOT_YET, NOT_YET_IN_MESSAGES, ChatCompletionRequest

USER = {"role": "user", "content": "Hi"}
KEYS = ["role", "content", "type", "text", "x", "include_usage", "json", "regex", "json_schema", "schema", "5", "-5"]
KNOWN = [*ChatCompletionRequest.model_fields, *NOT_YET]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


def parse(**body) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], **body})


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
