"""GET /v1/engine: what the engine is doing, for the operator of this machine alone.

Knows who may ask; what there is to tell is the backend's.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request

from serve.errors import ApiError
from serve.service import Service
from serve.settings import is_loopback


def only_from_here(request: Request) -> None:
    """Raises ApiError 403 for other machines' clients, and for pages of other sites that a browser here has open.

    Such a page can make its own name resolve to this address, but its requests still carry that name as their Host.
    """
    if request.client is None or not is_loopback(request.client.host):
        raise ApiError(403, f"{request.url.path} answers this machine's own clients only.", code="local_only")
    name = _name(request.headers.get("host", ""))
    if not is_loopback(name):
        raise ApiError(
            403, f"{request.url.path} must be asked for at a loopback address, not '{name}'.", code="local_only"
        )


def _name(host: str) -> str:
    """The host's name without its port; empty where it is no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


router = APIRouter(dependencies=[Depends(only_from_here)])


@router.get("/v1/engine")
async def engine(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.require_model()
    return {**service.backend.engine(), "state": service.state.value}
