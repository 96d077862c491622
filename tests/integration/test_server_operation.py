"""What the operator sees: request ids, the log, CORS, HTTPS, a backend that comes and goes."""

from __future__ import annotations

import json
import logging
import re
import shutil
import ssl
import subprocess
import sys
from functools import partial

import httpx
import pytest

from serve import logs
from tests.fake_backend import Script
from tests.servers import CHAT, clean_environment, rows, running_process
from tests.servers import eventually as _eventually

eventually = partial(_eventually, seconds=30)

USER = {"role": "user", "content": "Hi"}
SECRET = "the quick brown fox"


# -- ids -------------------------------------------------------------------------------------------------------------


def test_every_answer_has_an_id_errors_and_streams_too(serve):
    server = serve(api_key="a-key")
    headers = {"Authorization": "Bearer a-key"}
    answers = [
        server.http.post(CHAT, json={"messages": [USER]}, headers=headers),
        server.http.post(CHAT, json={"messages": [USER], "stream": True}, headers=headers),
        server.http.post(CHAT, json={"messages": []}, headers=headers),
        server.http.post(CHAT, json={"messages": [{**USER, "content": '{"breaks_after": 0}'}]}, headers=headers),
        server.http.post(CHAT, json={"messages": [USER]}),
        server.http.get("/v1/nothing", headers=headers),
        server.http.get("/health"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 500, 401, 404, 200]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("req_[0-9a-f]{32}", name) for name in ids)


@pytest.mark.parametrize("name", ["a", "0f9d-4a:b/c+d=", "x" * 128, "trace_1.2@host"])
def test_a_clients_own_id_comes_back(serve, name):
    server = serve()
    assert server.http.get("/health", headers={"X-Request-Id": name}).headers["x-request-id"] == name


@pytest.mark.parametrize("name", ["", "x" * 129, "two words", "a\tb", "é".encode(), '"quoted"', "<b>", "a;b"])
def test_an_id_that_is_none_is_replaced(serve, name):
    told = serve().http.get("/health", headers={"X-Request-Id": name}).headers["x-request-id"]
    assert told.startswith("req_")


