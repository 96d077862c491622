"""litellm as a client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.servers import MODEL, ProcessServer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def ours(server: ProcessServer) -> dict[str, Any]:
    """How every call says where the model is."""
    return {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}


def test_an_answer_streamed_is_the_answer_whole(ours: dict[str, Any]) -> None:
    import litellm

    asked = {**ours, "messages": HELLO, "max_tokens": 40}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    joined = litellm.stream_chunk_builder(chunks, messages=HELLO)
    for answer in (whole, joined):
        assert answer.choices[0].message.content
        assert answer.usage.prompt_tokens > 0
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.choices[0].finish_reason == whole.choices[0].finish_reason
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_answered(ours: dict[str, Any], stream: bool) -> None:
    import litellm

    forced = {"type": "function", "function": {"name": "weather"}}
    asked = {**ours, "tools": [WEATHER], "parallel_tool_calls": False}
    answer = litellm.completion(**asked, messages=HELLO, tool_choice=forced, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=HELLO)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    history = [*HELLO, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    again = litellm.completion(**asked, messages=history, tool_choice="none", max_tokens=16)
    assert again.choices[0].message.content


def test_an_error_keeps_its_status_and_its_words(ours: dict[str, Any]) -> None:
    import litellm

    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**ours, messages=HELLO, top_p=7)
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(**{**ours, "model": "openai/other"}, messages=HELLO)


def test_text_completions_and_responses(ours: dict[str, Any]) -> None:
    import litellm

    text = litellm.text_completion(**{**ours, "model": f"text-completion-openai/{MODEL}"}, prompt="def", max_tokens=8)
    assert text.choices[0].text
    answer = litellm.responses(**ours, input="Hi", max_output_tokens=40)
    chat = litellm.completion(**ours, messages=HELLO, max_tokens=40)
    assert answer.output[0].content[0].text == chat.choices[0].message.content
