"""POST /v1/completions: raw prompts in every form, echoed and told of, streamed and not, several at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_backend import Script
from tests.servers import eventually, running_app

PATH = "/v1/completions"
TEXT = "Hello wörld 🌍!\nbye"
ASK: dict[str, Any] = {"model": "fake", "prompt": "Hé"}


def whole(server, **more) -> dict[str, Any]:
    response = server.http.post(PATH, json={**ASK, **more})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server, **more) -> list[dict[str, Any]]:
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}, **more}
    with server.http.stream("POST", PATH, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.read().decode().split("\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def refused(server, **more) -> dict[str, Any]:
    response = server.http.post(PATH, json={**ASK, **more})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks as the answer they make."""
    *some, last = parts
    answer = {name: last[name] for name in ("id", "object", "created", "model", "system_fingerprint", "usage")}
    assert all(part["usage"] is None for part in some)
    assert last["choices"] == []
    choices: dict[int, dict[str, Any]] = {}
    for part in some:
        (one,) = part["choices"]
        choice = choices.setdefault(one["index"], {"index": one["index"], "text": "", "logprobs": None})
        assert "finish_reason" not in choice, "nothing follows a choice's end"
        choice["text"] += one["text"]
        for name in ("token_ids", "prompt_token_ids"):
            if name in one:
                choice[name] = choice.get(name, []) + one[name]
        if one["logprobs"]:
            told = choice["logprobs"] = choice["logprobs"] or {name: [] for name in one["logprobs"]}
            for name, values in one["logprobs"].items():
                told[name] += values
        if one["finish_reason"]:
            choice |= {"finish_reason": one["finish_reason"], "timings": part["timings"]}
    answer["choices"] = [choices[index] for index in range(len(choices))]
    if len(choices) == 1:
        answer["timings"] = answer["choices"][0].pop("timings")
    return answer


def test_the_client_gets_text_usage_and_timings(serve):
    server = serve()
    answer = server.openai.completions.create(**ASK)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, TEXT, "stop", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 10, 13)
    assert answer.model_extra["timings"]["prompt_n"] == 3
    (row,) = server.rows()
    assert answer.id == f"cmpl-{row.id}"
    assert row.request == ASK
    assert row.prompt_tokens.tolist() == list("Hé".encode())
    assert (row.response_text, row.split_key_length) == (TEXT, 0)


def test_sixteen_tokens_are_said_where_no_limit_is_given(serve):
    server = serve(Script(repeat=3))
    assert whole(server)["usage"]["completion_tokens"] == 16
    assert whole(server, max_tokens=21)["usage"]["completion_tokens"] == 21
    assert whole(server, max_tokens=0)["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("prompt", ["Hé", ["Hé", "you"], [72, 105], [[72, 105], [33]], ["Hé", [72, 105], "you"], ["a"]])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": True},
        {"logprobs": 0},
        {"logprobs": 3, "echo": True},
        {"logprobs": 1, "echo": True, "max_tokens": 0},
        {"echo": True, "max_tokens": 0},
        {"n": 3, "best_of": 3, "seed": 5, "max_tokens": 4},
        {"n": 2, "seed": 5, "echo": True, "logprobs": 2, "return_token_ids": True},
        {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1},
        {"return_token_ids": True, "max_tokens": 0},
    ],
    ids=lambda more: "+".join(more) or "plain",
)
def test_a_stream_makes_the_whole_answer(completing, prompt, more):
    one, other = whole(completing, prompt=prompt, **more), joined(chunks(completing, prompt=prompt, **more))
    if more.get("max_tokens") == 0:
        for choice in one["choices"]:
            assert choice.pop("token_ids", []) == []  # no chunk has none of them
    for answer in (one, other):
        assert answer.pop("id").startswith("cmpl-")
        answer.pop("created")
    assert one == other


@pytest.fixture(scope="module")
def completing(tmp_path_factory):
    with running_app(capture=tmp_path_factory.mktemp("completing") / "capture.db") as server:
        yield server


