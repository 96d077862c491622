"""The `llm` command line, with this server as one of its models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import MODEL, ProcessServer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "400")


@pytest.fixture
def environment(server: ProcessServer, tmp_path: Path) -> dict[str, str]:
    about = {"model_id": "ours", "model_name": MODEL, "api_base": f"{server.url}/v1", "supports_tools": True}
    models = [{**about, "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    return {"LLM_USER_PATH": str(tmp_path)}


def test_an_answer_streamed_is_the_answer_whole(
    server: ProcessServer, run: Callable[..., str], environment: dict[str, str]
) -> None:
    streamed = run("llm", "-m", "ours", *GREEDY, "Hi", environment=environment)
    whole = run("llm", "-m", "ours", *GREEDY, "--no-stream", "Hi", environment=environment)
    assert streamed == whole
    assert streamed.strip()


def test_a_conversation_goes_on(server: ProcessServer, run: Callable[..., str], environment: dict[str, str]) -> None:
    run("llm", "-m", "ours", *GREEDY, "Hi", environment=environment)
    assert run("llm", "-c", *GREEDY, "And?", environment=environment).strip()
    *_, row = server.rows()
    assert [message["role"] for message in row.request["messages"]] == ["user", "assistant", "user"]


def test_an_answer_has_the_form_of_a_schema(run: Callable[..., str], environment: dict[str, str]) -> None:
    sunny = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    schema = json.dumps({**sunny, "additionalProperties": False})
    said = run("llm", "-m", "ours", *GREEDY, "--schema", schema, "Hi", environment=environment)
    assert isinstance(json.loads(said)["sunny"], bool)
