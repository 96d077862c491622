"""The load benchmark against a server whose waits and failures are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fake_backend import Script
from tests.servers import ROOT, clean_environment


def run(*arguments: Any, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.serve_load", *map(str, arguments)],
        cwd=ROOT,
        env=clean_environment() | {"COLUMNS": "100"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expect, done
    assert "Traceback" not in done.stderr
    return done


def measure(url: str, path: Path, *arguments: Any, expect: int = 0) -> dict[str, Any]:
    run("--url", url, "--json", path, "--duration", 1, *arguments, expect=expect)
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_known_waits_are_measured_at_every_rate(serve, tmp_path):
    server = serve(Script(first_pause=0.2, pieces=(b"a", b"b", b"c", b"d"), pause=0.1))
    done = run("--url", server.url, "--rate", 8, "--rate", 20, "--duration", 1, "--json", tmp_path / "load.json")
    told = json.loads((tmp_path / "load.json").read_text())
    assert [figures["rate"] for figures in told["rates"]] == [8, 20]
    assert told["model"] == "fake"
    for figures in told["rates"]:
        assert figures["completed"] == figures["requests"] > 0
        assert (figures["errors"], figures["without_usage"]) == ({}, 0)
        # Tokens: one after 0.3 s, then a block of three 0.1 s later.
        assert 0.29 <= figures["ttft_s"]["p50"] < 1
        assert figures["ttft_s"]["p50"] <= figures["ttft_s"]["p90"] <= figures["ttft_s"]["p99"]
        assert 0.02 <= figures["inter_token_s"]["p50"] < 0.06
        assert 0.06 <= figures["chunk_gap_s"]["p50"] < 0.18
        assert 0.39 <= figures["e2e_s"]["p50"] < 1.2
        assert figures["tokens_per_s"] == pytest.approx(4 * figures["requests"] / figures["wall_s"])
        speed = figures["answer_tokens_per_s"]
        assert 10 >= speed["p50"] >= speed["p90"] >= speed["p99"] > 0
    sent = sum(figures["requests"] for figures in told["rates"])
    assert server.metric("request_success_total", finished_reason="stop") == sent == len(server.backend.requests)
    assert "offered requests/s" in done.stdout


def test_requests_leave_whether_or_not_others_have_ended(serve, tmp_path):
    server = serve(Script(first_pause=1.5, pieces=(b"a",)))
    (figures,) = measure(server.url, tmp_path / "load.json", "--rate", 20)["rates"]
    assert figures["requests"] > 5
    assert figures["e2e_s"]["p99"] < 1.5 * 5  # one after another, the last would wait for all the others
    assert figures["wall_s"] < 1.5 * 5


def test_the_same_seed_sends_the_same_requests(serve, tmp_path):
    server = serve()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n\nsecond\nthird\n")
    options = ("--prompts", prompts, "--max-tokens", 5, "--temperature", 0.5, "--extra", '{"top_k": 3}', "--rate", 15)

    def sent(seed: int) -> list[tuple[Any, ...]]:
        server.backend.requests.clear()
        measure(server.url, tmp_path / "load.json", *options, "--seed", seed)
        asked = [(r.sampling.seed, r.messages[0]["content"], r.sampling) for r in server.backend.requests]
        return sorted(asked, key=lambda one: one[0])

    first = sent(3)
    assert sent(3) == first != sent(4)
    assert {content for _, content, _ in first} <= {"first", "second", "third"}
    assert {(s.max_tokens, s.temperature, s.top_k) for _, _, s in first} == {(5, 0.5, 3)}
    assert [seed for seed, _, _ in first] == list(range(3, 3 + len(first)))


def test_failures_are_counted_by_kind_and_measured_by_nothing_else(serve, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fine\n" + '{"refuses": "no"}\n' + '{"finish": "error"}\n' + '{"first_pause": 30}\n')
    options = ("--prompts", prompts, "--rate", 40, "--timeout", 1)
    (figures,) = measure(serve().url, tmp_path / "load.json", *options)["rates"]
    assert set(figures["errors"]) == {"HTTP 400", "stream: generation_failed", "took too long"}
    assert figures["completed"] + sum(figures["errors"].values()) == figures["requests"]
    for name in ("ttft_s", "e2e_s", "answer_tokens_per_s"):
        assert figures[name]["n"] == figures["completed"]


class _Handler(BaseHTTPRequestHandler):
    """Another server: streams an answer without usage, and only to whoever has the key."""

    body = b""

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "another"}]}', "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer open sesame":
            self.send_error(401)
            return
        self._send(self.body, "text/event-stream")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def another_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


TEXT = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (TEXT + END, None),
        (TEXT, "cut short"),
        (b"data: x\n\n", "not OpenAI's shape"),
        (b"data: {}\n\n", "not OpenAI's shape"),
    ],
)
def test_any_server_can_be_measured_with_a_key(another_server, tmp_path, monkeypatch, body, error):
    monkeypatch.setattr(_Handler, "body", body)
    monkeypatch.setenv("A_KEY", "open sesame")
    options = ("--rate", 20, "--api-key-env", "A_KEY")
    told = measure(another_server, tmp_path / "load.json", *options, expect=1 if error else 0)
    (figures,) = told["rates"]
    assert told["model"] == "another"
    assert figures["errors"] == ({error: figures["requests"]} if error else {})
    if error is None:
        assert figures["without_usage"] == figures["completed"] == figures["requests"]
        assert (figures["answer_tokens_per_s"], figures["inter_token_s"]) == (None, None)
        assert figures["ttft_s"]["n"] == figures["requests"]
    assert "open sesame" not in (tmp_path / "load.json").read_text()


def test_without_the_key_every_request_fails_and_is_told(another_server, tmp_path):
    (figures,) = measure(another_server, tmp_path / "load.json", "--rate", 20, expect=1)["rates"]
    assert figures["errors"] == {"HTTP 401": figures["requests"]}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (["--url", "http://127.0.0.1:x"], "http://127.0.0.1:x"),
        (["--url", "nowhere"], "nowhere"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--extra", "{"], "--extra"),
        (["--extra", "[]"], "--extra"),
        (["--prompts", os.devnull], os.devnull),
        (["--prompts", "no/such/file"], "no/such/file"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_a_mistake_is_one_line(arguments, named):
    done = run(*arguments, expect=2)
    assert done.stdout == ""
    assert done.stderr.startswith("serve_load: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_it_needs_nothing_of_ours():
    code = "import sys, tests.benchmarks.serve_load; print({name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"serve", "backend", "capture", "training", "torch"} & eval(done.stdout)
