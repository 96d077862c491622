"""Tools on the wire: definitions and choices to the backend, calls and their results back and forth."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from tests.answers import of_chunks, of_completion
from tests.fake_backend import FakeBackend, Script
from tests.servers import CHAT

USER = {"role": "user", "content": "What is the weather?"}
ASK: dict[str, Any] = {"model": "fake", "messages": [USER]}
PARAMETERS = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"strict": True, "name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get-time", "description": "Now."}},
]
CALLS = (("get_weather", '{"z": "Be', 'rn"}'), ("get-time", "{}"))


class Weather(BaseModel):
    """What to look for."""

    city: str


def test_tools_reach_the_backend_as_they_were_sent(serve):
    server = serve()
    server.chat(tools=TOOLS)
    (request,) = server.backend.requests
    assert json.dumps(request.tools) == json.dumps(TOOLS)  # in their order, for a template prints them
    assert (request.tool_choice, request.tool_name, request.parallel_tool_calls) == ("auto", None, True)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"tool_choice": "none"}, ("none", None, 2, True)),
        ({"tool_choice": "auto"}, ("auto", None, 2, True)),
        ({"tool_choice": None, "parallel_tool_calls": None}, ("auto", None, 2, True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("required", None, 2, False)),
        ({"tool_choice": {"type": "function", "function": {"name": "get-time"}}}, ("required", "get-time", 2, True)),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "get-time"}}],
                    },
                }
            },
            ("required", None, 1, True),
        ),
    ],
)
def test_the_choice_among_tools_reaches_the_backend(serve, asked, told):
    server = serve()
    assert server.chat(tools=TOOLS, **asked).status_code == 200
    (request,) = server.backend.requests
    assert (request.tool_choice, request.tool_name, len(request.tools), request.parallel_tool_calls) == told


def test_no_tools_are_no_tools(serve):
    server = serve()
    assert server.chat(tools=[], tool_choice="none").status_code == 200
    assert server.chat(tools=None, tool_choice="auto").status_code == 200
    assert [request.tools for request in server.backend.requests] == [[], []]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_answered_in_openais_shape(serve, stream):
    server = serve(Script(pieces=(), calls=CALLS))
    if stream:
        options = {"include_usage": True}
        answer = of_chunks(
            server.openai.chat.completions.create(**ASK, tools=TOOLS, stream=True, stream_options=options)
        )
    else:
        completion = server.openai.chat.completions.create(**ASK, tools=TOOLS)
        assert completion.choices[0].message.content is None
        assert {call.type for call in completion.choices[0].message.tool_calls} == {"function"}
        answer = of_completion(completion)
    assert answer.finish_reason == "tool_calls"
    assert answer.calls == (("get_weather", '{"z": "Bern"}'), ("get-time", "{}"))
    assert answer.content == ""
    (row,) = server.rows()
    assert row.finish_reason == "stop"  # the engine's word
    assert row.tool_calls == [
        {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"z": "Bern"}'}},
        {"id": "call_1", "type": "function", "function": {"name": "get-time", "arguments": "{}"}},
    ]


def test_text_before_calls_is_content(serve):
    server = serve(Script(pieces=(b"Let me see.",), calls=CALLS[:1]))
    message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_short_is_reported_as_far_as_it_got(serve, stream):
    server = serve(Script(pieces=(), calls=CALLS))
    if stream:
        *_, end = server.openai.chat.completions.create(**ASK, tools=TOOLS, max_tokens=2, stream=True)
        assert end.choices[0].finish_reason == "length"
    else:
        answer = of_completion(server.openai.chat.completions.create(**ASK, tools=TOOLS, max_tokens=2))
        assert (answer.finish_reason, answer.calls) == ("length", (("get_weather", '{"z": "Be'),))
    assert server.rows()[0].tool_calls[0]["function"]["arguments"] == '{"z": "Be'


def test_a_call_of_a_backend_that_breaks_stays_in_the_row(serve):
    server = serve(Script(pieces=(), calls=CALLS, breaks_after=2))
    assert server.chat(tools=TOOLS).status_code == 500
    assert server.rows()[0].tool_calls[0]["function"] == {"name": "get_weather", "arguments": '{"z": "Bern"}'}


def test_the_clients_own_tools_are_parsed(serve):
    server = serve(Script(pieces=(), calls=(("Weather", '{"city": "Bern"}'),)))
    answer = server.openai.chat.completions.parse(**ASK, tools=[pydantic_function_tool(Weather)])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Bern")
    assert server.backend.requests[0].tools[0]["function"]["strict"] is True


def test_the_clients_streaming_helper_gathers_calls(serve):
    server = serve(Script(calls=(("Weather", '{"city"', ': "Bern"}'),)))
    with server.openai.chat.completions.stream(**ASK, tools=[pydantic_function_tool(Weather)]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [Weather(city="Bern")]
    assert final.choices[0].finish_reason == "tool_calls"


def test_an_agents_loop_goes_round(serve):
    server = serve(Script(thought=(b"hm",), calls=CALLS))
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, USER]
    answer = server.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    messages.append(answer.message)
    for call in answer.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sunny"}]})
    answer = server.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    *_, sent, first, second = server.backend.requests[1].messages
    assert sent == {
        "role": "assistant",
        "content": "Hello wörld 🌍!\nbye",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"z": "Bern"}'}},
            {"id": "call_1", "type": "function", "function": {"name": "get-time", "arguments": "{}"}},
        ],
    }
    assert first == {"role": "tool", "tool_call_id": "call_0", "content": "sunny"}
    assert second["tool_call_id"] == "call_1"


def test_histories_of_other_servers_are_understood(serve):
    server = serve()
    history = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "", "name": "f"},
        {"role": "assistant", "content": None, "refusal": "I would rather not.", "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        USER,
    ]
    assert server.http.post(CHAT, json={"messages": history, "tools": TOOLS}).status_code == 200
    (request,) = server.backend.requests
    assert request.messages[1:5] == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "", "name": "f", "tool_call_id": "x"},
        {"role": "assistant", "content": "I would rather not."},
        {"role": "assistant", "content": "No."},
    ]


def test_arguments_reach_the_backend_as_text_where_they_were_text(serve):
    server = serve()
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{not json"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": ""}]
    assert server.http.post(CHAT, json={"messages": messages}).status_code == 200
    assert server.backend.requests[0].messages[1]["tool_calls"] == [call]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_backend_refuses_of_tools_is_told_with_its_place(serve, monkeypatch, stream):
    from backend.interface import InvalidRequest

    server = serve(backend=FakeBackend())
    place = "messages[1].tool_calls[0].function.arguments"

    async def refuse(_: Any) -> Any:
        raise InvalidRequest("That is not JSON.", param=place)
        yield

    monkeypatch.setattr(server.backend, "chat", refuse)
    response = server.chat(tools=TOOLS, stream=stream)
    assert (response.status_code, response.json()["error"]["param"]) == (400, place)