def test_every_prompt_has_its_choices_and_counts_once(serve):
    server = serve(Script(by_choice=({}, {"pieces": ()})))
    answer = whole(server, prompt=["ab", [99, 100, 101]], n=2, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["ab" + TEXT, "ab", "cde" + TEXT, "cde"]
    assert answer["usage"]["prompt_tokens"] == 2 + 3
    assert answer["usage"]["completion_tokens"] == 2 * 10
    assert answer["usage"]["total_tokens"] == 25


def test_all_choices_draw_from_one_seed_each_its_own_noise(serve):
    server = serve()
    whole(server, prompt=["a", "b"], n=2)
    sampled = [request.sampling for request in server.backend.requests]
    assert [one.choice for one in sampled] == [0, 1, 0, 1]
    assert len({one.seed for one in sampled}) == 1
    assert sampled[0].seed is not None
    whole(server, prompt=["a", "b"])
    assert [request.sampling.seed for request in server.backend.requests[4:]] == [None, None]


def test_each_generation_is_a_row_that_keeps_its_own_prompt(serve):
    server = serve()
    answer = whole(server, prompt=["a", [98, 99]], n=2, metadata={"task": "x"})
    rows = sorted(server.rows(), key=lambda row: row.id)
    assert answer["id"] == f"cmpl-{rows[0].id}"
    assert [row.request["prompt"] for row in rows] == ["a", "a", [98, 99], [98, 99]]
    assert all(row.request["metadata"] == {"task": "x"} and row.request["n"] == 2 for row in rows)
    assert [row.parameters.get("response") for row in rows] == [None, *[rows[0].id] * 3]
    whole(server, prompt=["a", "b"], store=False)
    assert len(server.rows()) == 4


def test_legacy_logprobs_name_tokens_and_where_they_begin(serve):
    answer = serve(Script(pieces=(b"w\xc3", b"\xb6r", b"ld"))).openai.completions.create(**ASK, echo=True, logprobs=1)
    told = answer.choices[0].logprobs
    assert told.tokens == ["H", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\x77\\xc3", "bytes:\\xb6\\x72", "ld"]
    assert told.token_logprobs == [None, -0.25, -0.5, -0.5, -1.0, -1.5]
    assert told.text_offset == [0, 1, 1, 2, 3, 5]
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[1] == {"alt0": 0.0, "bytes:\\xc3": -0.25}, "the likeliest, and the token itself"
    assert answer.choices[0].text == "Héwörld"


def test_the_number_of_alternatives_is_that_asked_for(serve):
    server = serve()
    (choice,) = whole(server, logprobs=0, max_tokens=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"Hel": -0.5}]
    (choice,) = whole(server, logprobs=5, max_tokens=1)["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 6
    (choice,) = whole(server, logprobs=1, prompt_logprobs=4, echo=True, max_tokens=1)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [2, 2, 2]
    assert [len(top) for top in choice["prompt_logprobs"][1:]] == [5, 5]


def test_prompt_logprobs_are_vllms(serve):
    (choice,) = whole(serve(), prompt_logprobs=1, max_tokens=1)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "195": {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffd"},
        "0": {"logprob": 0.0, "rank": 1, "decoded_token": "alt0"},
    }
    assert third["169"]["rank"] == 2
    assert choice["text"] == "Hel"


def test_nothing_is_told_of_a_prompt_nobody_asked_about(serve):
    server = serve()
    for more in ({}, {"echo": True}, {"logprobs": 2}):
        whole(server, **more)
    assert [request.sampling.prompt_logprobs for request in server.backend.requests] == [None, None, None]
    whole(server, prompt_logprobs=0)
    assert server.backend.requests[-1].sampling.prompt_logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (7, "prompt"),
        (True, "prompt"),
        ({"text": "a"}, "prompt"),
        (["a", ""], "prompt[1]"),
        (["a", []], "prompt[1]"),
        (["a", 7], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([[1, "a"]], "prompt[0][1]"),
        ([[1, True]], "prompt[0][1]"),
        ([1, True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([[1], [[2]]], "prompt[1][0]"),
        (["a"] * 513, "prompt"),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_what_is_no_prompt_is_named(completing, prompt, param):
    error = refused(completing, prompt=prompt)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 128, "prompt": ["a"] * 5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 65}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_named(completing, more, param):
    assert refused(completing, **more)["param"] == param


def test_values_that_ask_for_nothing_are_taken(completing):
    nothing = {"suffix": None, "best_of": None, "n": 1, "echo": False, "logprobs": None, "logit_bias": None}
    neutral = {"suffix": "", "use_beam_search": False, "skip_special_tokens": True, "add_special_tokens": True}
    expected = whole(completing)["choices"]
    assert whole(completing, **nothing)["choices"] == whole(completing, **neutral)["choices"] == expected


def test_a_refusal_of_one_prompt_refuses_them_all_and_lets_none_go_on(serve):
    server = serve(Script(pause=0.01, repeat=500))
    wrong = json.dumps({"refuses": "That is too long."})
    error = refused(server, prompt=["a", "b", wrong], max_tokens=4000)
    assert error["message"] == "That is too long."
    eventually(lambda: not server.backend.running)
    assert {row.status for row in server.rows()} == {"cancelled"}


def test_a_choice_that_breaks_breaks_the_answer(serve):
    server = serve()
    wrong = json.dumps({"finish": "error"})
    response = server.http.post(PATH, json={**ASK, "prompt": ["a", wrong]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
    *_, last = chunks(server, prompt=["a", wrong])
    assert last["error"]["code"] == "generation_failed"


def test_the_prompt_has_no_turns_and_parameters_reach_the_engine(serve):
    server = serve()
    whole(server, prompt="<|im_start|>user\nHi", temperature=0, stop=["x"], top_k=5, cache_salt="s", ignore_eos=True)
    (request,) = server.backend.requests
    assert (request.prompt, list(request.messages)) == ("<|im_start|>user\nHi", [])
    assert (request.sampling.temperature, request.sampling.stop, request.sampling.top_k) == (0, ("x",), 5)
    assert (request.cache_salt, request.sampling.ignore_eos) == ("s", True)


def test_the_clients_stream_ends_with_usage(serve):
    parts = list(serve().openai.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for part in parts for choice in part.choices) == TEXT
    assert parts[-1].usage.total_tokens == 13
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
