"""Tools on a real server: what the model writes becomes calls, whatever the steps its tokens come in."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from backend.text.tool_calls import ToolCallParser
from tests.answers import Answer, row_of, streamed, whole
from tests.checkpoints import tiny
from tests.servers import MODEL, ProcessServer

QUESTION = "What is the weather in Rome and Oslo?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}},
            "required": ["city"],
        },
    },
}


def call(**values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=weather>\n{written}</function>\n</tool_call>"


ROME, OSLO = call(city='Rome, "eternal"', days="2"), call(city="Oslo", units='["C", "F"]')
CALLS = (
    ("weather", '{"city": "Rome, \\"eternal\\"", "days": 2}'),
    ("weather", '{"city": "Oslo", "units": ["C", "F"]}'),
)


def saying(text: str, **more: Any) -> dict[str, Any]:
    """Makes the model write this very text."""
    return {"structured_outputs": {"regex": re.escape(text)}, "temperature": 0, "tools": [WEATHER], **more}


def text_of(server: ProcessServer, answer: Answer) -> str:
    ids = row_of(server, answer).completion_tokens.tolist()
    return b"".join(map(tiny().tokenizer.text_bytes, ids)).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look.\n\n{ROME}\n{OSLO}", "I look.", CALLS),
        (ROME, "", CALLS[:1]),
        ("Use <b> & </b>, not <tool_", "Use <b> & </b>, not <tool_", ()),
    ],
    ids=["prose and calls", "call", "no call"],
)
@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinking"])
def test_streamed_and_whole_the_same_calls_are_told(
    drafting: ProcessServer, text: str, content: str, calls: Any, thinks: bool
) -> None:
    asked = saying(text, chat_template_kwargs={"enable_thinking": thinks}, thinking_budget=4, logprobs=True)
    one, other = whole(drafting.openai, QUESTION, **asked), streamed(drafting.openai, QUESTION, **asked)
    assert one.said == other.said
    assert (one.content, one.calls) == (content, calls)
    assert one.finish_reason == ("tool_calls" if calls else "stop")
    row = row_of(drafting, one)
    assert text_of(drafting, one).endswith(text)
    assert row.response_text == content
    told = [(each["function"]["name"], each["function"]["arguments"]) for each in row.tool_calls or ()]
    assert tuple(told) == calls
    assert one.usage["completion_tokens"] == len(one.tokens) == len(row.completion_tokens)


def test_an_answer_cut_off_anywhere_is_told_as_far_as_it_got(drafting: ProcessServer) -> None:
    text = f"I look.\n{ROME}"
    length = whole(drafting.openai, QUESTION, **saying(text)).usage["completion_tokens"]
    seen = set()
    for limit in range(1, length - 1, 3):
        ask = streamed if limit % 2 else whole
        answer = ask(drafting.openai, QUESTION, **saying(text), max_tokens=limit)
        parser = ToolCallParser([WEATHER])
        content = parser.push(text_of(drafting, answer)).content + parser.finish(cut=True).content
        assert answer.content == content
        assert answer.calls == tuple((each.name, each.arguments) for each in parser.calls)
        assert answer.finish_reason == "length"
        assert all(CALLS[0][1].startswith(arguments) for _, arguments in answer.calls)
        seen.add(answer.calls)
    assert len(seen) > 3


def test_only_one_call_is_told_where_no_more_are_wanted(drafting: ProcessServer) -> None:
    answer = whole(drafting.openai, QUESTION, **saying(f"{ROME}\n{OSLO}"), parallel_tool_calls=False)
    assert (answer.content, answer.calls, answer.finish_reason) == ("", CALLS[:1], "tool_calls")


def test_without_tools_to_call_markup_is_text_and_the_model_sees_none(drafting: ProcessServer) -> None:
    asked = saying(ROME)
    none = whole(drafting.openai, QUESTION, **asked, tool_choice="none")
    del asked["tools"]
    without = whole(drafting.openai, QUESTION, **asked)
    assert none.said == without.said
    assert (none.content, none.calls, none.finish_reason) == (ROME, (), "stop")
    assert row_of(drafting, none).prompt_tokens.tolist() == row_of(drafting, without).prompt_tokens.tolist()


def test_calls_and_results_go_back_to_the_model_as_the_template_writes_them(drafting: ProcessServer) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    asked = saying(f"{ROME}\n{OSLO}")
    completion = drafting.openai.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=asked["tools"],
        temperature=0,
        extra_body={"structured_outputs": asked["structured_outputs"]},
    )
    message = completion.choices[0].message
    results = [{"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in message.tool_calls or ()]
    history = [*messages, message, *results]
    answer = whole(drafting.openai, history, tools=[WEATHER], max_tokens=8, temperature=0)
    prompt = b"".join(map(tiny().tokenizer.token_bytes, row_of(drafting, answer).prompt_tokens.tolist())).decode()
    assert f"{json.dumps(WEATHER)}\n</tools>" in prompt
    assert "\n\nBe brief.<|im_end|>" in prompt
    assert f"{ROME}\n{OSLO}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_resp" in prompt


@pytest.mark.parametrize(
    ("arguments", "reason"), [('{"city": ', "is not valid JSON"), ('["Rome"]', "must be a JSON object")]
)
def test_arguments_in_the_history_that_are_no_object_are_refused(
    drafting: ProcessServer, arguments: str, reason: str
) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [made]}]
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        whole(drafting.openai, history, max_tokens=1)
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


class Weather(BaseModel):
    city: str
    days: int | None = None
    exact: bool = False
    share: float | None


def test_the_clients_own_helpers_read_the_calls(drafting: ProcessServer) -> None:
    text = call(city="Rome", days="null", exact="True", share="0.5").replace("=weather", "=Weather")
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [openai.pydantic_function_tool(Weather)],
        "temperature": 0,
        "extra_body": {"structured_outputs": {"regex": re.escape(text)}},
    }
    expected = Weather(city="Rome", exact=True, share=0.5)
    parsed = drafting.openai.chat.completions.parse(**asked)
    with drafting.openai.chat.completions.stream(**asked) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    for completion in (parsed, final):
        (made,) = completion.choices[0].message.tool_calls or ()
        assert made.function.parsed_arguments == expected
    assert "".join(piece.arguments_delta for piece in pieces) == made.function.arguments
    assert len(pieces) > 2
