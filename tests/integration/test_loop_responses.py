"""/v1/responses of a real server on a real engine: the same answers as chat completions give, in another shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from capture.records import Generation
from tests.answers import row_of, whole
from tests.checkpoints import random_small
from tests.servers import MODEL, ProcessServer, running_process, serve_command

QUESTION = "What does len() do in Python?"
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
SAMPLED: dict[str, Any] = {"temperature": 1, "top_p": 1}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    with running_process(serve_command(random_small()), tmp_path_factory.mktemp("responses") / "capture.db") as server:
        yield server


def ask(server: ProcessServer, given: Any = QUESTION, *, seed: int, thinks: bool = False, **more: Any) -> Response:
    extra = {"seed": seed, "top_k": 0, "enable_thinking": thinks, **more.pop("extra_body", {})}
    answer = server.openai.responses.create(model=MODEL, input=given, extra_body=extra, **SAMPLED, **more)
    assert isinstance(answer, Response)
    return answer


def row(server: ProcessServer, answer: Response) -> Generation:
    return next(row for row in server.rows() if row.id == answer.id.removeprefix("resp_"))


def said(answer: Response) -> dict[str, Any]:
    """All that must be the same whenever the same is asked; not the ids, the times, what was cached."""
    told = answer.model_dump(include={"status", "output", "incomplete_details", "usage", "temperature", "top_p"})
    del told["usage"]["input_tokens_details"]
    for item in told["output"]:
        del item["id"]
    return told


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("more", [{}, LOGPROBS], ids=["text", "logprobs"])
def test_streamed_and_whole_are_the_same(server: ProcessServer, thinks: bool, more: dict[str, Any]) -> None:
    for seed in range(3):
        one = ask(server, seed=seed, thinks=thinks, max_output_tokens=32, **more)
        extra = {"seed": seed, "top_k": 0, "enable_thinking": thinks}
        asked = {**SAMPLED, **more, "max_output_tokens": 32, "extra_body": extra}
        *_, last = server.openai.responses.create(model=MODEL, input=QUESTION, stream=True, **asked)
        assert last.type in ("response.completed", "response.incomplete")
        assert said(last.response) == said(one)


@pytest.mark.parametrize("thinks", [False, True])
def test_the_answer_is_the_one_that_chat_completions_give(server: ProcessServer, thinks: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    for seed in range(3):
        answer = ask(server, seed=seed, thinks=thinks, max_output_tokens=48, instructions="Be brief.", **LOGPROBS)
        chat = whole(
            server.openai, messages, **SAMPLED, seed=seed, top_k=0, max_tokens=48, logprobs=True, top_logprobs=2,
            chat_template_kwargs={"enable_thinking": thinks},
        )  # fmt: skip
        ours, theirs = row(server, answer), row_of(server, chat)
        assert ours.prompt_tokens.tolist() == theirs.prompt_tokens.tolist()
        assert ours.completion_tokens.tolist() == theirs.completion_tokens.tolist()
        assert (ours.response_text, ours.reasoning) == (theirs.response_text, theirs.reasoning)
        thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.content or ()]
        assert "".join(thoughts) == chat.reasoning
        assert answer.output_text == chat.content
        assert answer.status == {"stop": "completed", "length": "incomplete"}[chat.finish_reason]
        assert answer.usage is not None
        assert answer.usage.output_tokens == chat.usage["completion_tokens"]
        told = [
            token
            for item in answer.output if item.type == "message"
            for part in item.content if part.type == "output_text"
            for token in part.logprobs or ()
        ]  # fmt: skip
        # Those of the message alone: chat completions tell every token's.
        spelled = [token[0] for token in chat.tokens]
        thought = [*spelled, b"</think>"].index(b"</think>") + 1 if thinks else 0
        assert [(bytes(token.bytes), token.logprob) for token in told] == [token[:2] for token in chat.tokens[thought:]]


def test_an_answer_in_the_form_of_a_schema_is_parsed_into_a_model(server: ProcessServer) -> None:
    class Day(BaseModel):
        rains: bool

    answer = server.openai.responses.parse(
        model=MODEL, input=QUESTION, text_format=Day, extra_body={"enable_thinking": False}
    )
    assert answer.output_parsed is not None
    assert json.loads(answer.output_text) == answer.output_parsed.model_dump()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_must_be_made_is_made_and_its_result_taken(server: ProcessServer, choice: Any) -> None:
    answer = ask(server, seed=1, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    arguments = json.loads(call.arguments)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Oslo", "Rome")
    assert arguments["days"] in (1, 2)
    assert call.name == "weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    history = [{"role": "user", "content": QUESTION}, *answer.output, result]
    again = ask(server, history, seed=1, tools=[WEATHER], tool_choice="none", max_output_tokens=8)
    assert again.output[-1].type == "message"
    assert "weather" in json.dumps(row(server, again).request)


def test_a_call_made_in_a_stream_is_the_one_made_whole(server: ProcessServer) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    one = ask(server, seed=2, **asked)
    extra = {"seed": 2, "top_k": 0, "enable_thinking": False}
    stream = server.openai.responses.create(
        model=MODEL, input=QUESTION, stream=True, extra_body=extra, **SAMPLED, **asked
    )
    told = list(stream)
    pieces = [event.delta for event in told if event.type == "response.function_call_arguments.delta"]
    last = told[-1]
    assert last.type == "response.completed"
    (call,) = [item for item in last.response.output if item.type == "function_call"]
    assert "".join(pieces) == call.arguments
    (whole_call,) = [item for item in one.output if item.type == "function_call"]
    assert (call.name, call.arguments) == (whole_call.name, whole_call.arguments)


def test_a_prompt_that_does_not_fit_is_refused_naming_the_input(server: ProcessServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.responses.create(model=MODEL, input="so " * 5000)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
