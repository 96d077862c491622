"""POST /v1/responses through the official client: what is asked for, what comes back, streamed and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from backend.interface import ChatEvent, ChatRequest, InvalidRequest
from tests.fake_backend import FakeBackend, Script
from tests.responses import put_together
from tests.servers import AppServer, eventually, running_app

URL = "/v1/responses"
TEXT = "Hello wörld 🌍!\nbye"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "What the sky does.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = ("weather", '{"city": ', '"Oslo"', "}")
THINKS = Script(thought=(b"Let me", b" th\xc3", b"\xafnk"))
CALLS = Script(pieces=(b"One ", b"moment."), calls=(CALL, ("weather", "{}")))


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with running_app(capture="off") as server:
        yield server


def scripted(server: AppServer, script: Script) -> AppServer:
    server.backend.script = script
    return server


@pytest.fixture(autouse=True)
def _plain(server: AppServer) -> None:
    scripted(server, Script()).backend.requests.clear()


def ask(server: AppServer, given: Any = "Hi", **more: Any) -> dict[str, Any]:
    answer = server.http.post(URL, json={"input": given, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events(server: AppServer, given: Any = "Hi", **more: Any) -> list[dict[str, Any]]:
    """The stream's events, each held to its name and number."""
    with server.http.stream("POST", URL, json={"input": given, "stream": True, **more}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        sent = response.read().decode()
    assert "\r" not in sent
    found = []
    for number, block in enumerate(sent.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (event["type"], event["sequence_number"]) == (name.removeprefix("event: "), number)
        found.append(event)
    return found


def refused(server: AppServer, given: Any = "Hi", **more: Any) -> dict[str, Any]:
    before = len(server.backend.requests)
    answer = server.http.post(URL, json={"input": given, **more})
    assert answer.status_code == 400, answer.text
    assert len(server.backend.requests) == before
    error: dict[str, Any] = answer.json()["error"]
    return error


def said(response: Mapping[str, Any]) -> dict[str, Any]:
    """All of a response that must be the same whenever the same is asked."""
    bare = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    items = [{**item, "id": item["id"].replace(response["id"].removeprefix("resp_"), "row")} for item in bare["output"]]
    return {**bare, "output": items}


SCRIPTS = {
    "text": Script(),
    "thinking": THINKS,
    "thinks only": replace(THINKS, pieces=()),
    "calls": CALLS,
    "thinks and calls": replace(CALLS, thought=(b"hm",)),
    "calls only": Script(pieces=(), calls=(CALL,)),
    "nothing": Script(pieces=(b"",)),
    "held back": Script(pieces=(b"a", b"b", b"c", b"\xc3", b"\xa9")),
    "cut by the model": replace(THINKS, finish="length"),
}
ASKED: list[dict[str, Any]] = [
    {},
    LOGPROBS,
    {"max_output_tokens": 2, **LOGPROBS},
    {"max_output_tokens": 5},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.5, "seed": 3},
    {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "me",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
    },
]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("more", ASKED, ids=str)
def test_streamed_and_whole_are_the_same(server: AppServer, script: Script, more: dict[str, Any]) -> None:
    scripted(server, script)
    whole, told = ask(server, **more), events(server, **more)
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    for event in told[:2]:
        assert (event["response"]["status"], event["response"]["output"], event["response"]["usage"]) == (
            "in_progress", [], None,
        )  # fmt: skip
    last = told[-1]["response"]
    assert told[-1]["type"] == f"response.{last['status']}"
    assert put_together(told[:-1]) == last["output"]
    assert said(last) == said(whole)
    asked = server.backend.requests
    assert replace(asked[0], id="") == replace(asked[1], id="")


def test_the_client_gets_text_usage_and_timings(server: AppServer) -> None:
    answer = server.openai.responses.create(model="fake", input="Hi")
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    counts = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens)
    assert counts == (7, 10, 17)
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["draft_n_accepted"] == 5
    assert server.backend.requests[0].messages == [{"role": "user", "content": "Hi"}]


def test_thoughts_are_an_item_before_the_message(server: AppServer) -> None:
    answer = scripted(server, THINKS).openai.responses.create(model="fake", input="Hi")
    thought, message = answer.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or ()] == ["Let me thïnk"]
    assert thought.summary == []
    assert (message.type, answer.output_text) == ("message", TEXT)
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 3


def test_a_limit_makes_an_answer_incomplete(server: AppServer) -> None:
    answer = server.openai.responses.create(model="fake", input="Hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]
    assert server.backend.requests[0].sampling.max_tokens == 3


def test_a_limit_within_the_thoughts_leaves_no_message(server: AppServer) -> None:
    answer = ask(scripted(server, THINKS), max_output_tokens=1)
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("reasoning", "incomplete")]


