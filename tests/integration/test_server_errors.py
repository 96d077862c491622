"""Everything a client can do wrong, and everything that can go wrong here: OpenAI's error body, naming the field."""

from __future__ import annotations

import json
import re

import openai
import pytest

from tests.fake_backend import FakeBackend, Script
from tests.servers import CHAT, eventually, running_app

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server():
    with running_app(capture="off", unknown_fields="refuse") as server:
        yield server


def error(response, status: int) -> dict:
    """The error object of a response, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert "Traceback" not in response.text
    return body["error"]


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("max_tokens", 0),
    ("max_completion_tokens", -1),
    ("top_logprobs", 65),
    ("n", 0),
    ("n", 129),
    ("tools", [TOOL, TOOL]),
    ("tools", [{**TOOL, "function": {"name": f"f{i}"}} for i in range(129)]),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function", "function": {"name": "x" * 65}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "mood": "good"}}]),
    ("tool_choice", "any"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function"}),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}),
    ("reasoning_effort", "huge"),
    ("thinking_budget", -1),
    ("thinking_token_budget", -1),
    ("verbosity", "loud"),
    ("stop", ""),
    ("stop", ["x"] * 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [1] * 129),
    ("min_tokens", -1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 101),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"5": -101}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"hello": 1}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 257),
    ("cache_salt", ""),
    ("drafter", ""),
    ("messages", []),
]
WRONG_TYPES = [
    ("temperature", "hot"),
    ("temperature", True),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("stream", "yes"),
    ("stop", 5),
    ("stop", [5]),
    ("logprobs", 1),
    ("n", True),
    ("n", "2"),
    ("tools", {}),
    ("tools", ["f"]),
    ("tool_choice", 5),
    ("parallel_tool_calls", "no"),
    ("reasoning_effort", 3),
    ("reasoning", "high"),
    ("return_token_ids", 1),
    ("include_reasoning", "no"),
    ("metadata", {"a": 1}),
    ("user", 7),
    ("chat_template_kwargs", []),
    ("stream_options", True),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", 1),
    ("min_tokens", 1.5),
    ("ignore_eos", 1),
    ("presence_penalty", "0"),
    ("repetition_penalty", True),
    ("logit_bias", [[5, 1]]),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": None}),
    ("bad_words", "x"),
    ("cache_salt", 5),
    ("drafter", 5),
    ("prediction", "x"),
    ("response_format", "json_object"),
    ("structured_outputs", []),
    ("messages", "Hi"),
    ("messages", None),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE + WRONG_TYPES)
def test_a_wrong_value_is_refused_naming_its_field(server, name, value):
    before = len(server.backend.requests)
    told = error(server.http.post(CHAT, json={"messages": [USER], name: value}), 400)
    assert re.split(r"[\[.]", told["param"])[0] == name
    assert name in told["message"]
    assert len(server.backend.requests) == before


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "nobody", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "tool", "content": 5, "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": [1]}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call"),
        ({"role": "assistant", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}, "messages[0].content[0].mood"),
        ({"role": "assistant", "tool_calls": [{**CALL, "mood": "good"}]}, "messages[0].tool_calls[0].mood"),
        ("x", "messages[0]"),
    ],
)
def test_a_wrong_message_is_refused_naming_the_place(server, message, param):
    assert error(server.http.post(CHAT, json={"messages": [message]}), 400)["param"] == param


def test_an_image_is_refused_clearly(server):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    told = error(server.chat(content=[{"type": "text", "text": "What is this?"}, image]), 400)
    assert told["param"] == "messages[0].content[1]"
    assert "image_url" in told["message"]
    assert "text only" in told["message"]


WRONG_OUTPUTS = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "extra": 1}}, "response_format.extra"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": None}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "mood": "good"}}, "structured_outputs.mood"),
    ({"prediction": {"content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0]"),
]


@pytest.mark.parametrize(("given", "param"), WRONG_OUTPUTS)
def test_a_wrong_shape_of_the_output_is_refused_naming_the_place(server, given, param):
    before = len(server.backend.requests)
    told = error(server.chat(**given), 400)
    assert told["param"] == param
    assert param in told["message"]
    assert len(server.backend.requests) == before


NOT_YET = [
    ("functions", [{"name": "f"}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("guided_json", {}),
    ("logits_processors", ["x"]),
    ("best_of", 2),
    ("use_beam_search", True),
    ("json_schema", {}),
]


@pytest.mark.parametrize("unknown_fields", ["ignore", "refuse"])
def test_a_parameter_that_is_known_and_not_served_is_refused_by_name(unknown_fields):
    with running_app(capture="off", unknown_fields=unknown_fields) as server:
        for name, value in NOT_YET:
            told = error(server.chat(**{name: value}), 400)
            assert (told["param"], told["code"]) == (name, "unsupported_parameter")
            assert name in told["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("tools", []),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("logit_bias", {}),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("modalities", ["text"]),
        ("ignore_eos", False),
        ("top_k", 0),
        ("service_tier", "auto"),
        ("verbosity", "low"),
        ("prompt_cache_retention", "24h"),
        ("function_call", "none"),
        ("functions", []),
        ("parallel_tool_calls", True),
        ("web_search_options", None),
        ("include_reasoning", True),
        ("return_token_ids", False),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("metadata", {"a": "b"}),
    ],
)
def test_a_parameter_that_asks_for_nothing_is_accepted(server, name, value):
    assert server.chat(**{name: value}).status_code == 200


def test_an_unknown_parameter_is_refused_where_the_server_is_told_to(server):
    told = error(server.chat(temprature=1), 400)
    assert (told["param"], told["code"]) == ("temprature", "unknown_parameter")
    assert server.chat(temprature=None).status_code == 200


def test_unknown_parameters_are_ignored_at_any_depth(serve):
    server = serve()
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    asked = {
        "messages": [{"role": "user", "content": [part, part], "mood": "good"}, {"role": "assistant", "mood": 1}],
        "tools": [{**TOOL, "mood": 1, "function": {**TOOL["function"], "mood": {"a": [1]}, "description": None}}],
        "tool_choice": {"type": "function", "function": {"name": "f", "mood": 1}, "mood": 1},
        "response_format": {"type": "text", "mood": 1},
        "stream_options": {"mood": 1},
        "stream": True,
        "temprature": 1,
        "mood": None,
        "seed": 3,
    }
    assert server.http.post(CHAT, json=asked).status_code == 200
    (request,) = server.backend.requests
    assert request.messages == [{"role": "user", "content": "HiHi"}, {"role": "assistant", "content": None}]
    assert request.tools == [TOOL]
    assert (request.tool_name, request.sampling.seed) == ("f", 3)
    assert server.rows()[0].request == asked  # the row keeps what was sent


def test_beside_unknown_parameters_a_wrong_one_is_still_refused(serve):
    server = serve()
    assert error(server.chat(temprature=1, temperature=5), 400)["param"] == "temperature"
    assert (
        error(server.chat(temprature=1, tools=[{"type": "function", "mood": 1}]), 400)["param"] == "tools[0].function"
    )
    assert server.backend.requests == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"thinking_budget": 3, "thinking_token_budget": 4}, "thinking_budget"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                },
            },
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(server, given, param):
    assert error(server.chat(**given), 400)["param"] == param


def test_the_same_limit_given_twice_is_accepted(server):
    assert server.chat(max_tokens=5, max_completion_tokens=5).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'a': 1}", b'{"temperature": NaN}', b'{"user": "\\ud800"}', b"[" * 100_000, b"\xff\xfe"],
    ids=["empty", "open", "quotes", "nan", "surrogate", "deep", "not utf-8"],
)
def test_bad_json_is_refused(server, body):
    response = server.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert error(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"'])
def test_a_body_that_is_no_object_is_refused(server, body):
    response = server.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert "object" in error(response, 400)["message"]


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_of_another_type_is_refused(server, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = server.http.post(CHAT, content=json.dumps({"messages": [USER]}), headers=headers)
    assert "application/json" in error(response, 415)["message"]


def test_a_charset_beside_the_type_is_fine(server):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert server.http.post(CHAT, content=json.dumps({"messages": [USER]}), headers=headers).status_code == 200


def test_a_huge_body_is_refused(server):
    headers = {"Content-Type": "application/json"}
    error(server.http.post(CHAT, content=b" " * (32 * 1024 * 1024 + 1), headers=headers), 413)


def test_an_unknown_model_is_not_found(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.chat.completions.create(model="gpt-5", messages=[USER])
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "gpt-5" in str(caught.value)


def test_an_unknown_path_is_not_found(server):
    assert "/v1/nothing" in error(server.http.get("/v1/nothing"), 404)["message"]


def test_a_wrong_method_is_told_which_ones_there_are(server):
    response = server.http.get(CHAT)
    assert "GET" in error(response, 405)["message"]
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_backend_refuses_has_its_own_status_even_when_streaming(serve, stream):
    server = serve(Script(refuses="This model's maximum context length is 5 tokens."))
    told = error(server.chat(stream=stream), 400)
    assert (told["code"], told["param"]) == ("context_length_exceeded", "messages")
    assert server.rows() == []


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "("}},
    ],
)
def test_a_grammar_the_backend_refuses_is_named_as_the_client_named_it(serve, asked):
    server = serve(Script(refuses_grammar="That is no grammar."))
    told = error(server.chat(**asked), 400)
    assert (told["param"], told["message"]) == (next(iter(asked)), "That is no grammar.")


def test_a_drafter_may_be_named_only_where_the_server_allows_it(serve):
    server = serve()
    with pytest.raises(openai.PermissionDeniedError) as caught:
        server.openai.chat.completions.create(model="fake", messages=[USER], extra_body={"drafter": "mtp"})
    assert (caught.value.param, caught.value.code) == ("drafter", "drafter_choice_not_allowed")
    assert "--allow-drafter-choice" in str(caught.value)
    assert server.backend.requests == []


def test_a_drafter_that_is_not_loaded_is_refused(serve):
    server = serve(allow_drafter_choice=True)
    assert error(server.chat(drafter="student"), 400)["param"] == "drafter"


def test_a_failed_generation_is_an_error(serve):
    server = serve(Script(finish="error"))
    told = error(server.chat(), 500)
    assert "out of memory" in told["message"]
    assert server.rows()[0].status == "failed"


def test_a_failed_stream_ends_with_an_error(serve):
    server = serve(Script(finish="error"))
    stream = server.openai.chat.completions.create(model="fake", messages=[USER], stream=True)
    reasons: list[str | None] = []
    with pytest.raises(openai.APIError, match="out of memory"):
        reasons.extend(chunk.choices[0].finish_reason for chunk in stream)
    assert set(reasons) == {None}


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_the_backend_shows_no_traceback_and_leaves_a_failed_row(serve, stream):
    server = serve(Script(breaks_after=2))
    response = server.chat(stream=stream)
    assert "feet" not in response.text
    if stream:
        *_, told, done = [line for line in response.text.split("\n") if line]
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == "generation_failed"
        assert done == "data: [DONE]"
    else:
        assert error(response, 500)["code"] == "generation_failed"
    (row,) = server.rows()
    assert (row.status, row.error) == ("failed", "the engine tripped over its own feet")
    assert row.response_text == "Hello wör"
    assert server.chat("Still there?", max_tokens=1).status_code == 200


def test_a_bug_of_the_server_shows_no_traceback(serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(server.backend, "info", lambda: 1 / 0)
    told = error(server.http.get("/version"), 500)
    assert told["code"] == "internal_error"
    assert "division" not in told["message"]


def test_a_loading_server_says_so(serve):
    server = serve(backend=FakeBackend(start_delay=1.0), ready=False)
    response = server.chat()
    assert error(response, 503)["code"] == "model_loading"
    assert int(response.headers["retry-after"]) > 0
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").json()["status"] == "loading"
    assert server.http.get("/").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    error(server.http.get("/v1/models"), 503)
    error(server.http.get("/version"), 503)
    eventually(lambda: server.http.get("/ready").status_code == 200)
    assert server.chat().status_code == 200


def test_a_dead_engine_is_told_to_whoever_asks(serve):
    server = serve()
    server.backend.alive = False
    assert error(server.chat(), 503)["code"] == "engine_failed"
    assert server.http.get("/health").status_code == 503
    assert server.http.get("/ready").json()["status"] == "failed"
