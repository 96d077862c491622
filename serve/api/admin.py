"""/v1/engine: what the engine does, and which drafter is the default, for the operator alone.

Who that is, `serve.auth` knows; what a promotion does, the backend.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Depends, Request

from serve import body
from serve.auth import operator
from serve.schemas.drafters import Drafters, PromoteRequest, RollBackRequest
from serve.service import Service

router = APIRouter(dependencies=[Depends(operator)])
log = logging.getLogger(__name__)


@router.get("/v1/engine")
async def engine(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.require_model()
    return {**service.backend.engine(), "state": service.state.value}


@router.post("/v1/engine/drafters/promote")
async def promote_drafter(request: Request) -> Drafters:
    """Make a loaded drafter the default of the requests that come from now on; by law L2 no answer changes."""
    service: Service = request.app.state.service
    service.require_model()
    call, _ = await body.read(request, PromoteRequest, service.unknown_fields)
    before = service.backend.info().drafter
    service.backend.promote(call.drafter)
    return _told(request, before, "promoted")


@router.post("/v1/engine/drafters/rollback")
async def roll_back_drafter(request: Request) -> Drafters:
    """Take the last promotion back."""
    service: Service = request.app.state.service
    service.require_model()
    await body.read(request, RollBackRequest, service.unknown_fields)
    before = service.backend.info().drafter
    service.backend.roll_back()
    return _told(request, before, "rolled back")


def _told(request: Request, before: str, how: str) -> Drafters:
    service: Service = request.app.state.service
    now, view = service.backend.info().drafter, service.backend.engine()
    if now != before:
        log.warning(
            "drafter %s by %s: %s is the default, it was %s",
            how,
            request.state.client or "a user of this machine",
            now,
            before,
        )
    return Drafters(drafter=now, drafters=view["drafters"], default_drafters=view["default_drafters"])