def test_a_call_that_the_limit_cuts_is_told_as_far_as_it_got(server: AppServer) -> None:
    scripted(server, Script(pieces=(), calls=(CALL,)))
    (call,) = ask(server, tools=[WEATHER], max_output_tokens=3)["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"city": "Oslo"')


def test_log_probabilities_are_those_of_the_text(server: AppServer) -> None:
    scripted(server, replace(CALLS, thought=(b"hm", b" so")))
    answer = ask(server, tools=[WEATHER], **LOGPROBS)
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    (part,) = message["content"]
    assert [bytes(token["bytes"]) for token in part["logprobs"]] == [b"One ", b"moment."]
    assert [len(token["top_logprobs"]) for token in part["logprobs"]] == [2, 2]
    assert ask(server, top_logprobs=2)["output"][1]["content"][0]["logprobs"] == []


def test_what_is_asked_for_reaches_the_backend(server: AppServer) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    ask(
        server,
        temperature=0,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        seed=7,
        stop="END",
        max_output_tokens=3,
        cache_salt="s",
        reasoning={"effort": "none"},
        thinking_token_budget=9,
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    )
    (request,) = server.backend.requests
    asked = request.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0, 0.5, 5, 0.1, 7)
    assert (asked.stop, asked.max_tokens, request.cache_salt) == (("END",), 3, "s")
    assert request.template_kwargs == {"enable_thinking": False}
    assert (request.thinking_budget, request.parallel_tool_calls) == (9, False)
    assert asked.grammar is not None
    assert (asked.grammar.kind, json.loads(asked.grammar.source)) == ("json_schema", schema)


@pytest.mark.parametrize(
    ("more", "thinks"),
    [
        ({}, None),
        ({"reasoning": {"effort": None}}, None),
        ({"reasoning": {"effort": "minimal"}}, True),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_follows_the_effort_unless_the_template_is_told(
    server: AppServer, more: dict[str, Any], thinks: bool | None
) -> None:
    ask(server, **more)
    assert server.backend.requests[0].template_kwargs.get("enable_thinking") is thinks


def test_items_become_chat_messages(server: AppServer) -> None:
    given = [
        {"role": "developer", "content": "Speak plainly."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("one ", "two")]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], "encrypted_content": "x"},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": "Or sun."},
        {"type": "reasoning", "summary": [], "encrypted_content": "only for its author"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    ask(server, given, instructions="Be brief.")

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    assert server.backend.requests[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Speak plainly."},
        {"role": "user", "content": "one two"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [call("a", '{"city": "Oslo"}'), call("b", "")],
        },
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "in short"},
        {"role": "assistant", "content": "Or sun."},
        {"role": "user", "content": "And?"},
    ]


def test_an_answer_can_be_sent_back_as_it_came(server: AppServer) -> None:
    scripted(server, replace(CALLS, thought=(b"hm",)))
    client = server.openai.responses
    answer = client.create(model="fake", input="Hi", tools=[WEATHER])  # type: ignore[list-item]
    calls = [item for item in answer.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    scripted(server, Script())
    history = [{"role": "user", "content": "Hi"}, *answer.output, *results]
    again = client.create(model="fake", input=history, tools=[WEATHER])  # type: ignore[arg-type, list-item]
    assert again.output_text == TEXT
    _, turn, *tools = server.backend.requests[1].messages
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "One moment.")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == ["".join(CALL[1:]), "{}"]
    assert [tool["tool_call_id"] for tool in tools] == [call.call_id for call in calls]


@pytest.mark.parametrize(
    ("choice", "mode", "name", "offered"),
    [
        (None, "auto", None, ["weather", "clock"]),
        ("none", "none", None, ["weather", "clock"]),
        ("required", "required", None, ["weather", "clock"]),
        ({"type": "function", "name": "clock"}, "required", "clock", ["weather", "clock"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]},
            "auto", None, ["clock"],
        ),
    ],
)  # fmt: skip
def test_tools_reach_the_backend_as_chat_completions_have_them(
    server: AppServer, choice: Any, mode: str, name: str | None, offered: list[str]
) -> None:
    clock = {"type": "function", "name": "clock", "parameters": None, "strict": None}
    answer = ask(server, tools=[WEATHER, clock], tool_choice=choice)
    (request,) = server.backend.requests
    assert (request.tool_choice, request.tool_name) == (mode, name)
    assert [tool["function"]["name"] for tool in request.tools] == offered
    if offered[0] == "weather":
        function = {name: WEATHER[name] for name in ("name", "description", "parameters", "strict")}
        assert request.tools[0] == {"type": "function", "function": function}
    assert answer["tool_choice"] == (choice or "auto")
    assert answer["tools"][0] == WEATHER


