"""/v1/engine: what the engine does, for the operator alone. Who that is, `serve.auth` knows."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from serve.auth import operator
from serve.service import Service

router = APIRouter(dependencies=[Depends(operator)])


@router.get("/v1/engine")
async def engine(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.require_model()
    return {**service.backend.engine(), "state": service.state.value}
