"""A request's JSON body: read within a limit, parsed strictly, validated. Knows no endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from serve.errors import ApiError, from_validation

MAX_BODY_BYTES = 32 * 1024 * 1024

Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, schema: type[Body]) -> tuple[Body, Mapping[str, Any]]:
    """The validated body, and the object as it was sent. Raises ApiError."""
    # A browser sends other types across origins without asking this server first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, f"The body must be sent as Content-Type: application/json, not {content_type or 'without a type'}."
        )
    received = bytearray()
    async for piece in request.stream():
        received += piece
        if len(received) > MAX_BODY_BYTES:
            raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        # Unlike json.loads this refuses NaN, lone surrogates and bottomless nesting.
        sent = from_json(bytes(received), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    try:
        return schema.model_validate(sent), sent
    except ValidationError as error:
        raise from_validation(error) from None
