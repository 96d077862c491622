"""Hugging Face `datasets` loads what `capture export` writes, as trainers have it do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture.export_jsonl import Style, export_jsonl
from capture.export_parquet import export_parquet
from capture.records import Generation
from capture.store import Store
from tests.capture_rows import generation, write

pytestmark = pytest.mark.clients

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": properties}}}
    for properties in ({"city": {"type": "string"}}, {"city": {"type": ["string", "null"], "enum": ["Rome", None]}})
]


def rows() -> list[Generation]:
    """With and without tools, thoughts and calls; what one calls with text, another calls with a number."""
    made = [generation(), generation(reasoning="Hm.")]
    for tool, city in zip(TOOLS, ('"Rome"', "3"), strict=True):
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": f'{{"city": {city}}}'}}
        request = {"messages": [{"role": "user", "content": "Rome?"}], "tools": [tool], "enable_thinking": False}
        made.append(generation(request=request, response_text="", tool_calls=[call]))
    return made


def load(form: str, folder: Path, tmp_path: Path) -> Any:
    import datasets

    files = sorted(str(file) for file in folder.glob("shard-*"))
    return datasets.load_dataset(form, data_files=files, split="train", cache_dir=str(tmp_path / "cache"))


def test_conversations_load_whatever_is_called_with_what(tmp_path: Path) -> None:
    found = exported(tmp_path, rows(), "conversations")
    assert found[0]["conversations"][-1]["content"] == "Hi there"
    assert found[1]["conversations"][-1]["reasoning_content"] == "Hm."
    calls = [found[i]["conversations"][-1]["tool_calls"][0]["function"]["arguments"] for i in (2, 3)]
    assert list(map(json.loads, calls)) == [{"city": "Rome"}, {"city": 3}]
    assert [json.loads(found[i]["tools"]) for i in (2, 3)] == [[tool] for tool in TOOLS]
    assert found[2]["chat_template_kwargs"] == {"enable_thinking": False}


def test_messages_load_with_arguments_as_objects(tmp_path: Path) -> None:
    found = exported(tmp_path, rows()[:3], "messages")
    assert found[2]["messages"][-1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert found[0]["tools"] is None


def test_parquet_loads_with_its_token_ids(tmp_path: Path) -> None:
    made, out = rows(), tmp_path / "out"
    with Store.open(write(tmp_path / "capture.db", *made)) as store:
        export_parquet(store, out)
    found = load("parquet", out, tmp_path)
    assert found[0]["input_ids"] == [5, 6, 7, 8, 9]
    assert found[0]["loss_mask"] == [0, 0, 0, 1, 1]
    assert found["id"][:] == [row.id for row in made]


def exported(tmp_path: Path, made: list[Generation], style: Style) -> Any:
    with Store.open(write(tmp_path / "capture.db", *made)) as store:
        export_jsonl(store, tmp_path / "out", style=style)
    return load("json", tmp_path / "out", tmp_path)
