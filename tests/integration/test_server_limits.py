"""How much, how long, how many: what a request may take, and what it hears when it wants more."""

from __future__ import annotations

import json
import socket
import threading
import time
from functools import partial
from urllib.parse import urlsplit

import openai
import pytest

from tests.fake_backend import Script
from tests.servers import CHAT
from tests.servers import eventually as _eventually

eventually = partial(_eventually, seconds=30)

USER = {"role": "user", "content": "Hi"}
LONG = '{"repeat": 3000, "pause": 0.02}'  # a minute, which it is not given


def error(response, status: int) -> dict:
    assert response.status_code == status, response.text
    told = response.json()["error"]
    assert sorted(told) == ["code", "message", "param", "type"]
    return told


class Crowd:
    """Long generations, each asked for by a thread of its own; all are cancelled at the end."""

    def __init__(self, server) -> None:
        self.server = server
        self.threads: list[threading.Thread] = []

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for generation in list(self.server.backend.running):
            self.server.backend.cancel(generation)
        for thread in self.threads:
            thread.join()

    def ask(self, count: int = 1, **more) -> None:
        running = len(self.server.backend.running)
        for _ in range(count):
            self.threads.append(threading.Thread(target=self.server.chat, args=(LONG,), kwargs=more))
            self.threads[-1].start()
        eventually(lambda: len(self.server.backend.running) == running + count * more.get("n", 1))


# -- how many --------------------------------------------------------------------------------------------------------


def test_a_request_that_would_wait_too_far_back_is_sent_away(serve):
    server = serve(max_num_seqs=2, max_queued=1)
    with Crowd(server) as crowd:
        crowd.ask(3)
        refused = server.chat()
        told = error(refused, 429)
        assert (told["type"], told["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        assert len(server.backend.requests) == 3
        with pytest.raises(openai.RateLimitError):
            server.openai.chat.completions.create(model="fake", messages=[USER], stream=True)
        server.backend.cancel(next(iter(server.backend.running)))
        eventually(lambda: server.service.running == 2)
        assert server.chat().status_code == 200


def test_every_choice_takes_a_place_and_all_find_one_or_none(serve):
    server = serve(max_num_seqs=2, max_queued=1)
    with Crowd(server) as crowd:
        crowd.ask(n=2)
        error(server.chat(n=2), 429)
        assert len(server.backend.requests) == 2
        error(server.http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}), 429)
        assert server.chat().status_code == 200


def test_an_idle_server_takes_any_one_request(serve):
    server = serve(max_num_seqs=1, max_queued=0)
    assert len(server.chat(n=4).json()["choices"]) == 4
    with Crowd(server) as crowd:
        crowd.ask()
        error(server.chat(), 429)


def test_without_a_limit_everybody_waits(serve):
    server = serve(max_num_seqs=1)
    with Crowd(server) as crowd:
        crowd.ask(8)
        assert server.chat().status_code == 200


# -- how long --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [LONG, '{"first_pause": 30}'], ids=["decoding", "waiting"])
def test_a_request_that_takes_too_long_is_ended_told_and_recorded(serve, content):
    server = serve(request_timeout=0.5)
    told = error(server.chat(content), 504)
    assert told["code"] == "request_timeout"
    assert "0.5 s" in told["message"]
    (row,) = server.rows()
    assert row.status == "cancelled"
    assert "0.5 s" in row.error
    assert server.backend.cancelled == [row.id]
    assert server.metric("request_success_total", finished_reason="cancelled") == 1


def test_a_stream_that_takes_too_long_hears_it_in_band(serve):
    server = serve(request_timeout=1)
    with pytest.raises(openai.APIError) as caught:
        for _ in server.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": LONG}], stream=True
        ):
            pass
    assert caught.value.code == "request_timeout"
    text = server.chat(LONG, stream=True).text
    assert '"finish_reason":"' not in text, "an end was invented"
    assert text.endswith("data: [DONE]\n\n")
    assert [row.status for row in server.rows()] == ["cancelled"] * 2


def test_what_ends_in_time_is_left_alone(serve):
    server = serve(request_timeout=20)
    assert server.chat().status_code == 200
    assert [row.status for row in server.rows()] == ["finished"]


def connect(server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def head(*lines: str) -> bytes:
    more = "".join(f"{line}\r\n" for line in lines)
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}\r\n".encode()


def test_a_body_that_trickles_is_not_waited_for(serve):
    server = serve(body_timeout=0.5)
    with connect(server) as connection:
        connection.sendall(head("Content-Length: 1000"))
        answer = b""
        connection.settimeout(0.1)
        for _ in range(200):
            try:
                connection.sendall(b" ")
                answer += connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer.endswith(b"}"):
                break
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    assert b"connection: close" in answer.lower()
    assert server.backend.requests == []


def test_a_body_that_arrives_in_pieces_in_time_is_read(serve):
    server = serve(body_timeout=20)
    body = json.dumps({"messages": [USER]}).encode()
    with connect(server) as connection:
        connection.sendall(head(f"Content-Length: {len(body)}", "Connection: close"))
        for at in range(0, len(body), 10):
            connection.sendall(body[at : at + 10])
            time.sleep(0.02)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_longer_than_a_body(serve):
    assert serve(Script(first_pause=1), body_timeout=0.5).chat().status_code == 200


