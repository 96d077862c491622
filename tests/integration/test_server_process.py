"""The whole process: its start, its flags, its signals, its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.servers import CHAT, ROOT, Lock, clean_environment, eventually

SLOW = '{"repeat": 20, "pause": 0.02}'
FAT = {"logprobs": True, "top_logprobs": 64}  # some kilobytes a token: more than the buffers between us hold
ENDLESS = '{"repeat": 100000, "pause": 0.02}'


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`serve` over the fake backend, for starts that end by themselves."""
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_backend", *flags],
        cwd=ROOT,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def in_background(server, content: str, **more) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat(content, **more)))
    thread.start()
    eventually(lambda: server.metric("generation_tokens_total") > 0)
    return thread, answers


def test_a_ready_server_says_where_it_is_and_how_to_ask_it(serve_process):
    server = serve_process()
    text = "".join(server.output)
    assert server.url in text
    assert str(server.capture) in text
    command = eventually(lambda: re.search(r"^  (curl .*)$", "".join(server.output), re.MULTILINE))[1]
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
    assert '"finish_reason":"stop"' in told.stdout, told


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once_and_well(serve_process, signum):
    server = serve_process()
    server.chat()
    began = time.monotonic()
    assert server.stop(signum) == 0
    assert time.monotonic() - began < 3
    assert len(server.rows()) == 1
    assert "Traceback" not in "".join(server.output)


def test_running_requests_finish_and_new_ones_are_sent_away(serve_process):
    server = serve_process()
    thread, answers = in_background(server, SLOW)
    server.process.send_signal(signal.SIGTERM)
    refused = eventually(lambda: (r := server.chat()).status_code == 503 and r)
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "shutting_down"
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/health").status_code == 200
    assert server.process.wait(20) == 0
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 200
    assert [row.status for row in server.rows() if len(row.completion_tokens) == 200] == ["finished"]


def test_a_stream_is_finished_before_the_end(serve_process):
    server = serve_process()
    thread, answers = in_background(server, SLOW, stream=True)
    assert server.stop() == 0
    thread.join()
    assert '"finish_reason":"stop"' in answers[0].text
    assert answers[0].text.rstrip().endswith("[DONE]")


def test_a_slow_reader_still_gets_the_end_of_its_stream(serve_process):
    server = serve_process()
    body = json.dumps({**FAT, "messages": [{"role": "user", "content": '{"repeat": 150}'}], "stream": True})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall((head + body).encode())
        eventually(lambda: server.metric("request_success_total", finished_reason="stop") == 1, 20)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b'"finish_reason":"stop"' in received
    assert b"data: [DONE]" in received
    assert server.process.wait(20) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlasts_the_grace_is_cancelled_told_and_recorded(serve_process, stream):
    server = serve_process("--shutdown-grace", "0.3")
    thread, answers = in_background(server, ENDLESS, stream=stream)
    assert server.stop() == 0
    thread.join()
    assert "shutting_down" in answers[0].text
    assert answers[0].status_code == (200 if stream else 503)
    (row,) = server.rows()
    assert row.status == "cancelled"


def test_a_second_signal_stops_at_once(serve_process):
    server = serve_process()
    with server.http.stream(
        "POST", CHAT, json={"messages": [{"role": "user", "content": ENDLESS}], "stream": True}
    ) as response:
        next(response.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "second signal" in "".join(server.output))
        assert server.stop(seconds=3) == -signal.SIGTERM


def test_rows_that_wait_are_written_before_the_end(serve_process):
    server = serve_process("--capture-commit-timeout", "0.05")
    lock = Lock(server.capture)
    assert server.chat().status_code == 200
    server.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert server.process.poll() is None
    lock.release()
    assert server.process.wait(20) == 0
    assert len(server.rows()) == 1


def test_a_killed_server_has_lost_no_answer_that_was_finished(serve_process):
    server = serve_process()
    finished: list[str] = []

    def ask() -> None:
        try:
            while True:
                *_, last = server.openai.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
                )
                finished.append(last.id)
        except Exception:
            return  # the server was killed

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(finished) > 50, 20)
    server.process.kill()
    for thread in threads:
        thread.join()
    assert {answer.removeprefix("chatcmpl-") for answer in finished} <= {row.id for row in server.rows()}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert re.fullmatch(r"serve: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in one_line(run("--port", str(port), "--capture", "off"))


def test_an_open_address_is_allowed_when_asked_for(serve_process):
    assert serve_process("--host", "0.0.0.0", "--insecure").http.get("/ready").status_code == 200


def test_a_wrong_flag_is_one_line():
    assert "--port" in one_line(run("--port", "70000"))


def test_an_unusable_capture_file_is_one_line(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("this is not a database, and it is long enough not to be taken for an empty one" * 20)
    assert str(file) in one_line(run("--port", "0", "--capture", str(file)))
    assert str(file) in one_line(run("--port", "0", "--capture", str(file / "below")))


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    code = (
        "from serve import cli; from tests.fake_backend import FakeBackend;"
        "cli.make_backend = lambda settings: FakeBackend(start_error='no weights in /nowhere'); cli.main()"
    )
    command = [sys.executable, "-c", code, "--port", "0", "--capture", str(tmp_path / "capture.db")]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert one_line(done) == "serve: no weights in /nowhere\n"


def test_help_lists_every_flag_without_loading_a_model():
    code = "import sys; from serve import cli\ntry: cli.main()\nfinally: sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--draft-tokens" in done.stdout
