"""Several answers to one request: each a generation and a row of its own, told as one response."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.fake_backend import Script
from tests.servers import CHAT, eventually

USER = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"model": "fake", "messages": [USER]}
THREE = Script(by_choice=({"pieces": (b"a", b"b")}, {"pieces": (b"c",), "finish": "length"}, {"repeat": 3}))


def chunks(server, **asked: Any) -> list[dict[str, Any]]:
    text = server.http.post(CHAT, json={**ASK, "stream": True, **asked}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line and "[DONE]" not in line]


def test_each_choice_has_its_own_text_end_and_row(serve):
    server = serve(THREE)
    answer = server.openai.chat.completions.create(**ASK, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    assert [choice.message.content[:5] for choice in answer.choices] == ["ab", "c", "Hello"]
    first, *others = sorted(server.rows(), key=lambda row: row.parameters.get("choice", 0))
    assert answer.id == f"chatcmpl-{first.id}"
    assert "response" not in first.parameters
    assert [row.parameters["response"] for row in others] == [first.id, first.id]
    assert [row.response_text for row in (first, *others)] == [choice.message.content for choice in answer.choices]
    assert len({row.id for row in (first, *others)}) == 3
    assert server.metric("capture_generations_total", status="finished") == 3


def test_the_prompt_counts_once_and_every_token_of_every_choice(serve):
    usage = serve(THREE).openai.chat.completions.create(**ASK, n=3).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 2 + 1 + 30, 40)


@pytest.mark.parametrize("seed", [None, 5])
def test_choices_share_one_seed_and_draw_each_their_own_noise(serve, seed):
    server = serve()
    server.chat(n=3, seed=seed)
    asked = [request.sampling for request in server.backend.requests]
    assert sorted(sampling.choice for sampling in asked) == [0, 1, 2]
    (drawn,) = {sampling.seed for sampling in asked}
    assert drawn is not None
    assert seed is None or drawn == seed
    if seed is None:
        server.chat(n=2)
        assert server.backend.requests[-1].sampling.seed != drawn


def test_one_choice_leaves_its_seed_to_the_backend(serve):
    server = serve()
    server.chat(n=1)
    (request,) = server.backend.requests
    assert (request.sampling.seed, request.sampling.choice) == (None, 0)


def test_streams_are_interleaved_and_every_choice_ends_once(serve):
    got = chunks(
        serve(Script(pause=0.01)), n=3, logprobs=True, return_token_ids=True, stream_options={"include_usage": True}
    )
    assert [chunk["choices"][0]["index"] for chunk in got[:3]] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in got[:3])
    assert got[0]["prompt_token_ids"] == list(range(1, 8))
    assert all("prompt_token_ids" not in chunk for chunk in got[1:])
    ends = [chunk["choices"][0] for chunk in got[:-1] if chunk["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in got[:-1] if chunk["choices"][0]["index"] == index]
        assert mine[-1]["finish_reason"] == "stop"
        assert [token for choice in mine for token in choice.get("token_ids", [])] == list(range(100, 110))
        assert sum(len(choice["logprobs"]["content"]) for choice in mine if choice["logprobs"]) == 10
    order = [chunk["choices"][0]["index"] for chunk in got[3:-1]]
    assert order != sorted(order)
    assert got[-1]["usage"]["completion_tokens"] == 30
    assert len({chunk["id"] for chunk in got}) == 1


def test_a_choice_that_breaks_breaks_the_answer(serve):
    server = serve(Script(by_choice=({"pause": 0.05, "repeat": 50}, {"breaks_after": 1})))
    response = server.chat(n=2)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    eventually(lambda: len(server.rows()) == 2)
    assert {row.status for row in server.rows()} == {"cancelled", "failed"}


def test_a_choice_that_breaks_breaks_the_stream(serve):
    server = serve(Script(by_choice=({"pause": 0.05, "repeat": 50}, {"finish": "error"})))
    with pytest.raises(openai.APIError, match="out of memory"):
        for _ in server.openai.chat.completions.create(**ASK, n=2, stream=True):
            pass
    eventually(lambda: len(server.rows()) == 2)
    assert {row.status for row in server.rows()} == {"cancelled", "failed"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_every_choice(serve, stream):
    server = serve(Script(pause=0.05, repeat=100))
    if stream:
        with server.openai.chat.completions.create(**ASK, n=3, stream=True) as answer:
            next(iter(answer))
    else:
        with pytest.raises(openai.APITimeoutError):
            server.openai.with_options(timeout=0.5).chat.completions.create(**ASK, n=3)
    eventually(lambda: len(server.rows()) == 3)
    assert {row.status for row in server.rows()} == {"cancelled"}
    assert len(set(server.backend.cancelled)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_backend_refuses_leaves_no_choice_behind(serve, stream):
    server = serve(Script(refuses="No."))
    response = server.chat(n=3, stream=stream)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "No.")
    eventually(lambda: not server.service.running)
    assert server.rows() == []
