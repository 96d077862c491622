"""/v1/drafters: what it tells, loads and unloads; another drafter becomes the default while serving, and back again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fake_backend import FakeBackend, fingerprint
from tests.servers import CHAT, Server, eventually

DRAFTERS, ACTIVE = "/v1/drafters", "/v1/drafters/active"


def two() -> FakeBackend:
    return FakeBackend(drafters=("mtp", "prediction"))


def promote(server: Server, drafter: str, **headers: str) -> httpx.Response:
    return server.http.put(ACTIVE, json={"drafter": drafter}, headers=headers)


def canary(server: Server, drafter: str, share: float) -> httpx.Response:
    return server.http.put(ACTIVE, json={"drafter": drafter, "canary": share})


def roll_back(server: Server, **headers: str) -> httpx.Response:
    return server.http.delete(ACTIVE, headers=headers)


def load(server: Server, path: str, **more: Any) -> httpx.Response:
    return server.http.post(DRAFTERS, json={"path": path, **more})


def states(server: Server) -> dict[str, str]:
    return {one["name"]: one["state"] for one in server.http.get(DRAFTERS).json()["drafters"]}


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_the_next_request_uses_what_was_promoted_and_its_row_says_so(serve):
    server = serve(backend=two())
    for drafter in ("prediction", "none", "mtp"):
        told = promote(server, drafter).json()
        assert told["active"] == told["history"][-1]["drafter"] == drafter
        assert {one["name"]: one["fingerprint"] for one in told["drafters"]} == {
            name: fingerprint(name) for name in ("mtp", "prediction", "none")
        }
        assert server.chat().status_code == 200
        row = server.rows()[-1]
        assert (row.drafter, row.drafter_fingerprint) == (drafter, fingerprint(drafter))
        version = server.http.get("/version").json()
        assert (version["drafter"], version["fingerprints"]["drafter"]) == (drafter, fingerprint(drafter))
        assert server.http.get("/v1/engine").json()["default_drafters"] == told["history"]
    assert len({row.weights_fingerprint + row.build for row in server.rows()}) == 1


def test_each_roll_back_takes_one_promotion_back_and_the_first_default_stays(serve):
    server = serve(backend=two())
    for drafter in ("prediction", "prediction", "none"):  # the second changes nothing
        promote(server, drafter)
    seen = [roll_back(server).json()["active"] for _ in range(2)]
    assert seen == ["prediction", "mtp"]
    assert "nothing to roll back" in refused(roll_back(server), 400)["message"]
    assert server.http.get("/version").json()["drafter"] == "mtp"


def test_history_tells_since_when(serve):
    server = serve(backend=two())
    history = promote(server, "none").json()["history"]
    assert [one["drafter"] for one in history] == ["mtp", "none"]
    assert history[0]["since"] < history[1]["since"]
    (only,) = roll_back(server).json()["history"]
    assert only["drafter"] == "mtp"
    assert only["since"] > history[1]["since"]


def test_a_running_stream_keeps_its_drafter_and_its_text(serve):
    server = serve(backend=two())
    content = '{"repeat": 20, "pause": 0.02}'
    asked = {"messages": [{"role": "user", "content": content}], "stream": True, "return_steps": True}
    said, drafters = "", set()
    with server.http.stream("POST", CHAT, json=asked) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            if said and len(said) < 40:
                assert promote(server, "prediction").status_code == 200
            said += choice["delta"].get("content") or ""
            drafters |= {choice["step"]["drafter"]} if choice.get("step") else set()
    assert drafters == {"mtp"}
    server.chat(content)
    eventually(lambda: len(server.rows()) == 2)
    before, after = server.rows()
    assert (before.drafter, after.drafter) == ("mtp", "prediction")
    assert before.response_text == after.response_text == said


def test_requests_that_name_a_drafter_get_it_whatever_the_default(serve):
    server = serve(backend=two(), allow_drafter_choice=True)
    promote(server, "none")
    server.chat(drafter="mtp")
    assert server.rows()[-1].drafter == "mtp"


def test_promotion_lets_no_request_choose(serve):
    server = serve(backend=two())
    promote(server, "prediction")
    assert refused(server.chat(drafter="mtp"), 403)["code"] == "drafter_choice_not_allowed"


def test_the_default_comes_first_wherever_drafters_are_told(serve):
    server = serve(backend=two())
    promote(server, "prediction")
    lines = server.http.get("/metrics").text.splitlines()
    drafts = [line for line in lines if line.startswith("draftloop_spec_decode_num_drafts_total{")]
    assert ['"prediction"' in line for line in drafts] == [True, False]


@pytest.mark.parametrize(
    ("body", "code"), [({"drafter": "other"}, "invalid_value"), ({}, "missing_required_parameter")]
)
def test_a_drafter_that_is_not_there_is_refused_by_name(serve, body, code):
    server = serve(backend=two())
    error = refused(server.http.put(ACTIVE, json=body), 400)
    assert (error["param"], error["code"]) == ("drafter", code)
    assert server.http.get("/version").json()["drafter"] == "mtp"


def test_before_the_model_is_loaded_there_is_nothing_to_promote(serve):
    server = serve(backend=FakeBackend(start_delay=1.0), ready=False)
    for response in (promote(server, "none"), roll_back(server), load(server, "new"), server.http.get(DRAFTERS)):
        assert refused(response, 503)


def test_where_there_is_an_operators_key_no_other_will_do(serve):
    server = serve(backend=two(), api_key="alice=first-key", admin_key="root=the-operators")
    plain, admin = {"Authorization": "Bearer first-key"}, {"Authorization": "Bearer the-operators"}
    for method, path, body in (
        ("PUT", ACTIVE, {"drafter": "none"}),
        ("DELETE", ACTIVE, None),
        ("POST", DRAFTERS, {"path": "new"}),
        ("GET", DRAFTERS, None),
        ("DELETE", f"{DRAFTERS}/new", None),
    ):
        assert refused(server.http.request(method, path, json=body), 401)["code"] == "invalid_api_key"
        assert refused(server.http.request(method, path, json=body, headers=plain), 403)["code"] == "admin_key_required"
        assert server.http.request(method, path, json=body, headers=admin).status_code == 200 + (method == "POST")


def test_without_one_only_this_machine_may(serve):
    server = serve(backend=two())
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"X-Forwarded-For": "127.0.0.1"}):
        assert refused(promote(server, "none", **headers), 403)["code"] == "local_only"
        assert refused(roll_back(server, **headers), 403)["code"] == "local_only"
        assert refused(server.http.get(DRAFTERS, headers=headers), 403)["code"] == "local_only"
    for method, path in (("PUT", ACTIVE), ("POST", DRAFTERS)):
        body = b'{"drafter":"none","path":"new"}'
        assert refused(server.http.request(method, path, content=body, headers={"Content-Type": "text/plain"}), 415)
    assert server.http.get("/version").json()["drafter"] == "mtp"


def test_every_change_leaves_one_line_in_the_log(serve, caplog):
    server = serve(backend=two(), admin_key="root=the-operators")
    admin = {"Authorization": "Bearer the-operators"}
    for drafter in ("none", "none"):
        promote(server, drafter, **admin)
    roll_back(server, **admin)
    server.http.post(DRAFTERS, json={"path": "a/new"}, headers=admin)
    server.http.put(ACTIVE, json={"drafter": "new", "canary": 0.25}, headers=admin)
    roll_back(server, **admin)
    server.http.delete(f"{DRAFTERS}/new", headers=admin)
    assert [record.getMessage() for record in caplog.records if record.name == "serve.api.drafters"] == [
        "drafter promoted by root: none is the default, it was mtp",
        "drafter rolled back by root: mtp is the default, it was none",
        "drafter new loaded by root from a/new",
        "canary by root: new has 0.25 of requests",
        "canary ended by root: new",
        "drafter new unloaded by root",
    ]


def test_a_loaded_drafter_has_no_requests_until_it_is_promoted(serve):
    server = serve(backend=two())
    response = load(server, "runs/new", min_acceptance=0.25)
    assert response.status_code == 201
    told = response.json()
    assert (told["name"], told["state"]) == ("new", "loaded")
    assert told["trial"]["min_acceptance"] == 0.25
    server.chat()
    assert states(server) == {"mtp": "active", "prediction": "loaded", "new": "loaded", "none": "loaded"}
    promote(server, "new")
    server.chat()
    assert [row.drafter for row in server.rows()] == ["mtp", "new"]
    assert states(server) == {"mtp": "previous", "prediction": "loaded", "new": "active", "none": "loaded"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": 1}, "path"),
        ({"path": "x", "name": ""}, "name"),
        ({"path": "x", "min_acceptance": 1.5}, "min_acceptance"),
        ({"path": "x", "min_acceptance": "1"}, "min_acceptance"),
        ({"path": "x", "name": "mtp"}, "name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(serve, body, param):
    server = serve(backend=two())
    assert refused(server.http.post(DRAFTERS, json=body), 400)["param"] == param
    assert states(server) == {"mtp": "active", "prediction": "loaded", "none": "loaded"}


def test_a_canary_has_its_share_of_the_requests_by_their_ids(serve):
    server = serve(backend=two())
    told = canary(server, "prediction", 0.5).json()
    assert (told["active"], told["canary"]) == ("mtp", {"drafter": "prediction", "share": 0.5})
    assert server.metric("drafter_canary_share") == 0.5
    assert server.metric("drafter_state", drafter="prediction", state="canary") == 1
    for _ in range(24):
        server.chat()
    rows = server.rows()
    assert {row.drafter for row in rows} == {"mtp", "prediction"}
    for row in rows:
        first = int.from_bytes(hashlib.sha256(row.id.encode()).digest()[:8], "big")
        assert (row.drafter == "prediction") is (first / 2**64 < 0.5)
        assert row.drafter_fingerprint == fingerprint(row.drafter)
    told = roll_back(server).json()
    assert (told["active"], told["canary"], len(told["history"])) == ("mtp", None, 1)


def test_a_promotion_ends_the_canary(serve):
    server = serve(backend=two())
    canary(server, "prediction", 0.1)
    told = promote(server, "prediction").json()
    assert (told["active"], told["previous"], told["canary"]) == ("prediction", "mtp", None)


@pytest.mark.parametrize("share", [0, 1.01, -0.5, "half"])
def test_a_canarys_share_is_a_share(serve, share):
    server = serve(backend=two())
    assert refused(canary(server, "prediction", share), 400)["param"] == "canary"
    assert server.http.get(DRAFTERS).json()["canary"] is None


def test_the_default_is_no_canary_beside_itself(serve):
    assert refused(canary(serve(backend=two()), "mtp", 0.5), 400)["param"] == "drafter"


def test_what_is_in_use_stays_and_what_is_not_there_cannot_go(serve):
    server = serve(backend=two())
    canary(server, "prediction", 0.5)
    for name in ("mtp", "prediction"):
        assert refused(server.http.delete(f"{DRAFTERS}/{name}"), 400)["code"] == "drafter_in_use"
    assert refused(server.http.delete(f"{DRAFTERS}/other"), 404)["code"] == "drafter_not_found"
    roll_back(server)
    assert refused(server.http.delete(f"{DRAFTERS}/prediction"), 400)["code"] == "drafter_of_start"
    load(server, "new")
    told = server.http.delete(f"{DRAFTERS}/new").json()
    assert [one["name"] for one in told["drafters"]] == ["mtp", "prediction", "none"]


def test_metrics_tell_each_drafters_own_steps(serve):
    server = serve(backend=two())
    server.chat()
    (steps,) = next(one for one in server.http.get(DRAFTERS).json()["drafters"] if one["name"] == "mtp")["steps"]
    assert steps["steps"] > 0
    for name in ("steps", "step_sequences", "step_accepted_tokens", "step_seconds"):
        field = {"step_sequences": "sequences", "step_accepted_tokens": "accepted", "step_seconds": "seconds"}
        found = server.metric(f"drafter_{name}_total", drafter="mtp", batch="1")
        assert found == pytest.approx(steps[field.get(name, name)])


def test_who_waits_for_a_drafter_is_told_that_the_server_is_to_end(serve):
    begun, ended = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        async def load_drafter(self, *given: Any) -> Any:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

    server = serve(backend=Slow())
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, server, "new")
        assert begun.wait(10)
        ending = server.service.drain(0)
        asyncio.run_coroutine_threadsafe(ending, server.service._loading.get_loop()).result(10)
        assert refused(loading.result(10), 503)["code"] == "shutting_down"
    assert ended.wait(10)
    assert refused(load(server, "new"), 503)["code"] == "shutting_down"


def test_an_upstreams_drafters_are_its_own(serve):
    from backend.upstream.backend import UpstreamBackend, UpstreamOptions

    server = serve(backend=UpstreamBackend(UpstreamOptions("http://127.0.0.1:9")), ready=False)
    eventually(lambda: server.http.get("/version").status_code == 200)
    unload = server.http.delete(f"{DRAFTERS}/mtp")
    for response in (
        promote(server, "none"),
        roll_back(server),
        load(server, "new"),
        server.http.get(DRAFTERS),
        unload,
    ):
        assert "no drafters of its own" in refused(response, 400)["message"]


def test_further_drafters_can_be_promoted_by_flags_alone(serve_process):
    server = serve_process("--further-drafters", "prediction")
    assert promote(server, "prediction").json()["active"] == "prediction"
