"""Replay: what is asked of the server for a row, what is compared, and what is told where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.records import Generation
from capture.replay import Answer, Difference, first_difference, replay, request_of, why_not
from capture.server import Server, ServerError, Version
from tests.capture_rows import generation, write

ROOT = Path(__file__).parents[2]
VERSION = Version("a" * 64, "b" * 64, "c" * 64, "torch 2.13.0 cpu fp32", max_model_len=100)
EFFECTIVE = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "presence_penalty": 1.5, "max_tokens": 90}


def answer_to(row: Generation) -> dict[str, Any]:
    """What a server says that says the same again, to a chat."""
    assert row.logprobs is not None
    return {
        "prompt_token_ids": [int(token) for token in row.prompt_tokens or ()],
        "choices": [
            {
                "token_ids": [int(token) for token in row.completion_tokens or ()],
                "logprobs": {"content": [{"logprob": float(np.float32(value))} for value in row.logprobs]},
            }
        ],
    }


Reply = tuple[int, Any]


@contextmanager
def serving(reply: Callable[[str, Any], Reply]) -> Iterator[str]:
    """A server that answers with `reply(path, body)`; the body of a GET is None."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server looks for
            self._send(None)

        def do_POST(self) -> None:
            assert self.headers["x-draftloop-capture"] == "off"
            self._send(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _send(self, body: Any) -> None:
            status, told = reply(self.path, body)
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])  # seconds between looks whether to end
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def version(**other: str) -> dict[str, Any]:
    names = ("weights", "tokenizer", "chat_template", "build")
    prints = {name: getattr(VERSION, name) for name in names} | other
    return {"fingerprints": prints, "max_model_len": VERSION.max_model_len}


def always(row: Generation) -> Callable[[str, Any], Reply]:
    return lambda path, body: (200, version() if path == "/version" else answer_to(row))


# What is asked


def test_a_chat_is_asked_for_again_with_all_that_was_in_effect() -> None:
    request = {
        "model": "other",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 900,
        "temperature": None,
        "drafter": "mtp",
        "stop": ["x"],
        "top_logprobs": 3,
        "logprobs": True,
    }
    row = generation(request=request, parameters={**EFFECTIVE, "choice": 2}, seed=2**64 - 1)
    path, body = request_of(row, VERSION)
    assert path == "/v1/chat/completions"
    assert body == {
        "messages": request["messages"],
        "stop": ["x"],
        **EFFECTIVE,
        "seed": 2**64 - 1,
        "n": 3,
        "logprobs": True,
        "return_token_ids": True,
    }


def test_a_raw_prompt_is_asked_for_again_by_itself() -> None:
    request = {"prompt": [1, 2], "echo": True, "best_of": 2, "n": 2, "prompt_logprobs": 1, "suffix": ""}
    path, body = request_of(generation(request=request, parameters={"max_tokens": 0, "choice": 1}), VERSION)
    assert (path, body["prompt"], body["n"], body["logprobs"], body["max_tokens"]) == (
        "/v1/completions",
        [1, 2],
        2,
        0,
        0,
    )
    assert not {"echo", "best_of", "prompt_logprobs"} & body.keys()


def test_a_response_is_asked_for_by_its_own_names() -> None:
    row = generation(request={"input": "Hi", "max_output_tokens": 70}, parameters=EFFECTIVE)
    path, body = request_of(row, VERSION)
    assert (path, body["input"], body["max_output_tokens"]) == ("/v1/responses", "Hi", 90)
    assert not {"max_tokens", "logprobs", "n"} & body.keys()


def test_a_shorter_context_does_not_matter_to_an_answer_that_fits() -> None:
    row = generation(parameters={"max_tokens": 16384}, request={"messages": [], "min_tokens": 5000})
    body = request_of(row, VERSION)[1]
    assert (body["max_tokens"], body["min_tokens"]) == (97, 97)
    _, body = request_of(generation(request={"messages": [], "min_tokens": "many"}), VERSION)
    assert body["min_tokens"] == "many"  # the server's to refuse
    assert why_not(generation(completion_tokens=range(98), logprobs=[]), VERSION) is not None


