"""How the server is: /health, /ready, /version, /metrics, and a plain page of acceptance per slot at /.

Knows only what the service and its backend say of themselves.
"""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from backend.interface import DrafterStats
from serve import dashboard
from serve.errors import RETRY_AFTER_SECONDS
from serve.metrics import recent_acceptance, total_acceptance
from serve.service import Service, State

router = APIRouter()

_page = Template((Path(dashboard.__path__[0]) / "index.html").read_text(encoding="utf-8"))


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 as long as there is reason to let the process live: 503 means restart it."""
    service: Service = request.app.state.service
    failed = service.state is State.FAILED
    return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 where a request sent now would start. A late capture is told, not punished: it fails no request."""
    service: Service = request.app.state.service
    body = {
        "status": service.state.value,
        "capture": service.recorder.state,
        "capture_late": service.recorder.state == "late",
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


@router.get("/")
async def index(request: Request) -> HTMLResponse:
    service: Service = request.app.state.service
    stats = service.stats()
    if stats is None:
        return HTMLResponse(_fill(model="no model yet", state=service.state.value, drafter="", engine="", slots=""))
    lines = [line for drafter in stats.drafters for line in _acceptance(drafter)]
    drafters = ", ".join(drafter.drafter for drafter in stats.drafters) or "none"
    return HTMLResponse(
        _fill(
            model=service.model_name,
            state=service.state.value,
            drafter=f"Drafters: {drafters}; {stats.draft_tokens} draft tokens in the last step",
            engine=f"{stats.running} running, {stats.waiting} waiting; capture {service.recorder.state}",
            slots="\n".join(lines) or "no slots",
        )
    )


def _acceptance(drafter: DrafterStats) -> list[str]:
    """A line per slot: the slot, its acceptance over the last 60 s and since start, its counts, the drafter."""
    return [
        f"{slot:>4}  {_percent(recent):>7}  {_percent(total):>11}  {proposed:>8}  {accepted:>8}  {drafter.drafter}"
        for slot, (recent, total, proposed, accepted) in enumerate(
            zip(
                recent_acceptance(drafter),
                total_acceptance(drafter),
                drafter.draft_tokens_per_pos,
                drafter.accepted_tokens_per_pos,
                strict=True,
            )
        )
    ]


def _fill(**values: str) -> str:
    return _page.substitute({name: escape(value) for name, value in values.items()})


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def version_of_package() -> str:
    try:
        return version("draftloop")
    except PackageNotFoundError:
        return "not installed"  # run from a checkout
