"""schemathesis over our OpenAPI document: no 5xx, no status and no shape that the document does not name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.servers import running_app, running_process, serve_command

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


def hold_to_its_document(run: Callable[..., str], url: str, *more: str) -> None:
    run(
        "schemathesis", "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS),
        "--generation-database", "none", "--continue-on-failure", "--no-color", "--warnings", "off", *more,
    )  # fmt: skip


@pytest.mark.parametrize(("unknown", "seed"), [("ignore", 1), ("refuse", 2)])
def test_the_api_keeps_to_its_document(run: Callable[..., str], unknown: str, seed: int) -> None:
    with running_app(capture="off", unknown_fields=unknown) as server:
        hold_to_its_document(run, server.url, "--max-examples", "50", "--seed", str(seed))


def test_so_it_does_before_a_real_engine(run: Callable[..., str], tmp_path: Path) -> None:
    command = serve_command(tiny(), "--max-model-len", "160")
    with running_process(command, tmp_path / "capture.db") as server:
        hold_to_its_document(run, server.url, "--max-examples", "30", "--seed", "3", "--max-time", "120")