@pytest.mark.parametrize("tokens", [0, 2])
def test_an_answer_that_was_cut_off_is_asked_for_as_far_as_it_got(tokens: int) -> None:
    row = generation(status="cancelled", completion_tokens=range(tokens), logprobs=[-1.0] * tokens)
    assert request_of(row, VERSION)[1]["max_tokens"] == max(tokens, 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"completion_tokens": None, "prompt_tokens": None, "logprobs": None}, "no token ids"),
        ({"parameters": {"redacted": 2}, "completion_tokens": None, "prompt_tokens": None, "seed": None}, "redacted"),
        ({"seed": None}, "no seed"),
        ({"build": "upstream", "weights_fingerprint": "upstream:there"}, "another server"),
        ({"weights_fingerprint": "e" * 64}, f"another weights: {'a' * 64}, the row was made with {'e' * 64}"),
        ({"tokenizer_fingerprint": "e" * 64}, "another tokenizer"),
        ({"template_fingerprint": "e" * 64}, "another chat template"),
        ({"build": "torch 2.14"}, "another build"),
        ({"request": {}}, "neither messages"),
        ({"status": "failed", "prompt_tokens": [], "completion_tokens": [], "logprobs": []}, "failed before"),
    ],
)
def test_what_cannot_be_held_against_a_server_is_not_asked(fields: dict[str, Any], why: str) -> None:
    told = why_not(generation(**fields), VERSION)
    assert told is not None
    assert why in told
    with serving(lambda path, body: (500, {})) as url, Server(url) as server:
        assert replay(generation(**fields), server, VERSION).outcome == "not compared"


def test_a_drafter_and_the_template_of_a_raw_prompt_make_no_difference() -> None:
    assert why_not(generation(drafter="none", drafter_fingerprint="none"), VERSION) is None
    assert why_not(generation(request={"prompt": "x"}, template_fingerprint="e" * 64), VERSION) is None


# What is compared


def answer(row: Generation, **other: Any) -> Answer:
    same = Answer(
        np.asarray(row.prompt_tokens, dtype=np.uint32),
        np.asarray(row.completion_tokens, dtype=np.uint32),
        np.asarray(row.logprobs, dtype=np.float32),
    )
    return replace(same, **other)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"prompt_tokens": [5, 6, 8]}, Difference("prompt tokens", 2, 7, 8)),
        ({"prompt_tokens": [5, 6]}, Difference("prompt tokens", 2, 7, None)),
        ({"tokens": [8, 1]}, Difference("tokens", 1, 9, 1)),
        ({"tokens": [8, 9, 4]}, Difference("tokens", 2, None, 4)),
        ({"tokens": []}, Difference("tokens", 0, 8, None)),
        ({"logprobs": [-0.5]}, Difference("logprobs", 1, -0.25, None)),
    ],
)
def test_the_first_difference_is_told(other: dict[str, Any], difference: Difference) -> None:
    row = generation()
    arrays = {k: np.array(v, dtype=np.float32 if k == "logprobs" else np.uint32) for k, v in other.items()}
    assert first_difference(row, answer(row)) is None
    assert first_difference(row, answer(row, **arrays)) == difference


def test_the_last_bit_of_a_logprob_makes_a_difference() -> None:
    row = generation(logprobs=[-0.5, -1 / 3])
    near = np.nextafter(np.float32(-1 / 3), np.float32(0))
    found = first_difference(row, answer(row, logprobs=np.array([-0.5, near], dtype=np.float32)))
    assert found == Difference("logprobs", 1, float(np.float32(-1 / 3)), float(near))
    assert str(found).startswith("logprobs differ at 1: -0.3333")
    zero = generation(logprobs=[0.0, -0.5])
    assert first_difference(zero, answer(zero, logprobs=np.array([-0.0, -0.5], dtype=np.float32))) is not None


@given(st.lists(st.floats(-200, 0, width=32), min_size=1, max_size=30))
def test_a_logprob_survives_json_to_the_bit(values: list[float]) -> None:
    told = json.loads(json.dumps([float(value) for value in np.array(values, dtype=np.float32)]))
    assert np.array(told, dtype=np.float32).tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_of_an_answer_cut_off_the_beginning_is_compared() -> None:
    row = generation(status="cancelled")
    longer = answer(row, tokens=np.array([8, 9, 3], np.uint32), logprobs=np.array([-0.5, -0.25, -2], np.float32))
    assert first_difference(row, longer) is None
    other = replace(longer, tokens=np.array([8, 4, 3], np.uint32))
    assert first_difference(row, other) == Difference("tokens", 1, 9, 4)


def test_without_logprobs_in_the_row_ids_alone_are_compared() -> None:
    row = generation(logprobs=[])
    assert first_difference(row, answer(row, logprobs=np.array([-7, -8], np.float32))) is None


