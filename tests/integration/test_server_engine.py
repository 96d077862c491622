"""GET /v1/engine: what the engine is doing, and who may ask."""

from __future__ import annotations

import pytest

from tests.fake_backend import SLOTS, FakeBackend, Script
from tests.servers import CHAT, eventually

ENGINE = "/v1/engine"


def refused(response) -> str:
    assert response.status_code == 403, response.text
    assert response.json()["error"]["code"] == "local_only"
    message: str = response.json()["error"]["message"]
    return message


def test_it_tells_what_runs_and_how_the_service_is(serve_process):
    server = serve_process()
    told = server.http.get(ENGINE).json()
    roles = {"drafters", "drafter_states", "default_drafters", "canary"}
    assert told.keys() == {"state", "running", "waiting", "draft_tokens", *roles}
    assert (told["state"], told["running"], told["waiting"], told["draft_tokens"]) == ("ready", [], [], SLOTS)
    content = '{"repeat": 3000, "pause": 0.02}'  # a minute, which it is not given
    with server.http.stream(
        "POST", CHAT, json={"messages": [{"role": "user", "content": content}], "stream": True}
    ) as response:
        line = next(line for line in response.iter_lines() if line)
        (running,) = eventually(lambda: server.http.get(ENGINE).json()["running"])
        assert f"chatcmpl-{running}" in line
    eventually(lambda: server.http.get(ENGINE).json()["running"] == [])


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000"])
def test_this_machine_is_known_by_its_own_names(serve, host):
    assert serve().http.get(ENGINE, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "0.0.0.0:8000", "10.0.0.1", "[::1", "", "::1:5"],
)
def test_a_page_whose_name_was_bound_to_this_address_learns_nothing(serve, host):
    assert "loopback" in refused(serve().http.get(ENGINE, headers={"Host": host}))


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"]
)
def test_another_machines_client_is_refused_even_behind_a_proxy(serve, header):
    # A proxy on this machine has its address, and may have rewritten the Host; nothing that it says is believed.
    assert "own clients" in refused(serve().http.get(ENGINE, headers={header: "127.0.0.1"}))


def test_the_rest_of_the_api_does_not_mind_the_host(serve):
    server = serve()
    for path in ("/v1/models", "/version", "/metrics", "/health"):
        assert server.http.get(path, headers={"Host": "some.name"}).status_code == 200


def test_before_the_model_is_loaded_there_is_nothing_to_tell(serve):
    server = serve(backend=FakeBackend(start_delay=1.0), ready=False)
    assert server.http.get(ENGINE).status_code == 503
    refused(server.http.get(ENGINE, headers={"Host": "evil.example"}))


def test_a_failed_engine_still_tells_what_it_knows(serve):
    server = serve(Script())
    server.backend.alive = False
    assert server.http.get(ENGINE).json()["state"] == "failed"


def test_it_can_only_be_read(serve):
    assert serve().http.post(ENGINE, json={}).status_code == 405
