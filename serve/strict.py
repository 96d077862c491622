"""What all request bodies share: nothing is coerced, nothing unknown let through, null means absent.

Knows no endpoint; which parameters are refused for now is told to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


class RequestModel(BaseModel):
    """Base of every object a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def without(not_yet: Mapping[str, tuple[Any, ...]], data: Any) -> Any:
    """The body without those parameters; one that asks for something is refused by name."""
    if not isinstance(data, dict):
        return data
    for name, value in data.items():
        if name in not_yet and not _asks_for_nothing(value, not_yet[name]):
            raise PydanticCustomError("unsupported_parameter", "is not supported yet", {"at": (name,)})
    return {name: value for name, value in data.items() if name not in not_yet}


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True is 1 to Python, not to JSON.
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def _text(content: Any) -> Any:
    """Message content as one string: a list of text parts is joined, any other part refused."""
    if not isinstance(content, list):
        if content is None or isinstance(content, str):
            return content
        raise PydanticCustomError("content_type", "must be a string, null or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content_part", "must be an object with a type", {"at": (i,)})
        if kind != "text":
            raise PydanticCustomError(
                "content_part", "this server reads text only, not a part of type '{kind}'", {"at": (i,), "kind": kind}
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_part", "must be a string", {"at": (i, "text")})
        if extra := sorted(part.keys() - {"type", "text"}):
            raise PydanticCustomError("extra_forbidden", "is unknown", {"at": (i, extra[0])})
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[str, BeforeValidator(_text)]
