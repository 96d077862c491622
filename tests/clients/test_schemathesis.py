"""schemathesis over our OpenAPI document: no 5xx, no status and no shape that the document does not name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.servers import running_app

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)


@pytest.mark.parametrize("unknown", ["ignore", "refuse"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_api_keeps_to_its_document(run: Callable[..., str], unknown: str, seed: int) -> None:
    with running_app(capture="off", unknown_fields=unknown) as server:
        run(
            "schemathesis", "run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "50",
            "--seed", str(seed), "--checks", ",".join(CHECKS), "--generation-database", "none",
            "--continue-on-failure", "--no-color", "--warnings", "off",
        )  # fmt: skip
