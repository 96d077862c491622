"""How the server is: /health, /ready, /version and /metrics.

Knows only what the service and its backend say of themselves.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from serve.errors import RETRY_AFTER_SECONDS
from serve.service import Service, State

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 as long as there is reason to let the process live: 503 means restart it."""
    service: Service = request.app.state.service
    failed = service.state is State.FAILED
    return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 where a request sent now would start. Late or failing capture is told, not punished: it fails no request."""
    service: Service = request.app.state.service
    body = {
        "status": service.state.value,
        "capture": service.recorder.state,
        "capture_late": service.recorder.late > 0,
        "capture_failing": service.recorder.state == "failing",
        "capture_queue_depth": service.recorder.depth,
    }
    if service.state is State.READY:
        return JSONResponse(body)
    return JSONResponse(body, 503, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


@router.get("/version")
async def tell_version(request: Request) -> dict[str, Any]:
    """What answers here, precisely enough to repeat an answer: fingerprints, build, the start-up probe's findings."""
    service: Service = request.app.state.service
    service.require_model()
    info = service.backend.info()
    return {
        "version": version_of_package(),
        "model": service.model_name,
        "max_model_len": info.max_model_len,
        "drafter": info.drafter,
        "draft_tokens": info.draft_tokens,
        "system_fingerprint": service.system_fingerprint,
        "fingerprints": asdict(info.fingerprints),
        "build": dict(info.build),
        "probe": dict(info.probe),
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def version_of_package() -> str:
    try:
        return version("draftloop")
    except PackageNotFoundError:
        return "not installed"  # run from a checkout