# What servers do


def test_a_refusal_is_a_reason_and_other_rows_go_on(tmp_path: Path) -> None:
    refused, fine = generation(request={"messages": [], "stop": "no"}), generation()
    error = {"error": {"message": "No\nsuch stop."}}

    def reply(path: str, body: Any) -> Reply:
        if path == "/version":
            return 200, version()
        return (400, error) if "stop" in body else (200, answer_to(fine))

    with serving(reply) as url:
        done = command(tmp_path, url, "--sample", "5", rows=[refused, fine])
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{refused.id}: not compared: the server refuses it: No such stop. (status 400)",
        "1 same, 0 different, 1 not compared",
    ]


def test_a_full_line_is_waited_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.server.PAUSE_SECONDS", 0.0)
    row, times = generation(), iter([429, 429, 200])
    with serving(lambda path, body: (next(times), answer_to(row))) as url, Server(url) as server:
        assert replay(row, server, VERSION).outcome == "same"
    assert next(times, None) is None


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((200, {"version": "0.9"}), "no draftloop server"),
        ((200, b"<html>"), "no draftloop server"),
        ((404, b"nothing"), "does not answer /version: Not Found (status 404)"),
        ((401, {"error": {"message": "A key."}}), "does not answer /version: A key. (status 401)"),
        ((503, {"error": {"message": "The model is still loading."}}), "still loading"),
    ],
)
def test_what_is_no_server_to_ask_is_told_in_one_line(reply: Reply, said: str) -> None:
    with serving(lambda path, body: reply) as url, Server(url) as server, pytest.raises(ServerError) as caught:
        server.version()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:1", "http://127.0.0.1:1", "ftp://x", "http://", "http://[::1", ""])
def test_where_nobody_answers_is_told_in_one_line(url: str) -> None:
    with pytest.raises(ServerError) as caught, Server(url) as server:
        server.version()
    assert "\n" not in str(caught.value)


def test_the_key_is_sent_and_the_url_may_name_the_api() -> None:
    with Server("http://127.0.0.1:8000/v1/", "the-key") as server:
        assert server.url == "http://127.0.0.1:8000"
        assert server._client.headers["authorization"] == "Bearer the-key"
    with pytest.raises(ServerError):
        Server("http://127.0.0.1:8000", "schlüssel\n")


# The command


def command(
    cwd: Path, url: str, *arguments: str, rows: list[Generation] | None = None
) -> subprocess.CompletedProcess[str]:
    path = cwd / "capture.db"
    if rows is not None:
        write(path, *rows)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTLOOP")} | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "capture.cli", "replay", "--server", url, "--capture", str(path), *arguments]
    return subprocess.run(run, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_one_row_is_found_by_its_responses_id_and_a_difference_is_exit_code_1(tmp_path: Path) -> None:
    row = generation()
    with serving(always(row)) as url:
        same = command(tmp_path, url, f"chatcmpl-{row.id}", rows=[row])
    assert (same.returncode, same.stdout) == (0, "1 same, 0 different, 0 not compared\n")
    with serving(always(replace(row, completion_tokens=[8, 7]))) as url:
        other = command(tmp_path, url, row.id)
    assert other.returncode == 1
    assert f"{row.id}: different: tokens differ at 1: 9 was captured, 7 came now\n" in other.stdout


def test_where_no_row_could_be_compared_the_exit_code_is_2(tmp_path: Path) -> None:
    row = generation()
    with serving(lambda path, body: (200, version(weights="f" * 64))) as url:
        done = command(tmp_path, url, row.id, "--json", rows=[row])
    assert (done.returncode, done.stderr) == (2, "capture: no row could be compared\n")
    assert json.loads(done.stdout)["reason"].startswith("the server has another weights: ffff")


def test_bad_use_is_refused_without_a_traceback(tmp_path: Path) -> None:
    row = generation()
    gone = command(tmp_path, "http://127.0.0.1:1", row.id, rows=[row])
    assert gone.returncode == 2
    assert gone.stderr.startswith("capture: no server answers at http://127.0.0.1:1: ")
    assert gone.stderr.count("\n") == 1
    both = command(tmp_path, "http://127.0.0.1:1", row.id, "--sample", "3")
    neither = command(tmp_path, "http://127.0.0.1:1")
    for done in (both, neither):
        assert done.returncode == 2
        assert "ID or --sample" in done.stderr
        assert "Traceback" not in done.stderr
