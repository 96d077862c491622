"""Answers that have to be something, on real servers: calls to be made, shapes behind thoughts, thoughts that end.

Each is asked of a server with drafts, as a stream, and of one without, as a whole: they must say the same (law L2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from capture.records import Generation
from tests.answers import Answer, bits, row_of, streamed, whole
from tests.checkpoints import tiny
from tests.servers import ProcessServer

QUESTION = "What is the weather in Rome and Oslo?"
MANNERS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.2, "top_p": 1, "top_k": 0, "seed": 5}]
PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}, "sure": {"type": "boolean"}},
    "required": ["lat", "sure"],
    "additionalProperties": False,
}
# Bounds everywhere, so that every call comes to its end.
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "place": {"$ref": "#/$defs/place"},
                "hours": {"type": "array", "items": {"enum": [0, 6, 12]}, "maxItems": 2},
            },
            "required": ["city", "unit", "place"],
            "additionalProperties": False,
            "$defs": {"place": PLACE},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time now."}}
SHAPE = {
    "type": "json_schema",
    "json_schema": {"name": "place", "strict": True, "schema": PLACE},
}

Ask = Callable[..., tuple[Answer, Generation]]


@pytest.fixture
def ask(drafting: ProcessServer, plain: ProcessServer) -> Ask:
    """Ask both servers; whatever is asked, they must say the same."""

    def both(**asked: Any) -> tuple[Answer, Generation]:
        asked = {"max_tokens": 400, "logprobs": True, **asked}
        one, other = streamed(drafting.openai, QUESTION, **asked), whole(plain.openai, QUESTION, **asked)
        assert one.said == other.said
        row, twin = row_of(drafting, one), row_of(plain, other)
        assert bits(row) == bits(twin)
        assert row.parameters == twin.parameters
        assert other.timings["draft_n"] == 0
        return one, row

    return both


def check_weather(arguments: str) -> None:
    """By hand, what the schema says."""
    told = json.loads(arguments)
    assert {"city", "unit", "place"} <= told.keys() <= {"city", "unit", "place", "days", "hours"}
    assert 2 <= len(told["city"]) <= 9
    assert told["city"].isalpha()
    assert told["city"] == told["city"].capitalize()
    assert told["unit"] in ("C", "F")
    assert type(told.get("days", 0)) is int
    assert 0 <= told.get("days", 0) <= 9
    check_place(told["place"])
    assert len(told.get("hours", [])) <= 2
    assert set(told.get("hours", [])) <= {0, 6, 12}


def check_place(told: Any) -> None:
    assert told.keys() == {"lat", "sure"}
    assert type(told["lat"]) is int
    assert -90 <= told["lat"] <= 90
    assert type(told["sure"]) is bool


@pytest.mark.parametrize(
    ("named", "thinks", "manner"),
    [
        (False, False, MANNERS[0]),
        (False, True, MANNERS[1]),
        (True, True, MANNERS[0]),
        (True, False, MANNERS[1]),
    ],
    ids=["required", "required-thinking-sampled", "named-thinking", "named-sampled"],
)
def test_a_call_that_has_to_be_made_is_made_as_its_schema_says(
    ask: Ask, named: bool, thinks: bool, manner: dict[str, Any]
) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}} if named else "required"
    answer, row = ask(
        **manner,
        tools=[WEATHER, CLOCK],
        tool_choice=choice,
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": thinks},
        thinking_budget=12,
    )
    assert answer.content == ""
    assert answer.finish_reason == "tool_calls"
    assert bool(answer.reasoning) is thinks
    ((name, arguments),) = answer.calls
    if named or name == "weather":
        assert name == "weather"
        check_weather(arguments)
    else:
        assert (name, arguments) == ("clock", "{}")
    assert row.reasoning == answer.reasoning
    assert answer.timings["draft_n_accepted"] > 0


def test_as_many_calls_as_the_model_likes_one_after_the_other(ask: Ask) -> None:
    end = str(tiny().tokenizer.literal_id("<|im_end|>"))
    asked: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required", "temperature": 0, "max_tokens": 90}
    for bias, more in ((-100, True), (100, False)):
        answer, _ = ask(**asked, logit_bias={end: bias})
        assert (len(answer.calls) > 1) is more
        assert set(answer.calls[:-1]) <= {("clock", "{}")}
        assert answer.content == ""
        assert answer.finish_reason == ("length" if more else "tool_calls")


@pytest.mark.parametrize("manner", MANNERS, ids=["greedy", "sampled"])
def test_a_shape_begins_where_thoughts_end(ask: Ask, manner: dict[str, Any]) -> None:
    asked = {**manner, "chat_template_kwargs": {"enable_thinking": True}}
    answer, row = ask(**asked, response_format=SHAPE, thinking_budget=20)
    check_place(json.loads(answer.content))
    assert answer.finish_reason == "stop"
    assert answer.reasoning
    end = tiny().tokenizer.literal_id("</think>")
    at = row.completion_tokens.tolist().index(end)
    assert at == answer.usage["completion_tokens_details"]["reasoning_tokens"] <= 20
    _, free = ask(**asked, max_tokens=at + 1, ignore_eos=True)
    assert free.completion_tokens.tolist()[: min(at, 20)] == row.completion_tokens.tolist()[: min(at, 20)]


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("manner", MANNERS, ids=["greedy", "sampled"])
def test_thoughts_are_never_more_than_their_budget(ask: Ask, manner: dict[str, Any], budget: int) -> None:
    end = tiny().tokenizer.literal_id("</think>")
    never = {str(end): -100}  # it would not stop to think by itself
    asked = {**manner, "chat_template_kwargs": {"enable_thinking": True}, "logit_bias": never, "max_tokens": 30}
    answer, row = ask(**asked, thinking_budget=budget)
    ids = row.completion_tokens.tolist()
    assert ids.index(end) == budget == answer.usage["completion_tokens_details"]["reasoning_tokens"]
    assert row.parameters["thinking_budget"] == budget
    without, unbound = ask(**asked)
    assert unbound.completion_tokens.tolist()[:budget] == ids[:budget]
    assert end not in unbound.completion_tokens.tolist()
    assert without.content == ""


def test_a_budget_the_answer_has_no_room_for_changes_nothing(ask: Ask) -> None:
    asked: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    within, _ = ask(**asked, thinking_budget=100)
    without, _ = ask(**asked)
    assert within.said == without.said
    assert within.finish_reason == "length"
    silent, _ = ask(**{**asked, "chat_template_kwargs": {"enable_thinking": False}}, thinking_budget=0)
    assert "</think>" not in silent.content
    assert silent.reasoning == ""


def test_a_strict_tool_the_model_chooses_to_call_is_called_by_its_schema(ask: Ask) -> None:
    begin = str(tiny().tokenizer.literal_id("<tool_call>"))
    asked: dict[str, Any] = {**MANNERS[1], "tools": [WEATHER], "logit_bias": {begin: 100}}
    answer, _ = ask(**asked, parallel_tool_calls=False)
    ((name, arguments),) = answer.calls
    assert name == "weather"
    check_weather(arguments)
    assert answer.finish_reason == "tool_calls"
    several, _ = ask(**asked, max_tokens=answer.usage["completion_tokens"] + 30)
    assert several.calls[0] == answer.calls[0]
    assert len(several.calls) == 2


def test_a_shape_may_be_a_call_instead(ask: Ask) -> None:
    begin = str(tiny().tokenizer.literal_id("<tool_call>"))
    asked: dict[str, Any] = {"temperature": 0, "tools": [WEATHER], "response_format": SHAPE}
    call, _ = ask(**asked, logit_bias={begin: 100}, parallel_tool_calls=False)
    assert call.content == ""
    check_weather(call.calls[0][1])
    shape, _ = ask(**asked, logit_bias={begin: -100})
    assert shape.calls == ()
    check_place(json.loads(shape.content))


def test_what_a_call_leaves_no_choice_about_is_drafted_by_nobody_else(drafting: ProcessServer) -> None:
    def grammars() -> float:
        return drafting.metric("spec_decode_num_accepted_tokens_total", drafter="grammar")

    before = grammars()
    asked: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    answer = whole(drafting.openai, QUESTION, **asked, temperature=0)
    assert answer.calls == (("clock", "{}"),)
    assert grammars() - before == answer.timings["draft_n_accepted"] > 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"v": {"type": "strange"}}},
        {"type": "object", "properties": {"v": {"$ref": "#/$defs/none"}}},
        {"type": "object", "properties": {"v": {"type": "string", "pattern": "("}}},
        {
            "type": "object",
            "properties": {"v": {"$ref": "#/$defs/d0"}},
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
        },
    ],
    ids=["type", "reference", "pattern", "size"],
)
def test_tools_that_no_grammar_can_be_made_of_are_refused_by_name(drafting: ProcessServer, parameters: Any) -> None:
    described = {"type": "function", "function": {"name": "act", "strict": True, "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as refused:
        whole(drafting.openai, QUESTION, tools=[described], tool_choice="required")
    assert str(refused.value.param).startswith("tools")
