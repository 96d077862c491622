"""POST /v1/chat/completions through the official client: what is asked for, what comes back, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_backend import Script
from tests.servers import CHAT

TEXT = "Hello wörld 🌍!\nbye"
ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def lines(server, **more) -> list[str]:
    """The raw lines of a streamed answer."""
    with server.http.stream("POST", CHAT, json={**ASK, "stream": True, **more}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return response.read().decode().split("\n")


def chunks(server, **more) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in lines(server, **more) if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def test_the_client_gets_an_answer_with_usage_and_timings(serve):
    answer = serve().openai.chat.completions.create(**ASK)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == 17
    assert answer.system_fingerprint.startswith("fp_")
    timings = answer.model_extra["timings"]
    # Tokens: 1 from prefill, then steps of (drafted, accepted) = (3, 2), (3, 0), (3, 3), (0, 0).
    assert timings["draft_n"] == 9
    assert timings["draft_n_accepted"] == 5
    assert timings["draft_n_per_pos"] == [3, 3, 3]
    assert timings["draft_n_accepted_per_pos"] == [2, 2, 1]
    assert timings["drafter"] == "mtp"
    assert timings["prompt_n"] == 7
    assert timings["prompt_per_second"] == pytest.approx(700)
    assert timings["predicted_per_token_ms"] == pytest.approx(5)


def test_streamed_and_whole_answers_are_the_same(serve):
    server = serve(Script(thought=(b"Let me", b" th\xc3", b"\xafnk")))
    more = {"logprobs": True, "top_logprobs": 2}
    whole = server.openai.chat.completions.create(**ASK, **more)
    parts = list(server.openai.chat.completions.create(**ASK, **more, stream=True))
    deltas = [part.choices[0].delta for part in parts]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == message.content == TEXT
    reasoning = "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas)
    assert reasoning == message.model_extra["reasoning_content"] == "Let me thïnk"
    streamed = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == whole.usage.completion_tokens
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].system_fingerprint == whole.system_fingerprint
    assert len({part.id for part in parts}) == 1


def test_the_first_chunk_has_the_role_and_the_last_an_empty_delta(serve):
    got = chunks(serve())
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in got[:-1])
    assert got[-1]["choices"][0]["delta"] == {}
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    assert got[-1]["timings"]["predicted_n"] == 10
    assert all("timings" not in chunk for chunk in got[:-1])
    assert all("usage" not in chunk for chunk in got)


def test_events_are_separated_by_single_newlines(serve):
    got = lines(serve())
    assert got[1::2] == [""] * (len(got) // 2)
    assert all(line.startswith("data: ") for line in got[::2] if line)


def test_usage_comes_in_a_chunk_of_its_own_only_when_asked_for(serve):
    server = serve()
    *others, last = chunks(server, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 10,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert all(chunk["usage"] is None for chunk in others)
    assert others[-1]["choices"][0]["finish_reason"] == "stop"


def test_reasoning_tokens_are_counted_where_the_backend_counts_them(serve):
    answer = serve(Script(thought=(b"a", b"b"))).openai.chat.completions.create(**ASK)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


def test_log_probabilities_have_openais_shape(serve):
    answer = serve().chat(logprobs=True, top_logprobs=2).json()
    first, *_ = answer["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "Hel",
        "logprob": -0.5,
        "bytes": [72, 101, 108],
        "top_logprobs": [
            {"token": "alt0", "logprob": -9999.0, "bytes": [97, 108, 116, 48]},  # minus infinity is not JSON
            {"token": "alt1", "logprob": -1.0, "bytes": [97, 108, 116, 49]},
        ],
    }


def test_without_logprobs_there_are_none(serve):
    assert serve().chat().json()["choices"][0]["logprobs"] is None


def test_what_is_asked_for_reaches_the_backend(serve):
    server = serve()
    server.chat(
        content=[{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-5,
        stop="END",
        max_completion_tokens=3,
        chat_template_kwargs={"enable_thinking": False},
    )
    (request,) = server.backend.requests
    assert request.messages == [{"role": "user", "content": "one two"}]
    asked = request.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0, 0.5, 0, 0.1)
    assert (asked.seed, asked.stop, asked.max_tokens) == (-5, ("END",), 3)
    assert request.template_kwargs == {"enable_thinking": False}


def test_null_is_the_same_as_nothing(serve):
    server = serve()
    names = ["temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "stream", "stream_options", "tools", "n"]
    assert server.chat(**dict.fromkeys(names)).status_code == 200
    asked = server.backend.requests[0].sampling
    assert (asked.temperature, asked.top_k, asked.seed, asked.stop, asked.max_tokens) == (None, None, None, (), None)


def test_max_tokens_ends_with_length(serve):
    answer = serve().openai.chat.completions.create(**ASK, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_an_answer_can_be_sent_back_as_it_came(serve):
    server = serve(Script(thought=(b"hm",)))
    message = server.chat().json()["choices"][0]["message"]
    follow_up = [*ASK["messages"], message, {"role": "user", "content": "And?"}]
    assert server.http.post(CHAT, json={"messages": follow_up}).status_code == 200
    assert server.backend.requests[1].messages[1] == {"role": "assistant", "content": TEXT, "reasoning_content": "hm"}


def test_many_streams_run_at_once(serve):
    server = serve(Script(pause=0.02))
    streams = [server.openai.chat.completions.create(**ASK, stream=True) for _ in range(8)]
    texts = ["".join(chunk.choices[0].delta.content or "" for chunk in stream) for stream in streams]
    assert texts == [TEXT] * 8


def test_models_are_listed_and_retrieved_by_name(serve):
    server = serve(served_model_name="org/mine")
    assert [model.id for model in server.openai.models.list()] == ["org/mine"]
    assert server.openai.models.retrieve("org/mine").owned_by == "draftloop"
    assert server.chat(model="org/mine").json()["model"] == "org/mine"
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_token_whose_text_is_held_back_still_has_its_log_probability_at_once(serve):
    server = serve(Script(pieces=(b"a", b"b", b"c", b"\xc3", b"\xa9")))
    got = chunks(server, logprobs=True)
    tokens = [[token["bytes"] for token in chunk["choices"][0]["logprobs"]["content"]] for chunk in got[1:-1]]
    assert tokens == [[[97]], [[98], [99], [195]], [[169]]]
    assert [chunk["choices"][0]["delta"] for chunk in got[1:-1]] == [{"content": t} for t in ("a", "bc", "é")]