# -- how much --------------------------------------------------------------------------------------------------------


def test_a_body_as_large_as_allowed_is_taken_and_a_byte_more_is_not(serve):
    server = serve(max_body=1 / 1024)
    body = json.dumps({"messages": [USER]})
    for length, status in ((1024, 200), (1025, 413)):
        response = server.http.post(CHAT, content=body.ljust(length), headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
    pieces = [b" " * 1000] * 100  # without saying beforehand how many
    response = server.http.post(CHAT, content=iter(pieces), headers={"Content-Type": "application/json"})
    assert error(response, 413)["code"] == "request_too_large"


def test_endless_headers_are_cut_off_and_others_are_served(serve):
    server = serve()
    with connect(server) as connection:
        try:
            for _ in range(10_000):
                connection.sendall(b"POST / HTTP/1.1\r\n" + b"X-Header: value\r\n" * 100)
            answer = connection.recv(4096)
        except OSError:
            answer = b""
    assert answer.startswith(b"HTTP/1.1 400") or not answer
    assert server.chat().status_code == 200


def test_headers_that_trickle_are_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr("serve.server.HEADER_SECONDS", 0.5)
    server = serve()
    begun = b"GET / HTTP/1.1\r\nX-Header: "
    for sent in (b"", begun):
        with connect(server) as connection:
            connection.sendall(sent)
            assert connection.recv(4096) == b"", "it is closed"
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(4096)
        connection.sendall(begun)
        assert connection.recv(4096) == b"", "the second request on a connection may take no longer"


def test_a_request_whose_headers_have_come_is_not_hurried(serve, monkeypatch):
    monkeypatch.setattr("serve.server.HEADER_SECONDS", 0.5)
    server = serve(Script(first_pause=1.5))
    for _ in range(2):  # the second on the first one's connection
        assert server.chat().status_code == 200


# -- silence ---------------------------------------------------------------------------------------------------------


def raw_stream(server, content: str, seconds: float) -> bytes:
    """What comes over the wire in that time, the chunked encoding's frames included."""
    body = json.dumps({"messages": [{"role": "user", "content": content}], "stream": True}).encode()
    received = b""
    with connect(server) as connection:
        connection.sendall(head(f"Content-Length: {len(body)}") + body)
        deadline = time.monotonic() + seconds
        while b"[DONE]" not in received and time.monotonic() < deadline:
            received += connection.recv(4096)
    return received


def test_a_stream_that_pauses_is_kept_alive_by_comments(serve):
    server = serve(Script(pause=0.5), sse_keep_alive=0.1)
    lines = server.chat(stream=True).text.splitlines()
    assert len([line for line in lines if line.startswith(":")]) >= 2
    assert lines[-2:] == ["data: [DONE]", ""]
    (*_, last) = server.openai.chat.completions.create(model="fake", messages=[USER], stream=True)
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, "messages"), ("/v1/completions", "prompt"), ("/v1/responses", "input")]
)
def test_a_stream_that_is_long_in_coming_is_kept_alive_too(serve, path, prompt):
    server = serve(Script(first_pause=1.5), sse_keep_alive=0.3)
    asked = {prompt: [USER] if prompt == "messages" else "Hi", "stream": True}
    lines = server.http.post(path, json=asked).text.splitlines()
    first = next(i for i, line in enumerate(lines) if "Hel" in line)
    assert len([line for line in lines[:first] if line.startswith(":")]) >= 2
    texts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "wör" in json.dumps(texts, ensure_ascii=False)
    assert not any(text.get("error") for text in texts)
    assert [row.status for row in server.rows()] == ["finished"]


def test_a_stream_that_fails_after_it_was_kept_alive_hears_it_in_band(serve):
    server = serve(Script(first_pause=1, finish="error", pieces=(b"x",)), sse_keep_alive=0.2)
    answer = server.chat(stream=True)
    assert answer.status_code == 200
    assert "generation_failed" in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_client_that_leaves_a_stream_that_was_kept_alive_ends_it(serve):
    server = serve(Script(first_pause=60), sse_keep_alive=0.1)
    with server.http.stream("POST", CHAT, json={"messages": [USER], "stream": True}) as response:
        next(line for line in response.iter_lines() if line.startswith(":"))
    (row,) = eventually(server.rows)
    assert row.status == "cancelled"


def test_without_keep_alive_there_are_no_comments(serve):
    server = serve(Script(pause=0.3), sse_keep_alive=0)
    assert not [line for line in server.chat(stream=True).text.splitlines() if line.startswith(":")]


def test_lines_of_a_stream_end_in_a_line_feed_alone(serve):
    server = serve(Script(pause=0.3), sse_keep_alive=0.1)
    received = raw_stream(server, "Hi", 20)
    _, _, frames = received.partition(b"\r\n\r\n")
    body = b""
    while frames:
        size, _, frames = frames.partition(b"\r\n")
        body, frames = body + frames[: int(size, 16)], frames[int(size, 16) + 2 :]
        if b"[DONE]" in body:
            break
    assert b"\r" not in body
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    assert any(event.startswith(": ") for event in events)
    assert all(event.startswith((": ", "data: ")) and "\n" not in event for event in events)
