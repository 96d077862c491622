"""What every endpoint that generates does before it starts: admit, read the body, note where the request came from.

Knows headers and bodies; knows no endpoint's own parameters.
"""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import Request

from serve import body
from serve.errors import ApiError
from serve.record import Origin
from serve.schemas.proxied import Proxied
from serve.schemas.sampling import Generating
from serve.service import Service

HEADER = "X-Draftloop-Capture"
CAPTURED = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}

Call = TypeVar("Call", bound=Generating | Proxied)


async def receive(request: Request, schema: type[Call]) -> tuple[Service, Call, Origin]:
    """The validated body and its origin. Raises ApiError where the request cannot start."""
    service: Service = request.app.state.service
    service.admit()
    arrived = time.perf_counter()
    call, sent = await body.read(request, schema, service.unknown_fields)
    if isinstance(call, Generating):  # what a proxy passes on, the upstream checks
        service.check_model(call.model)
        service.check_drafter(call.drafter)
    origin = Origin(
        model=service.model_name,
        body=sent,
        client=request.state.client or call.user,
        key=request.state.client,
        opted_out=call.store is False or _header_opts_out(request),
        arrived=arrived,
    )
    return service, call, origin


def _header_opts_out(request: Request) -> bool:
    """Whether any of its values says so: what might mean no is not captured by mistake."""
    values = [value.strip().lower() for given in request.headers.getlist(HEADER) for value in given.split(",")]
    if unknown := [value for value in values if value not in CAPTURED]:
        raise ApiError(
            400,
            f"The header {HEADER} must be on or off (or true, false, 1, 0), not '{unknown[0]}'.",
            code="invalid_value",
        )
    return not all(CAPTURED[value] for value in values)
