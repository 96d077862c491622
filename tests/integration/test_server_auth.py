"""Who may ask for what: keys, their names in the rows, the operator, pages of other sites."""

from __future__ import annotations

import asyncio
import base64

import httpx
import openai
import pytest
from fastapi import Depends, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from serve import errors
from serve.auth import Authentication, Keyring, operator
from serve.settings import SettingsError, load
from tests.servers import CHAT, running_app

ENGINE = "/v1/engine"
KEYS = "alice=first-key,c2Vjb25kIGtleQ=="
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with a named key, a bare one that looks like base64, and the operator's."""
    capture = tmp_path_factory.mktemp("auth") / "capture.db"
    with running_app(capture=capture, api_key=KEYS, admin_key="root=the-operators") as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error(response, status: int) -> dict:
    assert response.status_code == status, response.text
    told = response.json()["error"]
    assert sorted(told) == ["code", "message", "param", "type"]
    return told


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"Authorization": "Bearer"},
        bearer("alice"),
        bearer("alice=first-key"),
        bearer("first key"),
        bearer("first-ke"),
        bearer("key2"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"x-api-key": "wrong"},
        {"Cookie": "first-key"},
    ],
)
def test_without_a_right_key_nothing_is_answered(guarded, headers):
    before = len(guarded.backend.requests)
    for method, path in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/v1/nothing")]:
        response = guarded.http.request(method, path, json=BODY if method == "POST" else None, headers=headers)
        told = error(response, 401)
        assert (told["code"], told["type"]) == ("invalid_api_key", "invalid_request_error")
        assert response.headers["www-authenticate"] == "Bearer"
        assert "first-key" not in response.text
    assert len(guarded.backend.requests) == before


@pytest.mark.parametrize(
    "headers",
    [
        bearer("first-key"),
        {"Authorization": "bearer first-key"},
        {"x-api-key": "first-key"},
        {"Authorization": "Bearer none", "x-api-key": "first-key"},
        bearer("c2Vjb25kIGtleQ=="),
        bearer("the-operators"),
    ],
)
def test_a_right_key_opens_the_api(guarded, headers):
    assert guarded.http.post(CHAT, json=BODY, headers=headers).status_code == 200
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200


def test_the_openai_client_tells_a_wrong_key_for_what_it_is(guarded):
    with pytest.raises(openai.AuthenticationError) as caught:
        guarded.openai.models.list()
    assert caught.value.code == "invalid_api_key"
    assert guarded.openai.with_options(api_key="first-key").models.list().data


def test_every_route_is_guarded_but_those_that_watch_over_the_process(guarded):
    from serve.app import create_app

    app = create_app(load(capture="off"), guarded.backend, None)
    asked = {
        (path, method.upper())
        for path, methods in _routes(app).items()
        for method in methods
        if method.upper() not in ("HEAD", "OPTIONS")
    }
    assert len(asked) > 8
    opened = {
        path
        for path, method in asked
        if guarded.http.request(method, path.replace("{name:path}", "x"), json={}).status_code != 401
    }
    assert opened == {"/health", "/ready", "/"}  # the page itself tells no figure


def _routes(app) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}

    def walk(routes) -> None:
        for route in routes:
            if hasattr(route, "methods"):
                found.setdefault(route.path, set()).update(route.methods)
            walk(getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", []))

    walk(app.routes)
    return found


def test_the_rows_carry_the_keys_name_and_never_the_key(guarded):
    for headers in (bearer("first-key"), bearer("c2Vjb25kIGtleQ=="), bearer("the-operators")):
        assert guarded.http.post(CHAT, json={**BODY, "user": "somebody"}, headers=headers).status_code == 200
    rows = guarded.rows()[-3:]
    assert [row.client for row in rows] == ["alice", "key2", "root"]
    assert {row.request["user"] for row in rows} == {"somebody"}
    for secret in (b"first-key", b"c2Vjb25k", b"the-operators"):
        for file in guarded.capture.parent.iterdir():
            assert secret not in file.read_bytes()


def test_no_two_keys_share_a_prefix_cache_whatever_salt_they_send(guarded):
    salts = []
    for key in ("first-key", "c2Vjb25kIGtleQ=="):
        for salt in ({}, {"cache_salt": "s"}, {"cache_salt": "alice/s"}):
            assert guarded.http.post(CHAT, json={**BODY, **salt}, headers=bearer(key)).status_code == 200
            salts.append(guarded.backend.requests[-1].cache_salt)
    assert all(salts)
    assert len(set(salts)) == 6


def test_one_client_shares_its_own_prefix_cache(guarded):
    for headers in (bearer("first-key"), {"x-api-key": "first-key"}):
        guarded.http.post(CHAT, json=BODY, headers=headers)
    one, other = guarded.backend.requests[-2:]
    assert one.cache_salt == other.cache_salt


def test_without_keys_a_clients_own_salt_stands(serve):
    server = serve()
    server.chat(cache_salt="mine")
    server.http.post(CHAT, json=BODY, headers=bearer("whatever"))
    assert [request.cache_salt for request in server.backend.requests] == ["mine", None]


def test_the_figures_need_a_key_unless_told_otherwise(guarded, serve):
    open_figures = serve(api_key=KEYS, metrics_auth="off", capture="off")
    for path in ("/metrics", "/v1/live"):
        assert _status(guarded, path) == 401
        assert _status(guarded, path, **bearer("first-key")) == 200
        assert _status(open_figures, path) == 200
    assert open_figures.http.get("/v1/models").status_code == 401


def _status(server, path: str, **headers: str) -> int:
    with server.http.stream("GET", path, headers=headers) as response:  # one of them never ends
        return response.status_code


@given(st.binary(min_size=1, max_size=40), st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))
def test_a_bare_key_in_base64_is_never_taken_for_a_name(secret, encode):
    key = encode(secret).decode()
    found = Keyring.of(load(api_key=key)).find(Headers({"x-api-key": key}))
    assert found is not None
    assert found.name == "key1"


