"""A row suffices to repeat its answer to the bit: the stored request, the seed, the parameters that were in effect."""

from __future__ import annotations

from typing import Any

import pytest

from capture.records import Generation
from tests.answers import bits, body, row_of, streamed, whole
from tests.servers import CHAT, ProcessServer, eventually

LIST = "What is a list?"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": LIST},
    {"role": "assistant", "content": "Things in a row."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "a tuple?"}]},
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "note", "strict": True, "parameters": SCHEMA}}
# None of them says its seed.
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (LIST, {}),
    "talk": (TALK, {"temperature": 1.2}),
    "thinking": (LIST, {"chat_template_kwargs": {"enable_thinking": True}}),
    "untruncated": (LIST, {"temperature": 1, "top_p": 1, "top_k": 0}),
    "penalties": (LIST, {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.2}),
    "bias": (LIST, {"logit_bias": {"11": -100, "220": 2.5}}),
    "bad words": (LIST, {"bad_words": ["list", "mutable"], "min_p": 0.02}),
    "ends": (LIST, {"min_tokens": 20, "ignore_eos": True, "stop_token_ids": [11], "stop": ["\x00"]}),
    "stop": (LIST, {"stop": ["mutable", "values"]}),
    "schema": (LIST, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    "regex": (LIST, {"structured_outputs": {"regex": "[a-z ]{20,40}"}, "temperature": 1.5}),
    "budget": (LIST, {"thinking_budget": 9, "chat_template_kwargs": {"enable_thinking": True}}),
    "call": (LIST, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}),
    "prediction": (LIST, {"prediction": {"type": "content", "content": "A list is an ordered bag."}}),
    "salt": ("Lists hold values. " * 20 + LIST, {"cache_salt": "mine", "user": "u", "metadata": {"a": "b"}}),
}
# Of a row's parameters, all that a request can ask for: bad words are kept as ids, stop strings in the request.
NOT_ASKED = {"bad_words", "stop"}


def replay(server: ProcessServer, row: Generation, **more: Any) -> Generation:
    """Send what the row holds; the row of that."""
    asked = {name: value for name, value in row.request.items() if name not in ("stream", "stream_options", "drafter")}
    response = server.http.post(CHAT, json={**asked, "seed": row.seed, **more})
    assert response.status_code == 200, response.text
    name = response.json()["id"].removeprefix("chatcmpl-")
    return next(found for found in server.rows() if found.id == name)


@pytest.mark.parametrize("kind", ASKED)
def test_an_answer_nobody_gave_a_seed_is_repeated_from_its_row(
    drafting: ProcessServer, plain: ProcessServer, kind: str
) -> None:
    content, asked = ASKED[kind]
    answer = streamed(drafting.openai, content, **asked, max_completion_tokens=40)
    row = row_of(drafting, answer)
    assert "seed" not in row.request
    assert len(row.completion_tokens) > 1
    effective = {name: value for name, value in row.parameters.items() if name not in NOT_ASKED}
    for again in (replay(plain, row), replay(plain, row, **effective), replay(drafting, row, **effective)):
        assert bits(again) == bits(row)
        assert again.parameters == row.parameters
        assert (again.response_text, again.reasoning) == (answer.content, answer.reasoning)
        assert (again.finish_reason, again.seed) == (row.finish_reason, row.seed)


def test_another_seed_says_something_else(drafting: ProcessServer) -> None:
    asked = {"temperature": 1.5, "top_p": 1, "top_k": 0, "max_tokens": 40, "ignore_eos": True}
    row = row_of(drafting, whole(drafting.openai, LIST, **asked))
    assert bits(replay(drafting, row, seed=row.seed - 1)) != bits(row)


@pytest.mark.parametrize("seed", [0, -5, 2**63 - 1, -(2**63), 2**64 - 1])
def test_the_64_bits_of_a_clients_seed_are_kept(drafting: ProcessServer, plain: ProcessServer, seed: int) -> None:
    asked = {"temperature": 1.5, "top_p": 1, "top_k": 0, "max_tokens": 24, "ignore_eos": True}
    row = row_of(drafting, whole(drafting.openai, LIST, **asked, seed=seed))
    assert row.request["seed"] == seed
    assert row.seed == seed % 2**64
    assert bits(replay(plain, row)) == bits(row)


def test_the_answer_of_one_who_left_is_told_to_its_end(drafting: ProcessServer, plain: ProcessServer) -> None:
    asked = body(LIST, temperature=1, ignore_eos=True, max_tokens=1500)
    with drafting.openai.chat.completions.create(**asked, stream=True) as stream:
        chunks = [next(iter(stream)) for _ in range(6)]
    name = chunks[0].id.removeprefix("chatcmpl-")
    row = eventually(lambda: next((row for row in drafting.rows() if row.id == name), None))
    assert row.status == "cancelled"
    count = len(row.completion_tokens)
    again = replay(plain, row, max_tokens=count + 5)
    assert again.completion_tokens[:count].tobytes() == row.completion_tokens.tobytes()
    assert again.logprobs[:count].tobytes() == row.logprobs.tobytes()
    assert len(again.completion_tokens) == count + 5


def test_whatever_was_captured_so_far_is_repeated(drafting: ProcessServer, plain: ProcessServer) -> None:
    whole(drafting.openai, LIST)  # at least one
    finished = [row for row in drafting.rows() if row.status == "finished" and len(row.completion_tokens) <= 120]
    for row in finished[:: len(finished) // 12 + 1]:
        again = replay(plain, row)
        assert bits(again) == bits(row)
        assert again.response_text == row.response_text
