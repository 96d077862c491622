"""POST /v1/engine/drafters/…: another drafter becomes the default while serving, and that is taken back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fake_backend import FakeBackend, fingerprint
from tests.servers import CHAT, Server, eventually

PROMOTE, ROLL_BACK = "/v1/engine/drafters/promote", "/v1/engine/drafters/rollback"


def two() -> FakeBackend:
    return FakeBackend(drafters=("mtp", "prediction"))


def promote(server: Server, drafter: str, **headers: str) -> httpx.Response:
    return server.http.post(PROMOTE, json={"drafter": drafter}, headers=headers)


def roll_back(server: Server, **headers: str) -> httpx.Response:
    return server.http.post(ROLL_BACK, json={}, headers=headers)


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_the_next_request_uses_what_was_promoted_and_its_row_says_so(serve):
    server = serve(backend=two())
    for drafter in ("prediction", "none", "mtp"):
        told = promote(server, drafter).json()
        assert told["drafter"] == told["default_drafters"][-1]["drafter"] == drafter
        assert told["drafters"] == {name: fingerprint(name) for name in ("mtp", "prediction")}
        assert server.chat().status_code == 200
        row = server.rows()[-1]
        assert (row.drafter, row.drafter_fingerprint) == (drafter, fingerprint(drafter))
        version = server.http.get("/version").json()
        assert (version["drafter"], version["fingerprints"]["drafter"]) == (drafter, fingerprint(drafter))
        assert server.http.get("/v1/engine").json()["default_drafters"] == told["default_drafters"]
    assert len({row.weights_fingerprint + row.build for row in server.rows()}) == 1


def test_each_roll_back_takes_one_promotion_back_and_the_first_default_stays(serve):
    server = serve(backend=two())
    for drafter in ("prediction", "prediction", "none"):  # the second changes nothing
        promote(server, drafter)
    seen = [roll_back(server).json()["drafter"] for _ in range(2)]
    assert seen == ["prediction", "mtp"]
    assert "nothing to roll back" in refused(roll_back(server), 400)["message"]
    assert server.http.get("/version").json()["drafter"] == "mtp"


def test_history_tells_since_when(serve):
    server = serve(backend=two())
    history = promote(server, "none").json()["default_drafters"]
    assert [one["drafter"] for one in history] == ["mtp", "none"]
    assert history[0]["since"] < history[1]["since"]
    (only,) = roll_back(server).json()["default_drafters"]
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
    error = refused(server.http.post(PROMOTE, json=body), 400)
    assert (error["param"], error["code"]) == ("drafter", code)
    assert server.http.get("/version").json()["drafter"] == "mtp"


def test_before_the_model_is_loaded_there_is_nothing_to_promote(serve):
    server = serve(backend=FakeBackend(start_delay=1.0), ready=False)
    assert refused(promote(server, "none"), 503)
    assert refused(roll_back(server), 503)


def test_where_there_is_an_operators_key_no_other_will_do(serve):
    server = serve(backend=two(), api_key="alice=first-key", admin_key="root=the-operators")
    plain, admin = {"Authorization": "Bearer first-key"}, {"Authorization": "Bearer the-operators"}
    for ask in (lambda **headers: promote(server, "none", **headers), lambda **headers: roll_back(server, **headers)):
        assert refused(ask(), 401)["code"] == "invalid_api_key"
        assert refused(ask(**plain), 403)["code"] == "admin_key_required"
        assert ask(**admin).status_code == 200


def test_without_one_only_this_machine_may(serve):
    server = serve(backend=two())
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"X-Forwarded-For": "127.0.0.1"}):
        assert refused(promote(server, "none", **headers), 403)["code"] == "local_only"
        assert refused(roll_back(server, **headers), 403)["code"] == "local_only"
    simple = server.http.post(PROMOTE, content=b'{"drafter":"none"}', headers={"Content-Type": "text/plain"})
    assert refused(simple, 415)
    assert server.http.get("/version").json()["drafter"] == "mtp"


def test_every_change_leaves_one_line_in_the_log(serve, caplog):
    server = serve(backend=two(), admin_key="root=the-operators")
    admin = {"Authorization": "Bearer the-operators"}
    for drafter in ("none", "none"):
        promote(server, drafter, **admin)
    roll_back(server, **admin)
    assert [record.getMessage() for record in caplog.records if record.name == "serve.api.admin"] == [
        "drafter promoted by root: none is the default, it was mtp",
        "drafter rolled back by root: mtp is the default, it was none",
    ]


def test_an_upstreams_drafters_are_its_own(serve):
    from backend.upstream.backend import UpstreamBackend, UpstreamOptions

    server = serve(backend=UpstreamBackend(UpstreamOptions("http://127.0.0.1:9")), ready=False)
    eventually(lambda: server.http.get("/version").status_code == 200)
    assert "no drafters of its own" in refused(promote(server, "none"), 400)["message"]
    assert "no drafters of its own" in refused(roll_back(server), 400)["message"]


def test_further_drafters_can_be_promoted_by_flags_alone(serve_process):
    server = serve_process("--further-drafters", "prediction")
    assert promote(server, "prediction").json()["drafter"] == "prediction"