def test_the_client_parses_an_answer_into_a_model(server: AppServer) -> None:
    class City(BaseModel):
        name: str

    scripted(server, Script(pieces=(b'{"name": ', b'"Oslo"}')))
    answer = server.openai.responses.parse(model="fake", input="Hi", text_format=City)
    assert answer.output_parsed == City(name="Oslo")
    assert server.backend.requests[0].sampling.grammar is not None


def test_the_clients_stream_helper_puts_the_answer_together(server: AppServer) -> None:
    scripted(server, replace(CALLS, thought=(b"hm",)))
    kinds = []
    with server.openai.responses.stream(model="fake", input="Hi", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_response()
    assert final.output_text == "One moment."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 65}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"instructions": ["x"]}, "instructions"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [WEATHER]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice.name"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: AppServer, more: dict[str, Any], param: str) -> None:
    error = refused(server, **more)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        (5, "input"),
        ([], "input"),
        (["Hi"], "input[0]"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        ([{"id": "msg_1"}], "input[0]"),
        ([{"type": "computer_call"}], "input[0].type"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "a", "arguments": "{}"}], "input[0].name"),
        ([{"type": "function_call_output", "call_id": "a", "output": "x"}], "input[0].call_id"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input"),
    ],
)
def test_input_that_cannot_be_read_is_refused_naming_its_item(server: AppServer, given: Any, param: str) -> None:
    assert refused(server, given)["param"] == param


def test_a_backends_refusal_names_the_parameter_as_it_is_called_here(server: AppServer) -> None:
    scripted(server, Script(refuses="too long", refuses_grammar="too deep"))
    answer = server.http.post(URL, json={"input": "Hi"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    scripted(server, Script(refuses_grammar="too deep"))
    answer = server.http.post(URL, json={"input": "Hi", "text": {"format": {"type": "json_object"}}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")


def test_a_failed_generation_is_an_error(server: AppServer) -> None:
    scripted(server, Script(finish="error"))
    with pytest.raises(openai.InternalServerError) as caught:
        server.openai.responses.create(model="fake", input="Hi")
    assert "out of memory" in caught.value.message


@pytest.mark.parametrize("script", [Script(finish="error"), Script(breaks_after=2)], ids=["fails", "breaks"])
def test_a_stream_that_fails_says_so_and_keeps_what_came(server: AppServer, script: Script) -> None:
    told = events(scripted(server, script))
    *middle, last = told
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert put_together(middle) == last["response"]["output"] != []
    assert last["response"]["output"][-1]["status"] == "incomplete"


def test_a_refusal_that_comes_late_is_told_in_the_stream() -> None:
    class Slow(FakeBackend):
        async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
            await asyncio.sleep(1)
            raise InvalidRequest("too long", param="messages")
            yield

    with running_app(backend=Slow(), capture="off", sse_keep_alive=0.1) as server:
        sent = server.http.post(URL, json={"input": "Hi", "stream": True}).text
    last = json.loads(sent.rpartition("data: ")[2])
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "invalid_prompt", "message": "too long"}


def test_a_fault_of_our_own_is_an_error_event(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def trips(*_: Any) -> None:
        raise RuntimeError("over its own feet")

    monkeypatch.setattr("serve.response_items.Output.add", trips)
    last = events(server)[-1]
    assert (last["type"], last["code"], last["param"]) == ("error", "internal_error", None)
    assert "feet" not in last["message"]


def test_the_row_is_there_before_the_answer_ends(serve: Any) -> None:
    server = serve(THINKS)
    seen = []
    with server.openai.responses.create(model="fake", input="Hi", stream=True) as stream:
        for event in stream:
            if event.type == "response.completed":
                seen = [(row.id, row.response_text, row.reasoning) for row in server.rows()]
    assert seen == [(event.response.id.removeprefix("resp_"), TEXT, "Let me thïnk")]
    (row,) = server.rows()
    assert row.request == {"model": "fake", "input": "Hi", "stream": True}


def test_store_false_leaves_no_row_and_nothing_is_ever_stored(serve: Any) -> None:
    server = serve()
    assert ask(server, store=False)["store"] is False
    assert server.rows() == []
    assert ask(server, store=True)["store"] is False
    assert len(server.rows()) == 1


def test_a_client_that_leaves_ends_its_generation() -> None:
    backend = FakeBackend(Script(pieces=(b"x",) * 200, pause=0.05))
    with running_app(backend=backend, capture="off") as server:
        with server.openai.responses.create(model="fake", input="Hi", stream=True) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    break
        eventually(lambda: backend.cancelled, 20)
