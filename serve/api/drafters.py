"""/v1/drafters: which drafters there are and what each is worth; loaded, promoted, rolled back while serving.

For the operator alone: who that is, `serve.auth` knows; what a promotion does, the backend.
"""

from __future__ import annotations

import logging

from fastapi import APIRouter, Depends, Request

from serve import body
from serve.auth import operator
from serve.errors import ApiError
from serve.schemas.drafters import Drafters, LoadDrafterRequest, NewDrafter, PromoteRequest
from serve.service import Service, State

router = APIRouter(prefix="/v1/drafters", dependencies=[Depends(operator)])
log = logging.getLogger(__name__)


@router.get("")
async def list_drafters(request: Request) -> Drafters:
    """With counts since each was loaded."""
    return _all(_service(request))


@router.post("", status_code=201)
async def load_drafter(request: Request) -> NewDrafter:
    """Load a student beside the running drafters: it is checked and tried first, and no request has it yet."""
    service = _service(request)
    if service.state is State.DRAINING:
        service.admit()
    call, _ = await body.read(request, LoadDrafterRequest, service.unknown_fields)
    loading = service.backend.load_drafter(call.path, call.name, call.min_acceptance)
    loaded = NewDrafter.model_validate(await service.until_draining(loading), strict=False)
    log.warning("drafter %s loaded by %s from %s", loaded.name, _operator(request), call.path)
    return loaded


@router.put("/active")
async def promote_drafter(request: Request) -> Drafters:
    """Make a loaded drafter the default of the requests that come from now on, or of a share of them."""
    service = _service(request)
    call, _ = await body.read(request, PromoteRequest, service.unknown_fields)
    before = _all(service)
    service.backend.promote(call.drafter, call.canary)
    return _told(request, before, "promoted")


@router.delete("/active")
async def roll_back_drafter(request: Request) -> Drafters:
    """End the canary or else take the last promotion back."""
    service = _service(request)
    before = _all(service)
    service.backend.roll_back()
    return _told(request, before, "rolled back")


@router.delete("/{name}")
async def unload_drafter(request: Request, name: str) -> Drafters:
    """Let a drafter go that was loaded here and is not active: at once, or after the last sequence that has it."""
    service = _service(request)
    if not any(one.name == name and one.state != "retiring" for one in _all(service).drafters):
        raise ApiError(404, f"There is no drafter '{name}' here.", param="drafter", code="drafter_not_found")
    await service.backend.unload_drafter(name)
    log.warning("drafter %s unloaded by %s", name, _operator(request))
    return _all(service)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    service.require_model()
    return service


def _all(service: Service) -> Drafters:
    return Drafters.model_validate(service.backend.list_drafters(), strict=False)


def _operator(request: Request) -> str:
    return request.state.client or "a user of this machine"


def _told(request: Request, before: Drafters, how: str) -> Drafters:
    now = _all(_service(request))
    if now.active != before.active:
        log.warning(
            "drafter %s by %s: %s is the default, it was %s", how, _operator(request), now.active, before.active
        )
    if now.canary != before.canary:
        if now.canary:
            log.warning("canary by %s: %s has %g of requests", _operator(request), now.canary.drafter, now.canary.share)
        elif before.canary and now.active == before.active:
            log.warning("canary ended by %s: %s", _operator(request), before.canary.drafter)
    return now
