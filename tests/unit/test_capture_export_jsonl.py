"""JSON lines of conversations: what the model read and said, in the forms that trainers read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.json
import pytest

from capture.conversation import conversation_of
from capture.export import NothingToExportError, Wanted, held_out
from capture.export_jsonl import Style, export_jsonl
from capture.records import Generation
from capture.store import Store
from serve.api.chat import _chat_request as of_chat
from serve.api.responses import _chat_request as of_responses
from serve.schemas.chat import ChatCompletionRequest
from serve.schemas.responses import ResponsesRequest
from tests.capture_rows import generation, write
from tests.checkpoints import tiny

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "description": "Of a city"}}
NOTE = {"type": "function", "function": {"name": "note", "strict": True}}
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Rome"}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "So it is.", "refusal": None, "annotations": []},
    {"role": "user", "name": "me", "content": "And now?"},
]
ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}', "id": "fc_1"},
    {"type": "function_call", "call_id": "d", "name": "weather", "arguments": ""},
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "?"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Both are in."}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}], "status": "x"},
    {"type": "reasoning", "summary": []},
    {"role": "user", "content": "And now?"},
]
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": USER},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, *USER]},
    "refused before": {"messages": [*USER, {"role": "assistant", "content": None, "refusal": "No."}, *USER]},
    "calls": {"messages": CALLED, "tools": [WEATHER, NOTE]},
    "arguments as an object": {
        "messages": [
            *USER,
            {**CALLED[2], "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
            CALLED[3],
        ],
        "tools": [WEATHER],
    },
    "no tool to call": {"messages": USER, "tools": [WEATHER], "tool_choice": "none"},
    "has to call one": {
        "messages": USER,
        "tools": [WEATHER, NOTE],
        "tool_choice": {"type": "function", "function": {"name": "note"}},
    },
    "may call some": {
        "messages": USER,
        "tools": [WEATHER, NOTE],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "note"}}]},
        },
    },
    "thinks": {"messages": USER, "enable_thinking": True},
    "thinks not": {"messages": USER, "reasoning_effort": "none"},
    "says both": {"messages": USER, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    "responses": {"input": "Hi", "instructions": "Be kind."},
    "items": {"input": ITEMS, "tools": [FLAT], "reasoning": {"effort": "low"}},
    "items, some tools": {
        "input": ITEMS,
        "tools": [FLAT, {"type": "function", "name": "note"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "note"}]},
    },
}


def asked(body: dict[str, Any]) -> Any:
    """The body as the server reads it."""
    if "messages" in body:
        return of_chat(ChatCompletionRequest.model_validate(body), "id")
    return of_responses(ResponsesRequest.model_validate(body), "id")


@pytest.mark.parametrize("name", BODIES)
def test_a_template_makes_the_prompt_of_it_that_the_server_made(tmp_path: Path, name: str) -> None:
    request = asked(BODIES[name])
    tools = request.tools if request.tool_choice != "none" else ()
    tokenizer = tiny().tokenizer
    prompt = tokenizer.encode_chat(request.messages, request.template_kwargs, tools)
    [line] = lines(tmp_path, generation(request=BODIES[name]))
    kwargs = line.get("chat_template_kwargs") or {}
    again = tokenizer.encode_chat(line["messages"][:-1], kwargs, json.loads(line.get("tools", "[]")))
    assert again.text == prompt.text


def lines(tmp_path: Path, *rows: Generation, style: Style = "messages", **wanted: Any) -> list[dict[str, Any]]:
    path, out = write(tmp_path / "capture.db", *rows), tmp_path / f"out-{style}"
    with Store.open(path) as store:
        export_jsonl(store, out, Wanted(**wanted), style=style)
    return [json.loads(line) for file in sorted(out.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_the_answer_is_the_last_message_with_all_that_was_thought_and_called(tmp_path: Path) -> None:
    row = generation(
        request={"messages": CALLED, "tools": [WEATHER]}, response_text="", reasoning="Again.", tool_calls=[CALL]
    )
    [line] = lines(tmp_path, row)
    arguments = {"city": "Rome"}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "reasoning_content": "Again.", "tool_calls": [call]}
    assert line["messages"][-1] == answer
    assert line["messages"][2] == {**answer, "reasoning_content": "I look."}
    assert line["messages"][3] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    roles = [message["role"] for message in line["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert line["id"] == row.id
    assert json.loads(line["tools"]) == [WEATHER]
    assert line["split"] == ("held_out" if held_out(row.prompt_tokens or (), 0) else "train")


def test_conversations_differ_from_messages_in_their_name_and_in_arguments_as_text(tmp_path: Path) -> None:
    rows = [generation(request={"messages": CALLED, "tools": [WEATHER]}, tool_calls=[CALL]), generation()]
    ours = lines(tmp_path, *rows)
    theirs = lines(tmp_path, style="conversations")
    assert theirs[0]["conversations"][-1]["tool_calls"] == [CALL]
    for one, other in zip(ours, theirs, strict=True):
        for message in other["conversations"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert other.pop("conversations") == one.pop("messages")
        assert other == one


@pytest.mark.parametrize("arguments", ['{"city": "Ro', '{"city": NaN}', '{"city": -1e999}', "[]"])
def test_raw_prompts_are_no_conversations_and_calls_cut_off_no_objects(tmp_path: Path, arguments: str) -> None:
    cut = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    rows = [generation(request={"prompt": "Once"}), generation(tool_calls=[cut], finish_reason="length"), generation()]
    path = write(tmp_path / "capture.db", *rows)
    with Store.open(path) as store:
        result = export_jsonl(store, tmp_path / "out")
    assert (result.documents, result.skipped.no_chat, result.skipped.broken_calls) == (1, 1, 1)
    assert conversation_of(rows[0]) is None


def test_rows_of_which_only_text_is_kept_are_conversations_too_but_not_redacted_ones(tmp_path: Path) -> None:
    gone: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "logprobs": None, "seed": None}
    opening = [{"role": "user", "content": "Hi"}]
    later = [*opening, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    rows = [
        generation(**gone, request={"messages": messages}, response_text=f"{i}")
        for i in range(9)
        for messages in (opening, later)
    ]
    loop = generation(**gone, response_text="so it goes and goes on and on " * 3)
    silent = generation(**gone, response_text="")
    redacted = generation(**gone, parameters={"redacted": 1})
    twice = generation(**gone, request=rows[0].request, response_text="0")
    path = write(tmp_path / "capture.db", *rows, twice, loop, silent, redacted)
    with Store.open(path) as store:
        result = export_jsonl(store, tmp_path / "out", Wanted(near_duplicates=False, loops=False))
    skipped = {name: count for name, count in asdict(result.skipped).items() if count}
    assert skipped == {"redacted": 1, "no_completion": 1, "loops": 1, "near_duplicates": 1}
    found = [json.loads(line) for line in (tmp_path / "out" / "shard-00000.jsonl").read_text().splitlines()]
    assert [line["id"] for line in found] == [row.id for row in rows]
    assert len({line["split"] for line in found}) == 1, "later turns stay on the side of the first"


@pytest.mark.parametrize("style", ["messages", "conversations"])
def test_half_a_character_keeps_no_reader_from_the_others(tmp_path: Path, style: Style) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": "\ud83d"}'}}
    asked = [{"role": "user", "content": "\ud83d"}]
    kept = {"prompt_tokens": None, "completion_tokens": None, "logprobs": None}
    row = generation(request={"messages": asked}, tool_calls=[call], **kept)
    with Store.open(write(tmp_path / "c.db", row)) as store:
        export_jsonl(store, tmp_path / "out", style=style)
    [line] = pyarrow.json.read_json(tmp_path / "out" / "shard-00000.jsonl").to_pylist()
    assert line[style][0]["content"] == "\ufffd"
    arguments = line[style][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == ({"a": "\ufffd"} if style == "messages" else '{"a": "\ufffd"}')


def test_what_has_more_in_it_than_text_is_left_out(tmp_path: Path) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    bodies: list[dict[str, Any]] = [{"messages": picture}, {"messages": ["Hi"]}, {"messages": [{"content": "Hi"}]}]
    path = write(tmp_path / "capture.db", generation(), *(generation(request=body) for body in bodies))
    with Store.open(path) as store:
        result = export_jsonl(store, tmp_path / "out")
    assert (result.documents, result.skipped.not_text) == (1, 3)


def test_nothing_but_raw_prompts_is_nothing_to_export(tmp_path: Path) -> None:
    path = write(tmp_path / "capture.db", generation(request={"prompt": [1, 2]}))
    with Store.open(path) as store, pytest.raises(NothingToExportError, match="1 row of raw prompts"):
        export_jsonl(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_stay_within_their_size_and_the_manifest_vouches_for_each(tmp_path: Path) -> None:
    rows = [generation(response_text="Grüße\n\u2028" * n) for n in (1, 50, 300, 2, 2, 40)]
    path, out = write(tmp_path / "capture.db", *rows), tmp_path / "out"
    with Store.open(path) as store:
        result = export_jsonl(store, out, shard_bytes=1000)
    manifest = json.loads((out / "manifest.json").read_text())
    assert {p.name for p in out.iterdir()} == {"manifest.json", *(shard["file"] for shard in manifest["shards"])}
    assert manifest["format"] == "draftloop-jsonl-messages"
    assert manifest["counts"]["documents"] == result.documents == 6
    assert len(manifest["shards"]) == 3
    for shard in manifest["shards"]:
        content = (out / shard["file"]).read_bytes()
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert len(content) == shard["bytes"]
        assert shard["bytes"] <= 1000 or shard["documents"] == 1
        assert content.count(b"\n") == shard["documents"]
        assert shard["fingerprints"]["weights"] == "a" * 64


@pytest.mark.parametrize("style", ["messages", "conversations"])
def test_pyarrow_reads_the_lines(tmp_path: Path, style: Style) -> None:
    rows = [generation(request={"messages": CALLED, "tools": [WEATHER]}, tool_calls=[CALL]), generation()]
    written = lines(tmp_path, *rows, style=style)
    table = pyarrow.json.read_json(tmp_path / f"out-{style}" / "shard-00000.jsonl")
    assert table.column("id").to_pylist() == [row.id for row in rows]
    for read, line in zip(table.column(style).to_pylist(), written, strict=True):
        assert [message["content"] for message in read] == [message["content"] for message in line[style]]