def test_keys_are_read_from_a_file_too(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nbob=of-bob\n  bare-one\n")
    server = serve(api_key="first", api_key_file=file)
    for key in ("first", "of-bob", "bare-one"):
        assert server.http.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200
    assert [row.client for row in server.rows()] == ["key1", "bob", "key3"]
    assert server.http.get("/v1/models", headers=bearer("# ours")).status_code == 401


def test_a_key_can_be_replaced_without_a_gap(serve):
    server = serve(api_key="alice=old,alice=new")
    for key in ("old", "new"):
        server.http.post(CHAT, json=BODY, headers=bearer(key))
    assert [row.client for row in server.rows()] == ["alice", "alice"]
    old, new = server.backend.requests
    assert old.cache_salt == new.cache_salt


@pytest.mark.parametrize("content", ["", "# nothing\n", "two words\n", "k\x00y\n", "schlüssel\n"])
def test_a_useless_key_file_is_refused_without_telling_what_is_in_it(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        Keyring.of(load(api_key_file=str(file)))
    assert "--api-key-file" in str(caught.value)
    assert "words" not in str(caught.value)


def test_an_unreadable_key_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"--api-key-file.*No such file"):
        Keyring.of(load(api_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize("given", [{"api_key": "a=same,b=same"}, {"api_key": "same", "admin_key": "same"}])
def test_one_key_of_two_names_is_refused(given):
    with pytest.raises(SettingsError) as caught:
        Keyring.of(load(**given))
    assert "given twice" in str(caught.value)
    assert "same" not in str(caught.value)


# -- the operator ----------------------------------------------------------------------------------------------------


def test_an_admin_key_is_apart_from_the_others(guarded):
    assert guarded.http.get(ENGINE, headers=bearer("the-operators")).status_code == 200
    assert guarded.http.get(ENGINE, headers={"Host": "any.name", **bearer("the-operators")}).status_code == 200
    assert error(guarded.http.get(ENGINE), 401)["code"] == "invalid_api_key"
    assert error(guarded.http.get(ENGINE, headers=bearer("wrong")), 401)["code"] == "invalid_api_key"
    assert error(guarded.http.get(ENGINE, headers=bearer("first-key")), 403)["code"] == "admin_key_required"


def test_where_there_is_only_an_admin_key_the_api_is_open(serve):
    server = serve(admin_key="root-key")
    assert server.chat().status_code == 200
    assert server.http.get(ENGINE).status_code == 401
    assert server.http.get(ENGINE, headers=bearer("root-key")).status_code == 200


def test_without_an_admin_key_api_keys_change_nothing_for_the_operator(serve):
    server = serve(api_key="some-key")
    assert server.http.get(ENGINE).status_code == 200
    for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "127.0.0.1"}):
        assert server.http.get(ENGINE, headers=headers | bearer("some-key")).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example"])
def test_a_page_of_another_site_learns_nothing_even_where_cors_lets_it_ask(serve, origin):
    server = serve(cors_origin="*")
    assert error(server.http.get(ENGINE, headers={"Origin": origin}), 403)["code"] == "local_only"


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8000"])
def test_a_page_of_this_machine_may_ask(serve, origin):
    assert serve().http.get(ENGINE, headers={"Origin": origin}).status_code == 200


def ask_as(address: str, **headers: str) -> int:
    """The status of a POST that only the operator may send, from that address."""
    app = FastAPI(dependencies=[Depends(operator)])
    errors.install(app)
    app.add_middleware(Authentication, keyring=Keyring([]), figures_are_open=False)

    @app.post(f"{ENGINE}/anything")
    async def anything() -> dict[str, str]:
        return {}

    async def ask() -> int:
        transport = httpx.ASGITransport(app, client=(address, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.post(f"{ENGINE}/anything", content=b"{}", headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        # What a page of any site may send without asking first.
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
        ("", 415),
    ],
)
def test_what_the_operator_posts_must_be_json(content_type, status):
    assert ask_as("127.0.0.1", **{"Content-Type": content_type}) == status


@pytest.mark.parametrize(
    ("address", "status"), [("127.0.0.1", 200), ("::1", 200), ("203.0.113.5", 403), ("192.168.1.9", 403)]
)
def test_other_machines_are_told_by_their_address(address, status):
    assert ask_as(address, **{"Content-Type": "application/json"}) == status
