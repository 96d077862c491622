"""What a client keeps out of the capture file, and what its operator does: neither text nor tokens reach the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capture.redact import PLACEHOLDER, Redactor
from serve.settings import load
from tests.fake_backend import Script
from tests.servers import CHAT, ROOT, clean_environment

HEADER = "X-Draftloop-Capture"
SECRET = "alice@example.com"
SAYS = Script(pieces=(b"Ask ", b"bob@", b"example.com", b" about it."), thought=(b"carol@example.com",))
ENDPOINTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": f"I am {SECRET}"}]},
    "/v1/completions": {"prompt": f"I am {SECRET}"},
    "/v1/responses": {"input": f"I am {SECRET}"},
}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
everywhere = pytest.mark.parametrize("endpoint", ENDPOINTS)


def on_disk(path: Path) -> bytes:
    """Every byte of the capture file and of what lies beside it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()) if file.is_file())


@both
@everywhere
def test_a_client_opts_out_by_any_spelling_and_leaves_only_a_count(serve, endpoint, stream):
    server = serve(SAYS)
    asked = {**ENDPOINTS[endpoint], "stream": stream}
    outs = [
        *(({HEADER: value}, {}) for value in ("off", "false", "0", "Off", "FALSE", "on, off")),
        ([(HEADER, "on"), (HEADER, "off")], {}),
        ({}, {"store": False}),
        ({HEADER: "on"}, {"store": False}),
        ({HEADER: "off"}, {"store": True}),
    ]
    for headers, fields in outs:
        answer = server.http.post(endpoint, json={**asked, **fields}, headers=headers)
        assert answer.status_code == 200
        assert "bob@" in answer.text
    assert server.rows() == []
    assert b"example.com" not in on_disk(server.capture)
    assert server.metric("capture_generations_total", status="opted_out") == len(outs)
    for headers, fields in [({}, {}), ({HEADER: "on"}, {}), ({HEADER: "TRUE"}, {"store": True}), ({HEADER: "1"}, {})]:
        assert server.http.post(endpoint, json={**asked, **fields}, headers=headers).status_code == 200
    assert len(server.rows()) == 4


@everywhere
def test_a_word_nobody_understands_is_refused_rather_than_captured(serve, endpoint):
    server = serve()
    for value in ("no", "", "off, no"):
        answer = server.http.post(endpoint, json=ENDPOINTS[endpoint], headers={HEADER: value})
        assert answer.status_code == 400
        assert HEADER in answer.json()["error"]["message"]
    assert server.rows() == []


@both
@everywhere
def test_what_the_operator_redacts_never_reaches_the_disk(serve, tmp_path, endpoint, stream):
    (tmp_path / "patterns").write_text("# ours\nproject \\w+, \\w{3}\n")
    server = serve(SAYS, redact="email", redact_file=tmp_path / "patterns", capture=tmp_path / "kept" / "capture.db")
    asked = {
        **ENDPOINTS[endpoint],
        "stream": stream,
        "seed": 5,
        "user": SECRET,
        "metadata": {"owner": SECRET, "note": "project blue, now"},
    }
    answer = server.http.post(endpoint, json=asked)
    assert answer.status_code == 200
    assert "bob@" in answer.text  # the client gets what was said
    (row,) = server.rows()
    assert row.response_text.endswith(f"Ask {PLACEHOLDER} about it.")
    assert row.request["user"] == row.client == PLACEHOLDER
    assert row.request["metadata"] == {"owner": PLACEHOLDER, "note": PLACEHOLDER}
    assert (row.prompt_tokens, row.completion_tokens, row.logprobs, row.seed) == (None, None, None, None)
    assert "seed" not in row.request
    assert row.redacted >= 5
    assert row.timings["predicted_n"] > 0
    kept = on_disk(server.capture)
    assert b"example.com" not in kept
    assert b"blue" not in kept
    assert server.metric("capture_redacted_total") == 1
    assert server.metric("capture_generations_total", status="finished") == 1


def test_a_row_without_a_match_is_stored_whole(serve):
    server = serve(redact="email")
    server.chat("Hi")
    (row,) = server.rows()
    assert (row.redacted, row.seed is None, len(row.completion_tokens)) == (0, False, 10)
    assert server.metric("capture_redacted_total") == 0


def test_what_cannot_be_redacted_is_not_stored(serve, monkeypatch):
    server = serve(redact="email")
    monkeypatch.setattr(Redactor, "generation", lambda *_: 1 / 0)
    assert server.chat().status_code == 200
    assert server.rows() == []
    assert server.metric("capture_failures_total") == 1


def test_patterns_are_a_flag_each_or_a_line_each_of_the_variable(monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_REDACT", "email\n\na{2,3}\n")
    assert load().redact == ("email", "a{2,3}")
    assert load(redact=["b{2,3}", "key"]).redact == ("b{2,3}", "key")


def test_a_pattern_that_is_none_is_one_line_and_exit_code_two():
    command = [sys.executable, "-m", "tests.fake_backend", "--port", "0", "--capture", "off"]
    refused = subprocess.run(
        [*command, "--redact", "email", "--redact", "("],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == "serve: '(' is no regular expression: missing ), unterminated subpattern at position 0\n"
