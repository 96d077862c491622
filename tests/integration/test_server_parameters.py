"""What changes how an answer is chosen: parameters on their way to the backend, into the row, and back as usage."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel

from backend.interface import Grammar, SamplingRequest
from tests.fake_backend import SLOTS, FakeBackend, Script

USER = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"model": "fake", "messages": [USER]}
OPENAIS: dict[str, Any] = {
    "presence_penalty": 1.5,
    "frequency_penalty": -2,
    "logit_bias": {"5": -100, "42": 7.5},
}
VLLMS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "bad_words": ["never", " ever"],
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [7, 9],
}
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "ä"}}, "required": ["z"]}


class Weather(BaseModel):
    city: str
    degrees: float


def ask(server, **more: Any) -> Any:
    return server.openai.chat.completions.create(**ASK, **more)


def test_every_sampling_parameter_reaches_the_backend(serve):
    server = serve()
    ask(server, **OPENAIS, extra_body=VLLMS)
    asked = server.backend.requests[0].sampling
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (1.5, -2, 1.1)
    assert asked.logit_bias == {5: -100, 42: 7.5}
    assert asked.bad_words == ("never", " ever")
    assert (asked.min_tokens, asked.ignore_eos, asked.stop_token_ids) == (2, True, (7, 9))


def test_what_is_not_asked_for_is_left_to_the_backend(serve):
    server = serve()
    names = [*OPENAIS, *VLLMS, "response_format", "structured_outputs", "prediction", "drafter", "cache_salt"]
    assert server.chat().status_code == 200
    assert server.chat(**dict.fromkeys(names)).status_code == 200
    for request in server.backend.requests:
        assert request.sampling == SamplingRequest()
        assert (request.prediction, request.drafter, request.cache_salt) == (None, None, None)


def test_zero_is_asked_for_where_the_backend_has_another_default(serve):
    server = serve()
    server.chat(presence_penalty=0, frequency_penalty=0, repetition_penalty=1)
    asked = server.backend.requests[0].sampling
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0, 0, 1)


def test_the_limits_themselves_are_allowed(serve):
    server = serve()
    for given in (
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
        {"repetition_penalty": 100, "logit_bias": {"0": 100, str(2**31 - 1): -100}},
        {"logit_bias": {str(token): 1 for token in range(1024)}, "stop_token_ids": [0] * 128},
        {"max_tokens": 4, "min_tokens": 4},
        {"bad_words": ["x"] * 256},
    ):
        assert server.chat(**given).status_code == 200


@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "[a-z]+"}}, Grammar("regex", "[a-z]+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"choice": ["a.b", "c|d"]}}, Grammar("regex", r"a\.b|c\|d")),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, Grammar("regex", "a")),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
    ],
)
def test_what_the_answer_must_match_becomes_a_grammar(serve, asked, grammar):
    server = serve()
    assert server.chat(**asked).status_code == 200
    assert server.backend.requests[0].sampling.grammar == grammar


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_a_schema_reaches_the_backend_as_json_with_its_properties_in_order(serve, asked):
    server = serve()
    assert server.chat(**asked).status_code == 200
    grammar = server.backend.requests[0].sampling.grammar
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.source) == SCHEMA
    assert list(json.loads(grammar.source)["properties"]) == ["z", "a"]


def test_the_clients_own_models_are_parsed(serve):
    server = serve(Script(pieces=(b'{"city": "Bern",', b' "degrees": 21.5}')))
    answer = server.openai.chat.completions.parse(**ASK, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Bern", degrees=21.5)
    grammar = server.backend.requests[0].sampling.grammar
    assert list(json.loads(grammar.source)["properties"]) == ["city", "degrees"]


@pytest.mark.parametrize(
    "content", ["def f(): ...", [{"type": "text", "text": "def "}, {"type": "text", "text": "f(): ..."}]]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_counted_in_the_usage(serve, content, stream):
    server = serve()
    prediction = {"type": "content", "content": content}
    if stream:
        *_, last = ask(server, prediction=prediction, stream=True, stream_options={"include_usage": True})
    else:
        last = ask(server, prediction=prediction)
    assert server.backend.requests[0].prediction == "def f(): ..."
    details = last.usage.completion_tokens_details
    # Steps of (drafted, accepted): (3, 2), (3, 0), (3, 3), (0, 0).
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 4)


def test_without_a_prediction_none_of_it_is_accepted_or_rejected(serve):
    details = ask(serve()).usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert details.reasoning_tokens is None


def test_cached_prompt_tokens_stand_in_usage_and_timings(serve):
    server = serve(Script(cached=5))
    answer = ask(server)
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    timings = answer.model_extra["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (5, 2)
    assert server.rows()[0].timings["cache_n"] == 5


def test_a_salt_parts_the_prefix_cache(serve):
    server = serve()
    ask(server, extra_body={"cache_salt": "mine"})
    assert server.backend.requests[0].cache_salt == "mine"


def test_requests_choose_between_loaded_drafters(serve):
    server = serve(backend=FakeBackend(drafters=("mtp", "none", "prediction")), allow_drafter_choice=True)
    chosen = [
        ask(server, extra_body=body).model_extra["timings"]["drafter"] for body in ({}, {"drafter": "prediction"})
    ]
    assert chosen == ["mtp", "prediction"]
    assert [row.drafter for row in server.rows()] == chosen


def test_the_row_keeps_what_was_asked_and_what_was_in_effect(serve_process):
    server = serve_process("--allow-drafter-choice", "--further-drafters", "prediction,hot_vocab:x.safetensors")
    more = {**VLLMS, "structured_outputs": {"regex": "a+"}, "cache_salt": "s", "drafter": "hot_vocab"}
    prediction = {"type": "content", "content": "x"}
    answer = ask(server, **OPENAIS, prediction=prediction, extra_body=more)
    (row,) = server.rows()
    assert row.request == {**ASK, **OPENAIS, **more, "prediction": prediction}
    assert row.parameters == {
        "temperature": 1.0,
        **OPENAIS,
        **VLLMS,
        "grammar": {"kind": "regex", "source": "a+"},
    }
    assert row.drafter == answer.model_extra["timings"]["drafter"] == "hot_vocab"
    assert server.metric("spec_decode_num_drafts_total", drafter="hot_vocab") == 3
    assert server.metric("spec_decode_num_drafts_total", drafter="mtp") == 0
    assert (
        server.metric("spec_decode_num_draft_tokens_per_pos_total", drafter="prediction", position=str(SLOTS - 1)) == 0
    )


def test_thinking_reaches_the_backend(serve):
    server = serve()
    ask(server, reasoning_effort="none", extra_body={"thinking_token_budget": 5})
    ask(server, reasoning_effort="high", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    told = [(request.template_kwargs, request.thinking_budget) for request in server.backend.requests]
    assert told == [({"enable_thinking": False}, 5), ({"enable_thinking": False}, None)]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_hidden_from_the_client_alone(serve, stream):
    server = serve(Script(thought=(b"secret", b" thoughts")))
    response = server.chat(include_reasoning=False, stream=stream)
    assert "secret" not in response.text
    assert "reasoning_content" not in response.text
    (row,) = server.rows()
    assert row.reasoning == "secret thoughts"
    assert server.chat(include_reasoning=False).json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_reasoning_cut_short_is_no_more_than_was_said(serve):
    usage = ask(serve(Script(thought=(b"a",) * 9)), max_tokens=4).usage
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (4, 4)


def test_token_ids_come_with_the_answer_where_asked_for(serve):
    server = serve(Script(thought=(b"hm",)))
    body = server.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == list(range(1, 8))
    assert body["choices"][0]["token_ids"] == list(range(100, 111))
    assert "token_ids" not in server.chat().text
    assert "token_ids" not in server.chat(stream=True).text


def test_tokens_can_be_told_as_ids(serve):
    body = serve().chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()
    first, *_ = body["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("token_id:100", [72, 101, 108])
    assert first["top_logprobs"][0]["token"] == "token_id:0"


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_its_log_probability_those_of_thoughts_and_calls_too(serve, stream):
    server = serve(Script(thought=(b"hm",), pieces=(b"so",), calls=(("f", "{", "}"),)))
    tools = [{"type": "function", "function": {"name": "f"}}]
    if stream:
        parts = list(ask(server, tools=tools, logprobs=True, stream=True))
        told = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.content]
    else:
        told = ask(server, tools=tools, logprobs=True).choices[0].logprobs.content
    assert [token.token for token in told] == ["hm", "so", "f", "{", "}"]
    assert [token.logprob for token in told] == [-0.5, -1, -1.5, -2, -2.5]


def test_what_changes_nothing_is_accepted_and_the_tier_is_told(serve):
    server = serve()
    effectless = {
        "verbosity": "low",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "user": "z",
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "store": True,
        "stream_options": {"include_obfuscation": True},
    }
    *_, end = ask(server, **effectless, service_tier="flex", stream=True)
    assert end.service_tier == "default"
    assert ask(server, service_tier="auto").service_tier == "default"
    assert "service_tier" not in server.chat().json()
    assert server.backend.requests[0].sampling == SamplingRequest()


def test_every_field_of_a_sampling_request_is_tried_in_some_test():
    tried = {*OPENAIS, *VLLMS, "grammar"}
    before = {
        "choice",
        "prompt_logprobs",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "stop",
        "top_logprobs",
    }
    assert {field.name for field in fields(SamplingRequest)} == tried | before
