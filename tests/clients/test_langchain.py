"""LangChain's ChatOpenAI, over chat completions and over responses."""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.servers import MODEL, ProcessServer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


class Weather(BaseModel):
    """What the sky does."""

    city: Literal["Oslo", "Rome"]


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(server: ProcessServer, request: pytest.FixtureRequest) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=400,
        stream_usage=True,
        use_responses_api=request.param,
    )


def test_an_answer_streamed_is_the_answer_whole(model: Any) -> None:
    whole = model.invoke("Hi")
    joined = reduce(lambda one, other: one + other, model.stream("Hi"))
    assert whole.text
    assert joined.text == whole.text
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_bound_tool_is_called_and_its_result_answered(model: Any, stream: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    caller = model.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
    answer = reduce(lambda one, other: one + other, caller.stream("Hi")) if stream else caller.invoke("Hi")
    (call,) = answer.tool_calls
    assert call["name"] == "Weather"
    assert Weather(**call["args"])
    history = [HumanMessage("Hi"), answer, ToolMessage("sun", tool_call_id=call["id"])]
    assert model.bind_tools([Weather], tool_choice="none").invoke(history).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_parsed_into_a_model(model: Any, method: str) -> None:
    answer = model.with_structured_output(Weather, method=method).invoke("Hi")
    assert isinstance(answer, Weather)
