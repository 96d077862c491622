"""An upstream that fails in each way: the client hears of it, is never told a clean end, and the row says failed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from backend.upstream import backend as upstream_module
from backend.upstream.backend import UpstreamBackend, UpstreamOptions
from tests.misbehaving_upstream import Script, Upstream, chunk, completion, events, plain, stream
from tests.proxied import Proxies, proxies
from tests.servers import CHAT, AppServer, eventually, running_app

HI = [{"role": "user", "content": "Hi"}]
HEL = events(chunk("Hel"), done=False)
FINISH = events(chunk("lo"), chunk(finish="stop"), done=False)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxies]:
    with proxies(tmp_path_factory.mktemp("proxies")) as started:
        yield started


@pytest.fixture
def upstream(running: Proxies) -> Upstream:
    running.upstream.reset()
    return running.upstream


@pytest.fixture
def proxy(running: Proxies, upstream: Upstream) -> Proxies:
    return running


def streamed(server: AppServer, upstream: Upstream) -> tuple[str, dict[str, Any]]:
    """What a stream said before it broke, and the error it broke with; there must be one and no clean end."""
    lines = []
    with server.http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            upstream.posts[-1].heard.set()
    *said, done = lines
    *chunks, last = [json.loads(line) for line in said]
    assert done == "[DONE]"
    assert "choices" not in last
    choices = [choice for one in chunks for choice in one["choices"]]
    assert {choice["finish_reason"] for choice in choices} <= {None}
    return "".join(choice["delta"].get("content", "") for choice in choices), last


def failed_row(server: AppServer, text: str) -> None:
    (row,) = server.rows()
    assert (row.status, row.finish_reason, row.response_text) == ("failed", None, text)
    assert row.error
    assert server.metric("request_success_total", finished_reason="error") == 1


def test_an_upstream_that_refuses_connections(upstream, proxy):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = proxy(url=f"http://127.0.0.1:{port}")
    eventually(lambda: server.http.get("/ready").json()["status"] == "recovering", 30)
    for stream_it in (False, True):
        refused = server.chat(stream=stream_it)
        assert refused.status_code == 502
        assert refused.json()["error"]["message"] == "The upstream cannot be reached."
    assert [row.status for row in server.rows()] == ["failed", "failed"]
    assert server.http.get("/v1/models").status_code == 503


def test_an_upstream_whose_name_leads_nowhere(upstream, proxy):
    server = proxy(url="http://no-such-host.invalid")
    eventually(lambda: server.http.get("/ready").json()["status"] == "recovering", 30)
    assert server.chat().status_code == 502
    failed_row(server, "")


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "x"}}),
        (404, {"object": "error", "message": "no such model", "type": "NotFoundError", "param": None, "code": 404}),
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "odd"}]}),
        (429, {"error": {"message": "slow down", "code": 429, "type": "rate"}}),
    ],
)
def test_a_clients_fault_is_passed_on_as_the_upstream_tells_it(upstream, proxy, status, body, stream_it):
    upstream.say(plain(body, status, headers={"Retry-After": "7", "X-Secret": "s"}))
    server = proxy()
    refused = server.chat(stream=stream_it)
    assert (refused.status_code, refused.json()) == (status, body)
    assert refused.headers["retry-after"] == "7"
    assert "x-secret" not in refused.headers
    failed_row(server, "")


@pytest.mark.parametrize("stream_it", [False, True])
def test_that_our_key_is_refused_is_no_fault_of_the_clients_and_the_key_is_not_told(upstream, proxy, stream_it):
    upstream.say(plain({"error": {"message": "Incorrect API key provided: sk-ours"}}, 401))
    server = proxy(key="sk-ours")
    failed = server.chat(stream=stream_it)
    assert failed.status_code == 502
    assert failed.json()["error"]["type"] == "server_error"
    assert "sk-ours" not in failed.text
    failed_row(server, "")
    assert "sk-ours" not in str(server.rows())


def test_a_refusal_that_is_no_error_body_is_put_into_one(upstream, proxy):
    upstream.say(plain("<h1>Forbidden</h1>", 403))
    refused = proxy().chat()
    assert refused.status_code == 403
    assert refused.json()["error"]["message"] == "The upstream answered 403: <h1>Forbidden</h1>"


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize(("status", "told"), [(500, 502), (501, 502), (503, 503), (504, 504), (599, 502)])
def test_an_upstreams_own_fault_is_told_as_a_gateways(upstream, proxy, status, told, stream_it):
    upstream.say(plain({"error": {"message": "out of memory"}}, status, headers={"Retry-After": "3"}))
    server = proxy()
    failed = server.chat(stream=stream_it)
    assert failed.status_code == told
    error = failed.json()["error"]
    assert (error["message"], error["type"]) == (f"The upstream answered {status}: out of memory", "server_error")
    assert failed.headers["retry-after"] == "3"
    failed_row(server, "")


def test_redirects_are_not_followed(upstream, proxy):
    upstream.say(plain({}, 307, headers={"Location": f"{upstream.url}/elsewhere"}))
    server = proxy()
    assert server.chat().status_code == 502
    assert len(upstream.posts) == 1


BROKEN_STREAMS = {
    "a reset": Script((HEL,), end="rst"),
    "a reset within chunks": Script((HEL,), end="rst", framing="chunked"),
    "an end without finish_reason": Script((HEL,), end="fin"),
    "an end within chunks": Script((HEL,), end="fin", framing="chunked"),
    "a proper end of the body alone": Script((HEL,), framing="chunked"),
    "[DONE] without finish_reason": stream(chunk("Hel")),
    "half a line": Script((HEL, events(chunk("lo"))[:40]), end="fin"),
    "half a line before a reset": Script((HEL, events(chunk("lo"))[:40]), end="rst"),
    "half a character": Script((HEL, events(chunk("ö", finish="stop"))[:-80] + b"\xc3"), end="fin"),
    "half a character in a whole line": Script((HEL, b'data: {"choices": [], "x": "\xc3"}\n\n', b"data: [DONE]\n\n")),
    "something that is not JSON": Script((HEL, b"data: {oops}\n\n", FINISH)),
    "JSON that is no object": Script((HEL, b"data: [1]\n\n", FINISH)),
    "nesting without end": Script((HEL, b"data: " + b"[" * 100_000 + b"\n\n", FINISH)),
}


@pytest.mark.parametrize("script", BROKEN_STREAMS.values(), ids=BROKEN_STREAMS.keys())
def test_a_stream_that_breaks_ends_with_an_error(upstream, proxy, script):
    upstream.say(script)
    server = proxy()
    text, error = streamed(server, upstream)
    assert text == "Hel"
    assert error["error"]["type"] == "server_error"
    assert error["error"]["message"].startswith("The upstream ")
    failed_row(server, "Hel")


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "out of memory", "type": "x", "code": 500, "more": [1]}},
        {"object": "error", "message": "out of memory", "code": 500},
        {"error": "out of memory"},
    ],
)
def test_an_error_within_a_stream_is_passed_on_as_it_is(upstream, proxy, error):
    upstream.say(Script((HEL, events(error))))
    server = proxy()
    assert streamed(server, upstream) == ("Hel", error)
    failed_row(server, "Hel")
    assert "out of memory" in server.rows()[0].error


def test_the_openai_client_raises_what_broke_a_stream(upstream, proxy):
    upstream.say(Script((HEL,), end="rst"))
    server = proxy()
    told = server.openai.chat.completions.create(model="far", messages=HI, stream=True)
    next(told)
    upstream.posts[0].heard.set()
    with pytest.raises(openai.APIError, match="broke off"):
        list(told)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(end="rst"), 502),
        (Script(end="fin"), 502),
        (Script((b": hello\n\n",), framing="chunked"), 502),
        (stream({"error": {"message": "bad", "code": 400}}), 400),
        (stream({"error": {"message": "bad", "code": "bad"}}), 502),
        (Script((b'error: {"message": "bad", "code": 500}\n\n',)), 502),
        (plain({"error": {"message": "bad"}}), 502),
        (plain(completion()), 502),
        (plain("<h1>Hello</h1>"), 502),
    ],
)
def test_a_stream_that_never_begins_has_a_status_of_its_own(upstream, proxy, script, status):
    upstream.say(script)
    server = proxy()
    assert server.chat(stream=True).status_code == status
    failed_row(server, "")


@pytest.mark.parametrize(
    "script",
    [
        plain("not JSON"),
        plain([1, 2]),
        plain({}),
        plain({"choices": []}),
        plain({"error": {"message": "bad"}}),
        Script((json.dumps(completion()).encode()[:-20],), content_type="application/json"),
        Script((json.dumps(completion()).encode(),), content_type="application/json", framing="chunked", end="fin"),
        Script((b"{",), content_type="application/json", end="rst"),
        Script((b'{"choices": "\xc3"}',), content_type="application/json"),
        stream(chunk("Hello"), chunk(finish="stop")),
        plain(completion(), headers={"Content-Encoding": "gzip"}),
    ],
)
def test_a_whole_answer_that_is_none_is_a_502(upstream, proxy, script):
    upstream.say(script)
    server = proxy()
    assert server.chat().status_code == 502
    failed_row(server, "")


@pytest.mark.parametrize("end", [{"finish_reason": None}, {}])
def test_a_whole_answer_that_does_not_say_how_it_ended_has_not_ended(upstream, proxy, end):
    message = {"role": "assistant", "content": "Hel"}
    upstream.say(plain(completion(choices=[{"index": 0, "message": message, **end}])))
    server = proxy()
    failed = server.chat()
    assert failed.status_code == 502
    assert failed.json()["error"]["message"] == "The upstream ended its answer without a finish_reason."
    failed_row(server, "Hel")


@pytest.mark.parametrize("stream_it", [False, True])
def test_silence_before_the_first_byte_is_a_504(upstream, proxy, stream_it):
    upstream.say(Script(end="hang"))
    server = proxy(timeout=0.5)
    failed = server.chat(stream=stream_it)
    assert (failed.status_code, failed.json()["error"]["message"]) == (504, "The upstream was silent for 0.5 s.")
    failed_row(server, "")
    assert upstream.posts[0].left.wait(20)


def test_silence_within_a_stream_ends_it_with_an_error(upstream, proxy):
    upstream.say(Script((HEL,), end="hang"))
    server = proxy(timeout=2.0)
    text, error = streamed(server, upstream)
    assert (text, error["error"]["message"]) == ("Hel", "The upstream was silent for 2 s.")
    failed_row(server, "Hel")
    assert upstream.posts[0].left.wait(20)


def test_an_upstream_that_only_keeps_the_connection_alive_is_not_silent(upstream, proxy):
    pings = [part for _ in range(8) for part in (b": ping\n\n", 0.3)]
    upstream.say(Script((HEL, *pings, FINISH)))
    server = proxy(timeout=2.0)
    assert server.http.post(CHAT, json={"messages": HI, "stream": True}).text.count('"stop"') == 1


@pytest.mark.parametrize(
    "script",
    [
        Script((HEL, FINISH), end="rst"),
        Script((HEL, FINISH), end="fin"),
        Script((HEL, FINISH), end="fin", framing="chunked"),
        Script((HEL, FINISH), end="hang"),
        Script((HEL, FINISH, b"data: [DONE]"), end="fin"),
        Script((HEL, FINISH, b"data: [DONE]\n\n"), end="hang"),
    ],
)
def test_an_answer_whose_every_choice_has_ended_is_whole_whatever_follows(upstream, proxy, script, monkeypatch):
    monkeypatch.setattr(upstream_module, "LAST_WORDS_SECONDS", 0.5)
    upstream.say(script)
    server = proxy()
    told = server.http.post(CHAT, json={"messages": HI, "stream": True}).text
    assert told.count('"finish_reason": "stop"') == 1
    assert "error" not in told
    (row,) = server.rows()
    assert (row.status, row.response_text, row.error) == ("finished", "Hello", None)


def test_of_two_choices_the_one_that_ended_is_finished_and_the_other_failed(upstream, proxy):
    chunks = [chunk("a"), chunk("b", index=1), chunk(finish="stop")]
    upstream.say(Script((events(*chunks, done=False),), end="fin"))
    server = proxy()
    told = server.http.post(CHAT, json={"messages": HI, "stream": True, "n": 2}).text
    assert told.count('"finish_reason": "stop"') == 1
    assert '"error"' in told
    assert [(row.response_text, row.status) for row in server.rows()] == [("a", "finished"), ("b", "failed")]


def test_an_answer_that_lacks_a_choice_is_not_whole(upstream, proxy):
    upstream.say(Script((events(chunk("a"), chunk(finish="stop"), done=False),), end="fin"))
    server = proxy()
    told = server.http.post(CHAT, json={"messages": HI, "stream": True, "n": 2}).text
    assert told.count('"error"') == 1
    assert [(row.response_text, row.status) for row in server.rows()] == [("a", "finished")]
    assert server.rows()[0].error


@pytest.mark.parametrize("framing", ["close", "chunked"])
def test_an_event_without_end_is_cut_off(upstream, proxy, monkeypatch, framing):
    monkeypatch.setattr(upstream_module, "MOST_EVENT_BYTES", 100_000)
    upstream.say(Script((HEL, b"data: ", *[b"x" * 50_000] * 10), framing=framing, end="hang"))
    server = proxy()
    text, error = streamed(server, upstream)
    assert (text, error["error"]["message"]) == ("Hel", "The upstream sent an event that is too long.")
    assert upstream.posts[0].left.wait(20)


def test_a_whole_answer_without_end_is_cut_off(upstream, proxy, monkeypatch):
    monkeypatch.setattr(upstream_module, "MOST_ANSWER_BYTES", 100_000)
    upstream.say(Script([b"x" * 50_000] * 10, content_type="application/json", end="hang"))
    server = proxy()
    assert server.chat().status_code == 502
    assert upstream.posts[0].left.wait(20)


# A client that leaves


def connect(server: AppServer, stream_it: bool) -> socket.socket:
    body = json.dumps({"messages": HI, "stream": stream_it}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize(
    ("stream_it", "script", "text"),
    [
        (True, Script((HEL,), end="hang"), "Hel"),
        (True, Script(end="hang"), ""),
        (False, Script(end="hang"), ""),
        (False, Script((b"{",), content_type="application/json", end="hang"), ""),
    ],
)
def test_when_the_client_leaves_so_do_we(upstream, proxy, stream_it, script, text):
    upstream.say(script)
    server = proxy()
    connection = connect(server, stream_it)
    eventually(lambda: upstream.posts, 20)
    if text:
        while b"Hel" not in connection.recv(1000):
            pass
    connection.close()
    assert upstream.posts[0].left.wait(20)
    (row,) = eventually(server.rows, 20)
    assert (row.status, row.finish_reason, row.response_text) == ("cancelled", None, text)
    eventually(lambda: server.service.running == 0)
    assert server.backend.engine()["running"] == []


def test_a_request_that_takes_too_long_is_given_up_here_and_there(upstream, proxy):
    upstream.say(Script((HEL,), end="hang"))
    server = proxy(request_timeout=3)
    text, error = streamed(server, upstream)
    assert text == "Hel"
    assert "did not end within 3 s" in error["error"]["message"]
    assert upstream.posts[0].left.wait(20)
    assert server.rows()[0].status == "cancelled"


def test_a_server_that_shuts_down_leaves_its_upstream(upstream, proxy):
    upstream.say(Script((HEL,), end="hang"))
    with ExitStack() as stack:
        backend = UpstreamBackend(UpstreamOptions(upstream.url, "far"))
        server = stack.enter_context(running_app(backend=backend, capture="off", upstream=upstream.url))  # type: ignore[arg-type]
        with server.http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response:
            lines = response.iter_lines()
            assert "Hel" in next(lines)
            stack.close()
            assert upstream.posts[0].left.wait(20)
