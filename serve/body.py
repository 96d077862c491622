"""A request's JSON body: parsed strictly, validated. Knows no endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from serve.errors import ApiError, from_validation

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
    return understood(await request.body(), schema, unknown)


def understood(
    received: bytes, schema: type[Body], unknown: Literal["ignore", "refuse"]
) -> tuple[Body, Mapping[str, Any]]:
    """`read`, of the body itself."""
    sent = body = _parse(received)
    while True:
        try:
            return schema.model_validate(body), sent
        except ValidationError as error:
            strangers = [] if unknown == "refuse" else _strangers(error)
            body = _parse(received) if body is sent else body
            if not strangers or not all(_drop(body, path) for path in strangers):
                raise from_validation(error) from None
        # Once more without them: validators that run late may find further ones.


def _parse(text: bytes) -> Any:
    try:
        # Unlike json.loads this refuses NaN, lone surrogates and bottomless nesting.
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _strangers(error: ValidationError) -> list[Sequence[int | str]]:
    """Where the fields stand that nobody knows."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [one["loc"] for one in found if one["type"] == "extra_forbidden"]


def _drop(body: Any, path: Sequence[int | str]) -> bool:
    """Take out what stands at the path; False where nothing does."""
    *way, name = path
    for step in way:
        try:
            body = body[step]
        except (LookupError, TypeError):
            return False
    return isinstance(body, dict) and body.pop(name, None) is not None
