"""A request's JSON body: parsed strictly, validated. Knows no endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from serve.errors import ApiError, from_validation
from serve.strict import EXTRA, Extra

LARGE = 256 * 1024  # bytes, from where on a body takes long to validate

Body = TypeVar("Body", bound=BaseModel)


async def read(
    request: Request, schema: type[Body], unknown: Literal["ignore", "refuse"]
) -> tuple[Body, Mapping[str, Any]]:
    """The validated body, and the object as it was sent. Raises ApiError; `unknown`: what to do with unknown fields."""
    # A browser sends other types across origins without asking this server first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, f"The body must be sent as Content-Type: application/json, not {content_type or 'without a type'}."
        )
    received = await request.body()
    if len(received) > LARGE:  # others' answers go on meanwhile
        return await asyncio.to_thread(understood, received, schema, unknown)
    return understood(received, schema, unknown)


def understood(
    received: bytes, schema: type[Body], unknown: Literal["ignore", "refuse"]
) -> tuple[Body, Mapping[str, Any]]:
    """`read`, of the body itself."""
    try:
        # Unlike json.loads this refuses NaN, lone surrogates and bottomless nesting.
        sent = from_json(received, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    extra: Extra = "ignore" if unknown == "ignore" else None
    try:
        return schema.model_validate(sent, extra=extra, context={EXTRA: extra}), sent
    except ValidationError as error:
        raise from_validation(error) from None
