"""What the real backend refuses: requests in OpenAI's shape, checkpoints in one line before anything is served."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from backend.interface import BackendError
from backend.loading import LocalOptions, load
from tests.answers import Answer, streamed, whole
from tests.checkpoints import Checkpoint, random_small, without_mtp
from tests.servers import ROOT, ProcessServer, clean_environment, serve_command

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def refusal(server: ProcessServer, content: Any, ask: Callable[..., Answer] = whole, **more: Any) -> Any:
    """The error a refused request raises; it left no row, and the server still answers."""
    before = len(server.rows())
    with pytest.raises(openai.BadRequestError) as raised:
        ask(server.openai, content, **more)
    assert raised.value.status_code == 400
    assert raised.value.type == "invalid_request_error"
    assert raised.value.body.keys() == {"message", "type", "param", "code"}
    assert len(server.rows()) == before
    assert whole(server.openai, "Hi", max_tokens=1).usage["completion_tokens"] == 1
    return raised.value


ASKS = pytest.mark.parametrize("ask", [whole, streamed])


def max_model_len(server: ProcessServer) -> int:
    return int(server.http.get("/version").json()["max_model_len"])


def prompt_tokens(server: ProcessServer, content: str) -> int:
    return int(whole(server.openai, content, max_tokens=1).usage["prompt_tokens"])


@ASKS
def test_an_over_long_prompt_is_refused_with_openais_code(drafting: ProcessServer, ask: Callable[..., Answer]) -> None:
    limit = max_model_len(drafting)
    error = refusal(drafting, "word " * limit, ask)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert f"maximum context length is {limit} tokens" in error.message


@ASKS
def test_one_token_more_than_there_is_room_for_is_refused(drafting: ProcessServer, ask: Callable[..., Answer]) -> None:
    limit = max_model_len(drafting)
    counted = [prompt_tokens(drafting, "word " * count) for count in (100, 200)]
    filling = "word " * (100 * (limit - 40) // (counted[1] - counted[0]) - 10)  # leaves little room for an answer
    prompt = prompt_tokens(drafting, filling)
    room = limit - prompt
    assert 0 < room < 100
    error = refusal(drafting, filling, ask, max_tokens=room + 1)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert all(str(number) in error.message for number in (limit, prompt, room + 1))
    for asked in ({"max_tokens": room}, {}):
        assert 1 <= ask(drafting.openai, filling, **asked).usage["completion_tokens"] <= room


def test_max_completion_tokens_is_named_as_the_client_named_it(drafting: ProcessServer) -> None:
    error = refusal(drafting, "Hi", max_completion_tokens=max_model_len(drafting))
    assert (error.code, error.param) == ("context_length_exceeded", "max_completion_tokens")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        pytest.param([SYSTEM], "No user query found", id="no question"),
        pytest.param([USER, SYSTEM], "System message must be at the beginning", id="late system message"),
    ],
)
@ASKS
def test_what_the_template_refuses_is_told_in_its_words(
    drafting: ProcessServer, ask: Callable[..., Answer], messages: list[dict[str, Any]], said: str
) -> None:
    error = refusal(drafting, messages, ask)
    assert said in error.message
    assert error.param == "messages"


def test_a_part_that_is_no_text_is_refused_by_its_place(drafting: ProcessServer) -> None:
    error = refusal(drafting, [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}])
    assert error.param == "messages[0].content[1]"
    assert "image_url" in error.message


@pytest.mark.parametrize(
    "more",
    [
        {"functions": [{"name": "f"}]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"web_search_options": {}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_parameter_that_is_not_supported_is_named(drafting: ProcessServer, more: dict[str, Any]) -> None:
    (name,) = more
    error = refusal(drafting, "Hi", **more)
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert name in error.message


def test_an_unknown_model_is_not_found(drafting: ProcessServer) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        drafting.openai.chat.completions.create(model="gpt-5", messages=[USER])  # type: ignore[list-item]
    assert raised.value.code == "model_not_found"


def _without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _without_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def _no_json(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": ')


def _cut_off(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_config, "config.json"),
        (_no_json, "config.json"),
        (_without_weights, "model.safetensors"),
        (_without_tokenizer, "tokenizer.json"),
        (_cut_off, "model.safetensors"),
    ],
)
def test_a_broken_checkpoint_is_one_line(damage: Callable[[Path], None], named: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(random_small().directory, directory)
    damage(directory)
    with pytest.raises(BackendError) as refused:  # which `serve` ends with: as the empty directory's, below
        load(LocalOptions(model=str(directory), threads=torch.get_num_threads()))
    told = str(refused.value)
    assert str(directory) in told
    assert named in told
    assert "\n" not in told


def test_an_empty_directory_is_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "checkpoint"
    empty.mkdir()
    assert str(empty) in fails_to_start(Checkpoint("empty", empty, thinks=False), tmp_path)


def test_a_checkpoint_without_mtp_head_is_refused_naming_the_way_out_which_serves(
    serve_model: Callable[..., ProcessServer], tmp_path: Path
) -> None:
    headless = without_mtp(random_small())
    assert "--drafter none" in fails_to_start(headless, tmp_path, "--drafter", "mtp")
    answer = whole(serve_model(headless, "--drafter", "none").openai, "Hi", max_tokens=8)
    assert (answer.timings["drafter"], answer.timings["draft_n"]) == ("none", 0)
    assert answer.usage["completion_tokens"] > 0


def fails_to_start(checkpoint: Checkpoint, tmp_path: Path, *flags: str) -> str:
    """The one line `serve` ends with."""
    command = [*serve_command(checkpoint, *flags), "--port", "0", "--capture", str(tmp_path / "capture.db")]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert re.fullmatch(r"serve: [^\n]+\n", done.stderr), done.stderr
    return done.stderr
