"""Redaction: what is searched, what goes with it, and that JSON stays JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.records import Generation, to_row
from capture.redact import PLACEHOLDER, PatternError, redactor
from tests.capture_rows import generation

SECRET = "alice@example.com"


def redacted(row: Generation, *patterns: str) -> Generation:
    made = redactor(patterns or ["email"])
    assert made is not None
    return made.generation(row)


def called(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "call_1", "type": "function", "function": {"name": "send", "arguments": arguments}}]


PLACES: dict[str, dict[str, Any]] = {
    "answer": {"response_text": f"Write to {SECRET}."},
    "reasoning": {"reasoning": f"They are {SECRET}"},
    "arguments": {"tool_calls": called(json.dumps({"to": [SECRET]}))},
    "escaped arguments": {"tool_calls": called('{"to": "alice\\u0040example.com"}')},
    "a key of arguments": {"tool_calls": called(json.dumps({SECRET: 1}))},
    "broken arguments": {"tool_calls": called(f'{{"to": "{SECRET}"')},
    "client": {"client": SECRET},
    "a model's name, before an upstream the client's own words": {"model": SECRET},
    "error": {"error": f"no {SECRET}"},
    "content": {"request": {"messages": [{"role": "user", "content": f"I am {SECRET}"}]}},
    "a part": {"request": {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]}},
    "a call of old": {"request": {"messages": [{"role": "assistant", "tool_calls": called(f'{{"to": "{SECRET}"}}')}]}},
    "a tool's answer": {"request": {"messages": [{"role": "tool", "content": json.dumps({"found": SECRET})}]}},
    "input": {"request": {"input": [{"type": "message", "role": "user", "content": SECRET}], "instructions": SECRET}},
    "prompt": {"request": {"prompt": ["Hello", SECRET]}},
    "user": {"request": {"messages": [], "user": SECRET}},
    "metadata": {"request": {"messages": [], "metadata": {"owner": SECRET}}},
    "a key of metadata": {"request": {"messages": [], "metadata": {SECRET: "yes"}}},
    "an unknown field": {"request": {"messages": [], "extra": {"deep": [[SECRET]], SECRET: 1, "type": SECRET}}},
    "parameters": {"parameters": {"stop": [SECRET]}},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_match_is_replaced_wherever_it_stands(place: str) -> None:
    row = redacted(generation(**PLACES[place]))
    stored = json.dumps(to_row(row), default=bytes.hex)
    assert "alice" not in stored
    assert "example" not in stored
    assert PLACEHOLDER in stored
    assert row.redacted >= 1


def test_what_may_hold_it_unseen_goes_too() -> None:
    asked = {"messages": [{"role": "user", "content": SECRET}], "seed": 5, "temperature": 0.5}
    row = redacted(generation(request=asked, parameters={"seed": 5, "temperature": 0.5}, seed=5, split_key_length=2))
    assert (row.prompt_tokens, row.completion_tokens, row.logprobs, row.seed) == (None, None, None, None)
    assert "seed" not in row.request
    assert row.parameters == {"temperature": 0.5, "redacted": 1}
    assert asked["seed"] == 5  # the caller's own stays as it was


def test_a_row_without_a_match_is_the_same_row() -> None:
    row = generation(tool_calls=called('{"a":1,  "b": [2]}'), request={"messages": [], "metadata": {"n": "1"}})
    assert redacted(row) is row
    assert row.redacted == 0


def test_json_stays_json_and_only_the_match_is_taken() -> None:
    arguments = {"to": SECRET, "count": 3, "deep": [{"cc": f"a {SECRET}, b"}], "ok": True, "none": None}
    row = redacted(generation(tool_calls=called(json.dumps(arguments)), response_text=json.dumps({"mail": SECRET})))
    taken = json.loads(row.tool_calls[0]["function"]["arguments"])
    assert taken == {**arguments, "to": PLACEHOLDER, "deep": [{"cc": f"a {PLACEHOLDER}, b"}]}
    assert json.loads(row.response_text) == {"mail": PLACEHOLDER}


def test_a_number_of_the_clients_own_is_text_and_one_of_the_api_is_none() -> None:
    card = 4111111111111111
    asked = {"max_tokens": 4096, "metadata": {"card": card}, "messages": []}
    row = redacted(generation(request=asked, tool_calls=called(json.dumps({"card": card}))), r"\d{4,}")
    assert row.request == {"max_tokens": 4096, "metadata": {"card": PLACEHOLDER}, "messages": []}
    assert json.loads(row.tool_calls[0]["function"]["arguments"]) == {"card": PLACEHOLDER}


def test_the_words_of_the_api_are_no_text() -> None:
    asked = {"messages": [{"role": "user", "content": "the user types"}]}
    row = redacted(generation(request=asked), "user|type|role|content|messages")
    assert row.request == {"messages": [{"role": "user", "content": f"the {PLACEHOLDER} {PLACEHOLDER}s"}]}


def test_a_match_that_spans_a_key_and_its_value_takes_the_whole_text() -> None:
    row = redacted(generation(tool_calls=called('{"ssn": "123456789"}')), r"ssn\W+\d{9}")
    assert json.loads(row.tool_calls[0]["function"]["arguments"]) == [PLACEHOLDER]


def test_two_keys_that_become_one_lose_no_value() -> None:
    row = redacted(generation(tool_calls=called(json.dumps({"a@x.org": 1, "b@x.org": 2}))))
    assert sorted(json.loads(row.tool_calls[0]["function"]["arguments"]).values()) == [1, 2]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3]]])
def test_a_prompt_that_cannot_be_searched_counts_as_a_match(prompt: object) -> None:
    row = redacted(generation(request={"prompt": prompt}))
    assert row.request == {"prompt": PLACEHOLDER}
    assert row.prompt_tokens is None


def test_a_second_time_finds_nothing_more() -> None:
    once = redacted(generation(response_text=f"{SECRET} was redacted"), "email", r"\w*redacted\w*")
    assert once.redacted == 2
    assert redacted(once, "email", r"\w*redacted\w*") is once


@given(st.text('a@.[]{}"\\: redct1', max_size=40), st.sampled_from(["a", r"\w+", "a|", '"', r"\[", "1"]))
def test_no_text_keeps_a_match(text: str, pattern: str) -> None:
    made = redactor([pattern]) if pattern != "a|" else redactor(["a(?:a|)"])
    assert made is not None
    row = made.generation(generation(response_text=text, client=None, parameters={}, request={}))
    left = row.response_text.split(PLACEHOLDER)
    assert not any(match[0] for part in left for match in made.patterns[0].finditer(part)) or text.strip()[:1] in "[{"
    assert made.generation(row).response_text == row.response_text


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("ab1"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
    ),
    st.sampled_from(["a", "b1", r"\d+", "[ab]"]),
)
def test_arguments_stay_json_whatever_is_taken_out(value: Any, pattern: str) -> None:
    row = redacted(generation(tool_calls=called(json.dumps({"x": value}))), pattern)
    json.loads(row.tool_calls[0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("email", "to a.b+c@mail.example.org, now", "to [redacted], now"),
        ("email", "a @ b and @handle", "a @ b and @handle"),
        ("key", "use sk-proj-abcdefghijklmnop1234", "use [redacted]"),
        ("key", "AKIAABCDEFGHIJKLMNOP and ghp_abcdefghijklmnopqrstuvwxyz0123456789", "[redacted] and [redacted]"),
        ("key", "Authorization: Bearer abcdefghijklmnopqrst==", "Authorization: [redacted]"),
        ("key", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT", "[redacted]"),
        ("key", "a skeleton, a skill", "a skeleton, a skill"),
        ("card", "card 4111 1111 1111 1111.", "card [redacted]."),
        ("card", "4111111111111111, 3782-822463-10005", "[redacted], [redacted]"),
        ("card", "in 2025 there were 1234567", "in 2025 there were 1234567"),
        ("phone", "call +49 (30) 1234-5678 today", "call [redacted] today"),
        ("ip", "from 192.168.0.1 and 2001:db8:0:0:0:0:0:1", "from [redacted] and [redacted]"),
        ("ip", "version 1.2.3 at 12:30:45", "version 1.2.3 at 12:30:45"),
    ],
)
def test_the_named_patterns_know_their_kind(name: str, text: str, kept: str) -> None:
    assert redacted(generation(response_text=text, client=None), name).response_text == kept


@pytest.mark.parametrize("name", ["email", "key", "card", "phone", "ip"])
@pytest.mark.parametrize("unit", ["a", "a.", "1 ", "1", "1.", "+1", "sk-", "eyJ-", "a@", "ab:", "a@b."])
def test_the_named_patterns_are_not_slowed_by_any_text(name: str, unit: str) -> None:
    redacted(generation(response_text=unit * 100_000), name)  # quadratic, it would take longer than the suite allows


@pytest.mark.parametrize("pattern", ["(", "", "a*", "x?|y", "(?P<n", "*"])
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        redactor([pattern])


def test_a_file_lists_patterns_a_line(tmp_path: Path) -> None:
    file = tmp_path / "patterns"
    file.write_text("# ours\n\nemail\nproject \\w+, [A-Z]{2,3}\n")
    made = redactor(["x1"], file)
    assert made is not None
    row = made.generation(generation(response_text=f"x1 {SECRET} project blue, ABC"))
    assert row.response_text == " ".join([PLACEHOLDER] * 3)
    file.write_text("# nothing\n")
    for unusable in (file, tmp_path / "none", tmp_path):
        with pytest.raises(PatternError, match=str(unusable)):
            redactor([], unusable)
    assert redactor([]) is None
