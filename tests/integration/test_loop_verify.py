"""`capture verify --server` on what a real model said: every row of every kind decodes to its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from capture.cli import app
from tests.servers import CHAT, ProcessServer

LIST = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (CHAT, {"messages": LIST}),
    "thinking": (CHAT, {"messages": LIST, "chat_template_kwargs": {"enable_thinking": True}}),
    "stop": (CHAT, {"messages": LIST, "stop": ["mutable", "values"]}),
    "beyond the end": (CHAT, {"messages": LIST, "ignore_eos": True}),
    "anything": (CHAT, {"messages": LIST, "ignore_eos": True, "temperature": 2, "top_p": 1, "top_k": 0, "seed": 3}),
    "call": (CHAT, {"messages": LIST, "tools": [TOOL], "tool_choice": "required"}),
    "json": (CHAT, {"messages": LIST, "response_format": {"type": "json_object"}}),
    "several": ("/v1/completions", {"prompt": ["A list is", "A string"], "n": 2}),
    "echo": ("/v1/completions", {"prompt": "A list is", "echo": True, "stop": ["a"]}),
    "responses": ("/v1/responses", {"input": "What is a list?"}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_row_decodes_to_its_text(drafting: ProcessServer, stream: bool) -> None:
    for path, asked in KINDS.values():
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = drafting.http.post(path, json={**asked, most: 60, "stream": stream, "metadata": {"for": "verify"}})
        assert answer.status_code == 200, answer.text
    assert drafting.capture is not None
    flags = ["--capture", str(drafting.capture), "--server", drafting.url, "--json", "--tag", "for=verify"]
    done = CliRunner().invoke(app, ["verify", *flags])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["problems"], found["not_decoded"]) == (0, [], {})
    assert found["decoded"] == found["rows"] >= len(KINDS)
