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
    match request.headers.get("x-draftloop-capture", "on").strip().lower():
        case "off":
            return True
        case "on":
            return False
        case other:
            # A client that asks for privacy in words we do not know must not be captured by mistake.
            raise ApiError(
                400, f"The header X-Draftloop-Capture must be on or off, not '{other}'.", code="invalid_value"
            )
