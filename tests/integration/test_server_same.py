"""Streamed and whole answers are the same, field by field, whatever is asked: the whole body against its chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.answers import joined
from tests.fake_backend import Script
from tests.servers import CHAT, AppServer, Server, running_app

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
THINKING = (b"Let me", b" th\xc3", b"\xafnk")
SCRIPTS = {
    "says": Script(),
    "thinks": Script(thought=THINKING, cached=3),
    "calls": Script(thought=THINKING, calls=(("look", '{"at":', ' "ä"}'), ("look",), ("see", "{", "}"))),
    "only calls": Script(thought=(b"hm",), pieces=(), calls=(("look", '{"at": [1, 2,', " 3]}"),)),
    "choices": Script(
        by_choice=(
            {"thought": (b"hm",)},
            {"pieces": (b"x",), "finish": "length"},
            {"pieces": (), "calls": (("look", "{}"),)},
            {"repeat": 4},
        )
    ),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True},
    "alternatives": {"logprobs": True, "top_logprobs": 3, "return_tokens_as_token_ids": True},
    "cut": {"max_tokens": 5, "logprobs": True},
    "cut in a call": {"max_completion_tokens": 15, "tools": [TOOL]},
    "tools": {"tools": [TOOL], "logprobs": True, "return_token_ids": True},
    "one call": {"tools": [TOOL], "parallel_tool_calls": False},
    "no calls": {"tools": [TOOL], "tool_choice": "none"},
    "ids": {"return_token_ids": True},
    "hidden": {"include_reasoning": False, "logprobs": True, "tools": [TOOL]},
    "predicted": {"prediction": {"type": "content", "content": "Hello"}, "service_tier": "auto"},
    "four": {"n": 4, "logprobs": True, "top_logprobs": 1, "tools": [TOOL], "return_token_ids": True},
    "three": {"n": 3, "seed": 7, "max_tokens": 3},
}
# Of a model: what it says must be settled by its seed.
ASKED_OF_A_MODEL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "sampled": {"temperature": 1, "seed": 1, "logprobs": True, "return_token_ids": True},
    "thinking": {"seed": 2, "enable_thinking": True, "logprobs": True},
    "not thinking": {"seed": 3, "reasoning_effort": "none", "stop": ["e", "a"]},
    "choices": {"seed": 4, "n": 3, "logprobs": True, "return_token_ids": True, "temperature": 1.5},
    "tools": {"seed": 5, "tools": [TOOL], "enable_thinking": False},
    "json": {"seed": 6, "response_format": {"type": "json_object"}, "enable_thinking": False},
    "penalties": {"seed": 7, "presence_penalty": 2, "logit_bias": {"5": -100}, "min_tokens": 4},
}


@pytest.fixture(scope="module", params=SCRIPTS)
def server(request: pytest.FixtureRequest) -> Iterator[AppServer]:
    with running_app(SCRIPTS[request.param], capture="off") as server:
        yield server


def both(server: Server, asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body of a whole answer, and that of a streamed one put together."""
    asked = {"messages": [{"role": "user", "content": "Hi"}], **asked}
    whole = server.http.post(CHAT, json=asked)
    assert whole.status_code == 200, whole.text
    streamed = server.http.post(CHAT, json={**asked, "stream": True, "stream_options": {"include_usage": True}})
    *lines, done = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
    assert done == "[DONE]"
    return whole.json(), joined(map(json.loads, lines))


@pytest.mark.parametrize("asked", REQUESTS)
def test_streamed_is_whole(server, asked):
    whole, streamed = both(server, REQUESTS[asked])
    for body in (whole, streamed):
        assert body.pop("id").startswith("chatcmpl-")
        body.pop("created")
    assert streamed == whole


@pytest.mark.parametrize("asked", ASKED_OF_A_MODEL)
def test_streamed_is_whole_for_a_model(drafting, asked):
    whole, streamed = both(drafting, {"max_tokens": 24, **ASKED_OF_A_MODEL[asked]})
    for body in (whole, streamed):
        for name in ("id", "created", "timings"):
            body.pop(name, None)
        body["usage"].pop("prompt_tokens_details")  # the second one may find what the first one left
        for choice in body["choices"]:
            choice.pop("timings", None)
            for call in choice["message"].get("tool_calls", ()):
                assert call.pop("id").startswith("call_")
    assert streamed == whole
    usage = whole["usage"]
    assert usage["completion_tokens"] <= 24 * len(whole["choices"])
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    for choice in whole["choices"]:
        if choice["logprobs"] and "token_ids" in choice:
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def test_the_first_of_several_choices_is_what_one_alone_would_be(drafting):
    asked = {"seed": 8, "temperature": 2, "top_k": 0, "top_p": 1, "max_tokens": 12, "logprobs": True}
    alone = drafting.chat(**asked).json()["choices"][0]
    choices = drafting.chat(**asked, n=4).json()["choices"]
    choices[0].pop("timings")
    assert choices[0] == alone
    assert len({json.dumps(choice["logprobs"]) for choice in choices}) == 4
