"""GET /openapi.json: what it says of an endpoint is what the endpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve.openapi import OPERATIONS
from tests.servers import CHAT, AppServer, running_app

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 105]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hi"}]},
}
OPERATING: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/drafters/active", "put"): {"drafter": "none"},
    ("/v1/drafters", "post"): {"path": "new"},
}
UNDOING = {("/v1/drafters/active", "delete"), ("/v1/drafters/{name}", "delete")}
GENERATING = (CHAT, "/v1/completions", "/v1/responses")


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with running_app(capture="off") as server:
        yield server


@pytest.fixture(scope="module")
def document(server: AppServer) -> dict[str, Any]:
    told: dict[str, Any] = server.http.get("/openapi.json").json()
    return told


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "$ref":
                yield value
            else:
                yield from references(value)
    if isinstance(part, list):
        for one in part:
            yield from references(one)


def body_schema(document: dict[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    ref = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = document["components"]["schemas"][ref.rpartition("/")[2]]
    return schema


def test_it_tells_of_every_endpoint_and_of_no_other(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    found = {(path, method) for path, methods in document["paths"].items() for method in methods}
    models = ["/tokenizer_info", "/v1/models", "/v1/models/{name}"]
    operators = ["/", "/health", "/ready", "/version", "/metrics", "/v1/engine", "/v1/drafters"]
    told = {(path, "get") for path in [*models, *operators]}
    assert found == {(path, "post") for path in BODIES} | OPERATING.keys() | UNDOING | told
    assert {
        one["operationId"] for methods in document["paths"].values() for one in methods.values()
    } <= OPERATIONS.keys()


def test_every_schema_it_refers_to_is_there(document: dict[str, Any]) -> None:
    named = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    referred = set(references(document))
    assert referred <= named
    assert "#/components/schemas/ErrorBody" in referred


@pytest.mark.parametrize("path", BODIES)
def test_what_a_body_must_have_is_what_it_says(server: AppServer, document: dict[str, Any], path: str) -> None:
    schema = body_schema(document, path)
    assert BODIES[path].keys() <= schema["properties"].keys()
    assert set(schema.get("required", ())) <= BODIES[path].keys()
    assert server.http.post(path, json=BODIES[path]).status_code == 200
    for name in schema.get("required", ()):
        answer = server.http.post(path, json={"model": "fake"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", GENERATING)
def test_limits_stand_in_the_schema(document: dict[str, Any], path: str) -> None:
    properties = body_schema(document, path)["properties"]
    assert {"minimum": 0, "maximum": 2, "type": "number"} in properties["temperature"]["anyOf"]
    assert {"type": "string"} in properties["stop"]["anyOf"]
    assert ("max_tokens" in properties) is (path != "/v1/responses")


@pytest.mark.parametrize("path", BODIES)
def test_refusals_have_statuses_that_it_names(server: AppServer, document: dict[str, Any], path: str) -> None:
    seen = {
        server.http.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code,
        server.http.post(path, content=b"{", headers={"Content-Type": "application/json"}).status_code,
        server.http.post(path, json={**BODIES[path], "model": "other"}).status_code,
    }
    if path in GENERATING:
        seen.add(server.http.post(path, json={**BODIES[path], "drafter": "other"}).status_code)
    assert seen == {415, 400, 404} | ({403} if path in GENERATING else set())
    responses = document["paths"][path]["post"]["responses"]
    assert {str(status) for status in seen} < responses.keys()
    assert {reference for status in seen for reference in references(responses[str(status)])} == {
        "#/components/schemas/ErrorBody"
    }


def test_what_an_operator_sends_is_told_of_too(server: AppServer, document: dict[str, Any]) -> None:
    for (path, method), body in OPERATING.items():
        assert set(body_schema(document, path, method).get("required", ())) == body.keys()
        done, answer = ("201", "NewDrafter") if method == "post" else ("200", "Drafters")
        seen = {
            server.http.request(method, path, json=body).status_code,
            server.http.request(method, path, json=body, headers={"Host": "evil.example"}).status_code,
            server.http.request(method, path, content=b"{", headers={"Content-Type": "application/json"}).status_code,
            server.http.request(method, path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code,
        }
        assert seen == {int(done), 403, 400, 415}
        responses = document["paths"][path][method]["responses"]
        assert {str(status) for status in seen} < responses.keys()
        assert list(references(responses[done])) == [f"#/components/schemas/{answer}"]


def test_what_an_operator_undoes_is_told_of_too(server: AppServer, document: dict[str, Any]) -> None:
    for path, method in UNDOING:
        seen = {
            server.http.request(method, path, headers={"Host": "evil.example"}).status_code,
            server.http.request(method, path).status_code,
        }
        responses = document["paths"][path][method]["responses"]
        assert {str(status) for status in seen} < responses.keys()
        assert "requestBody" not in document["paths"][path][method]


@pytest.mark.parametrize("path", BODIES)
def test_streams_are_told_of_where_there_are_any(document: dict[str, Any], path: str) -> None:
    answers = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert ("text/event-stream" in answers) is (path in GENERATING)
    assert "$ref" in answers["application/json"]["schema"]


@pytest.mark.parametrize("unknown", ["ignore", "refuse"])
def test_unknown_fields_are_forbidden_where_they_are_refused(unknown: str) -> None:
    with running_app(capture="off", unknown_fields=unknown) as server:
        schema = body_schema(server.http.get("/openapi.json").json(), CHAT)
        answer = server.http.post(CHAT, json={**BODIES[CHAT], "surprise": 1})
    assert (schema.get("additionalProperties") is False) is (answer.status_code == 400)
    assert answer.status_code == {"ignore": 200, "refuse": 400}[unknown]


def test_it_needs_a_key_where_everything_does() -> None:
    with running_app(capture="off", api_key="me=secret") as server:
        assert server.http.get("/openapi.json").status_code == 401
        told = server.http.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert "401" in told["paths"][CHAT]["post"]["responses"]
    assert "401" not in told["paths"]["/health"]["get"]["responses"]


def test_before_an_upstream_it_tells_of_what_is_passed_on() -> None:
    with running_app(capture="off", upstream="http://127.0.0.1:9") as server:
        told = server.http.get("/openapi.json").json()
    assert {path for path in told["paths"] if path.startswith("/v1")} == {
        CHAT, "/v1/completions", "/v1/models", "/v1/models/{name}", "/v1/engine",
        *(path for path, _ in [*OPERATING, *UNDOING]),
    }  # fmt: skip
    assert "default" in told["paths"][CHAT]["post"]["responses"]
    assert body_schema(told, CHAT).get("additionalProperties") is not False