def test_a_bug_of_ours_has_an_id_and_opens_cors_too(serve, monkeypatch):
    server = serve(cors_origin="https://app.example")
    monkeypatch.setattr(type(server.service), "model_name", property(lambda _: 1 / 0))
    answer = server.http.get("/v1/models", headers={"Origin": "https://app.example"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


# -- the log ---------------------------------------------------------------------------------------------------------


def lines_of(server) -> list[dict]:
    return [json.loads(line) for line in list(server.output) if line.startswith("{")]


def requests_of(server) -> list[dict]:
    return [line for line in lines_of(server) if line["logger"] == "serve.logs"]


def test_every_request_is_one_line_of_json_without_what_was_said(serve_process):
    server = serve_process("--log-level", "debug", "--log-format", "json", "--api-key", "alice=the-key")
    headers = {"Authorization": "Bearer the-key", "X-Request-Id": "mine"}
    asked = {"messages": [{"role": "user", "content": SECRET}], "user": SECRET, "metadata": {"a": SECRET}}
    answer = server.http.post(f"{CHAT}?q={SECRET}", json=asked, headers=headers).json()
    headers["X-Request-Id"] = "streamed"
    server.http.post(CHAT, json={**asked, "stream": True, "n": 2}, headers=headers)
    headers["X-Request-Id"] = "refused"
    server.http.post(CHAT, json={**asked, "temperature": SECRET}, headers=headers)
    server.http.get("/v1/no%1b[31mthing", headers={"X-Request-Id": "unknown"})
    found = eventually(lambda: len(found := {one["request_id"]: one for one in requests_of(server)}) == 4 and found)
    line, streamed, refused, unknown = (found[name] for name in ("mine", "streamed", "refused", "unknown"))
    assert (line["client"], line["method"], line["path"], line["status"]) == ("alice", "POST", CHAT, 200)
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish"]) == (7, 10, ["stop"])
    assert 0 < line["first_byte_ms"] <= line["duration_ms"]
    assert line["queue_ms"] == 3.0
    assert line["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert [f"chatcmpl-{name}" for name in line["generations"]] == [answer["id"]]
    assert (streamed["finish"], streamed["completion_tokens"]) == (["stop", "stop"], 20)
    assert (refused["status"], "finish" in refused) == (400, False)
    assert (unknown["status"], unknown["client"]) == (401, None)
    text = "".join(server.output)
    assert '-H "Authorization: Bearer $KEY"' in text, "how to ask it"
    for secret in (SECRET, "quick", "the-key", "Hel", "bye", "\x1b"):
        assert secret not in text, "the log tells too much"


def test_a_client_that_left_is_logged_with_its_end(serve_process):
    server = serve_process("--log-level", "info", "--log-format", "json")
    body = {"messages": [{"role": "user", "content": '{"repeat": 3000, "pause": 0.02}'}], "stream": True}
    with server.http.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    (line,) = eventually(lambda: [one for one in requests_of(server) if one["path"] == CHAT])
    assert (line["status"], line["finish"]) == (200, ["cancelled"])
    assert 0 < line["completion_tokens"] < 3000
    assert line["request_id"] == response.headers["x-request-id"]


def test_a_failure_is_logged_with_its_requests_id(serve_process):
    server = serve_process("--log-format", "json")
    answer = server.http.post(
        CHAT,
        json={"messages": [{"role": "user", "content": '{"breaks_after": 1}'}]},
        headers={"X-Request-Id": "the-broken-one"},
    )
    assert answer.status_code == 500
    (line,) = eventually(lambda: [one for one in lines_of(server) if "exception" in one])
    assert line["request_id"] == "the-broken-one"
    assert "its own feet" in line["exception"]
    assert not requests_of(server), "a request's line is for level info"


def test_the_log_for_people_has_the_same_in_a_line(serve_process):
    server = serve_process("--log-level", "info")
    server.http.post(CHAT, json={"messages": [USER]}, headers={"X-Request-Id": "mine"})
    server.http.get("/%0a%0dfaked")
    text = eventually(lambda: "faked" in (text := "".join(server.output)) and text)
    pattern = r"^.* INFO serve.logs: POST /v1/chat/completions 200, [\d.]+ ms, 7 \+ 10 tokens, stop \[mine\]$"
    assert re.search(pattern, text, re.MULTILINE)
    assert re.search(r"INFO serve.logs: GET /%0A%0Dfaked 404", text)


def test_lines_outside_of_requests_are_json_too(capsys):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers.clear()
    try:
        logs.configure("debug", "json")
        logging.getLogger("anybody").warning("so %s", "it is")
        logging.getLogger("sse_starlette.sse").debug("chunk: %s", SECRET)
    finally:
        root.handlers[:], root.level = before
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["logger"], line["level"], line["message"]) == ("anybody", "warning", "so it is")
    assert "request_id" not in line


# -- CORS ------------------------------------------------------------------------------------------------------------

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_cors_is_off_by_default(serve):
    server = serve()
    asked = {"Origin": "https://app.example"}
    assert server.http.options(CHAT, headers={**asked, **PREFLIGHT}).status_code == 405
    answer = server.http.post(CHAT, json={"messages": [USER]}, headers=asked)
    assert "access-control-allow-origin" not in answer.headers


def test_only_the_origins_that_were_named_may_ask(serve):
    server = serve(cors_origin="https://a.example,https://b.example", api_key="a-key")
    for origin in ("https://a.example", "https://b.example"):
        answer = server.http.options(CHAT, headers={"Origin": origin, **PREFLIGHT})
        assert answer.status_code == 200, "a browser asks without the key first"
        assert answer.headers["access-control-allow-origin"] == origin
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        refused = server.http.post(CHAT, json={"messages": [USER]}, headers={"Origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()
    other = server.http.options(CHAT, headers={"Origin": "https://evil.example", **PREFLIGHT})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


# -- HTTPS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for this machine, its key, and the key of another one."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    for name in ("one", "other"):
        subprocess.run(
            [*make, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"], check=True, capture_output=True
        )
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", folder / "one.key"]
    subprocess.run([*encrypt, "-out", folder / "encrypted.key"], check=True, capture_output=True)
    return folder


def test_https_is_served_with_the_given_files(certificate, tmp_path):
    command = [sys.executable, "-m", "tests.fake_backend", "--tls-cert", certificate / "one.pem"]
    with running_process([*map(str, command), "--tls-key", str(certificate / "one.key")], tmp_path / "c.db") as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate / "one.pem")
        with httpx.Client(base_url=server.url, verify=trusting) as client:
            assert client.post(CHAT, json={"messages": [USER]}).status_code == 200
            assert "data: [DONE]" in client.post(CHAT, json={"messages": [USER], "stream": True}).text
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")


@pytest.mark.parametrize(("chain", "key"), [("one.pem", "other.key"), ("one.pem", "encrypted.key"), ("one.pem", "no")])
def test_a_certificate_that_cannot_be_used_is_one_line(certificate, chain, key):
    command = [sys.executable, "-m", "tests.fake_backend", "--port", "0", "--capture", "off"]
    done = subprocess.run(
        [*command, "--tls-cert", str(certificate / chain), "--tls-key", str(certificate / key)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2, done
    assert re.fullmatch(r"serve: [^\n]+\n", done.stderr), done.stderr
    assert key in done.stderr


# -- a backend that comes and goes -----------------------------------------------------------------------------------


def test_a_backend_that_may_come_back_is_no_reason_to_end_the_process(serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(server.backend, "failed", lambda: False)
    server.backend.alive = False
    refused = server.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_not_ready"
    assert int(refused.headers["retry-after"]) > 0
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/ready").json()["status"] == "recovering"
    server.backend.alive = True
    assert server.chat().status_code == 200


CRASHING = """
import os
from backend.engine.scheduler import Scheduler
from serve import cli
reserve = Scheduler.reserve

def broken(self):
    if os.path.exists(FLAG) and self.decoding:
        os.remove(FLAG)
        raise LookupError("lost count")
    reserve(self)

Scheduler.reserve = broken
cli.main()
"""


def test_an_engine_that_crashes_is_restarted_once(small_checkpoint, tmp_path):
    flag, capture = tmp_path / "flag", tmp_path / "capture.db"
    code = CRASHING.replace("FLAG", repr(str(flag)))
    command = [sys.executable, "-c", code, "--model", str(small_checkpoint), "--threads", "1", "--log-level", "error"]
    body = {"messages": [USER], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with running_process(command, capture) as server:
        before = server.http.post(CHAT, json=body).json()["choices"][0]["message"]
        flag.touch()
        with server.http.stream("POST", CHAT, json={**body, "stream": True}) as response:
            text = response.read().decode()
        assert '"code": "generation_failed"' in text
        assert "lost count" in text
        assert '"finish_reason":"' not in text
        assert text.endswith("data: [DONE]\n\n")
        assert "Traceback" not in text
        eventually(lambda: server.http.get("/ready").status_code == 200)
        assert server.metric("engine_restarts_total") == 1
        assert server.http.post(CHAT, json=body).json()["choices"][0]["message"] == before
        flag.touch()
        answer = server.http.post(CHAT, json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "generation_failed"
        eventually(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/ready").json()["status"] == "failed"
        refused = server.http.post(CHAT, json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_failed"
        assert server.metric("engine_restarts_total") == 1
        assert server.stop() == 0
    assert [row.status for row in rows(capture)] == ["finished", "failed", "finished", "failed"]
    assert {row.error for row in rows(capture) if row.error} == {"the engine failed: lost count"}


@pytest.fixture(scope="module")
def small_checkpoint():
    from tests.checkpoints import random_small

    return random_small().directory


def test_a_slow_answer_is_not_logged_before_it_has_ended(serve, caplog):
    server = serve(Script(pause=0.1))
    with caplog.at_level(logging.INFO, "serve.logs"):
        server.chat(stream=True)
        (record,) = eventually(lambda: [r for r in caplog.records if r.name == "serve.logs" and CHAT in r.getMessage()])
    told = record.request
    assert told["duration_ms"] > told["first_byte_ms"] + 200
