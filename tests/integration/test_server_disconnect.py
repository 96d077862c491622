"""A client that leaves ends its generation at once, and leaves a cancelled row."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.fake_backend import Script
from tests.servers import CHAT, eventually

SLOW = Script(repeat=100, pause=0.02)


MANY = {  # how to ask for four generations at once
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "n": 4},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2, "max_tokens": 1000},
}


def connect(server, stream: bool, path: str = CHAT, **more) -> socket.socket:
    """A raw connection with the request sent: closing it is leaving."""
    body = json.dumps({"stream": stream, **(more or {"messages": [{"role": "user", "content": "Hi"}]})}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_leaves_a_cancelled_row(serve, stream):
    server = serve(SLOW)
    connection = connect(server, stream)
    if stream:
        connection.recv(1000)
    eventually(lambda: server.metric("generation_tokens_total") >= 4)
    connection.close()
    (row,) = eventually(server.rows)
    assert (row.status, row.finish_reason) == ("cancelled", None)
    assert server.backend.cancelled == [row.id]
    assert 4 <= len(row.completion_tokens) < 100
    assert len(row.completion_tokens) == server.metric("generation_tokens_total")
    assert server.metric("capture_generations_total", status="cancelled") == 1
    assert server.metric("request_success_total", finished_reason="cancelled") == 1
    eventually(lambda: server.service.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_noticed(serve, stream):
    server = serve(Script(first_pause=30))
    connection = connect(server, stream)
    eventually(lambda: server.backend.running)
    connection.close()
    (row,) = eventually(server.rows)
    assert row.status == "cancelled"
    assert len(row.completion_tokens) == 0


@pytest.mark.parametrize("script", [SLOW, Script(first_pause=30)], ids=["decoding", "waiting"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", MANY)
def test_a_client_that_leaves_ends_all_it_has_asked_for(serve, path, stream, script):
    server = serve(script)
    connection = connect(server, stream, path, **MANY[path])
    eventually(lambda: len(server.backend.running) == 4)
    if script is SLOW:
        eventually(lambda: server.metric("generation_tokens_total") >= 8)
    connection.close()
    rows = eventually(lambda: len(rows := server.rows()) == 4 and rows)
    assert {row.status for row in rows} == {"cancelled"}
    assert sorted(server.backend.cancelled) == sorted(row.id for row in rows)
    assert all(len(row.completion_tokens) < 100 for row in rows)
    eventually(lambda: server.service.running == 0)


def test_a_client_that_leaves_before_the_backend_knows_its_request_is_not_forgotten(serve):
    server = serve(Script(deaf=0.3, repeat=100, pause=0.02))
    connection = connect(server, stream=False)
    eventually(lambda: server.backend.requests)
    connection.close()
    (row,) = eventually(server.rows)
    assert row.status == "cancelled"
    assert len(row.completion_tokens) < 10


def test_a_stream_the_client_closes_is_cancelled(serve):
    server = serve(SLOW)
    stream = server.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    next(stream)
    stream.close()
    (row,) = eventually(server.rows)
    assert row.status == "cancelled"


def test_a_client_that_leaves_while_sending_its_body_disturbs_nothing(serve):
    server = serve()
    connection = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{"
    connection.sendall(head.encode())
    connection.close()
    assert server.chat().status_code == 200
    assert len(server.rows()) == 1


def test_the_others_go_on_when_one_leaves(serve):
    server = serve(Script(repeat=3, pause=0.02))
    leaving = connect(server, stream=True)
    staying = server.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    next(staying)
    leaving.close()
    *_, last = staying
    assert last.choices[0].finish_reason == "stop"
    assert sorted(row.status for row in eventually(lambda: len(server.rows()) == 2 and server.rows())) == [
        "cancelled",
        "finished",
    ]
