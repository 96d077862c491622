"""`return_steps`: a stream tells of each chunk's tokens which verify step they are of, and nobody else hears of it."""

from __future__ import annotations

import json
from typing import Any

from tests.checkpoints import random_endless
from tests.fake_backend import FakeBackend, Script
from tests.servers import CHAT, Server


def told(server: Server, **more: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **more}
    with server.http.stream("POST", CHAT, json=body) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def check(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of an answer, which tell the same as its timings and as its tokens."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    blocks = [choice for choice in choices if choice.get("token_ids")]
    assert "step" not in blocks[0]  # the first token comes from the prompt
    assert all("step" in choice for choice in blocks[1:])
    assert all("step" not in choice for choice in choices if choice not in blocks)
    steps = [choice["step"] for choice in blocks[1:]]
    for choice in blocks[1:-1]:
        assert len(choice["token_ids"]) == choice["step"]["accepted"] + 1
    timings = chunks[-1]["timings"]
    slots = range(len(timings["draft_n_per_pos"]))
    assert [sum(step["drafted"] > slot for step in steps) for slot in slots] == timings["draft_n_per_pos"]
    assert [sum(step["accepted"] > slot for step in steps) for slot in slots] == timings["draft_n_accepted_per_pos"]
    assert sum(len(choice["token_ids"]) for choice in blocks) == timings["predicted_n"]
    return steps


def test_a_stream_tells_its_steps_where_asked(serve):
    server = serve(Script(repeat=3))
    steps = check(told(server, return_steps=True, return_token_ids=True))
    assert steps[:3] == [{"drafter": "mtp", "drafted": 3, "accepted": accepted} for accepted in (2, 0, 3)]


def test_a_step_whose_tokens_show_no_text_yet_is_told_too(serve):
    server = serve(Script(pieces=(b"a", b"\xf0\x9f", b"\x8c", b"\x8d", b"b")))
    chunks = told(server, return_steps=True)
    assert [chunk["choices"][0]["step"]["accepted"] for chunk in chunks if "step" in chunk["choices"][0]] == [2, 0]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "a🌍b"


def test_every_choice_tells_its_own(serve):
    chunks = told(serve(Script()), return_steps=True, n=2)
    for index in (0, 1):
        of_one = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["step"]["accepted"] for choice in of_one if "step" in choice] == [2, 0, 3, 0]


def test_the_drafter_of_a_step_is_the_one_that_drafted_it(serve):
    server = serve(backend=FakeBackend(drafters=("mtp", "prediction")), allow_drafter_choice=True)
    assert {step["drafter"] for step in check(
        told(server, return_steps=True, return_token_ids=True, drafter="prediction")
    )} == {"prediction"}  # fmt: skip


def test_nothing_changes_for_who_does_not_ask(serve):
    server = serve(Script(repeat=2))

    def plain(**more: Any) -> list[Any]:
        chunks = told(server, seed=1, **more)
        return [{**chunk["choices"][0], "step": None} for chunk in chunks]

    assert "step" not in json.dumps(told(server))
    assert "step" not in json.dumps(told(server, return_steps=False))
    asked = plain(return_steps=True)
    assert [choice["delta"] for choice in asked if choice["delta"]] == [
        choice["delta"] for choice in plain() if choice["delta"]
    ]
    whole = server.chat(return_steps=True).json()
    assert whole.keys() == server.chat().json().keys()
    assert "step" not in whole["choices"][0]


def test_an_engines_steps_are_those_of_the_row(serve_model):
    server = serve_model(random_endless(), "--draft-tokens", "3")
    for temperature in (0, 1):
        steps = check(told(server, return_steps=True, return_token_ids=True, temperature=temperature,
                           seed=5, max_tokens=40, ignore_eos=True))  # fmt: skip
        assert [(step["drafted"], step["accepted"]) for step in steps] == [tuple(s) for s in server.rows()[-1].steps]
        assert {step["drafter"] for step in steps if step["drafted"]} == {"mtp"}
