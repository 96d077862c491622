"""What all request bodies share: nothing is coerced, nothing unknown understood, null means absent.

Knows no endpoint; which parameters are refused for now is told to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

MAX_FIELDS = 1024  # of one object
EXTRA = "extra"  # the validation context's name for what is done with unknown fields
Extra = Literal["ignore"] | None  # None: as each model has it

T = TypeVar("T")


class RequestModel(BaseModel):
    """Base of every object a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "should have at most {most} fields", {"most": MAX_FIELDS})
        return present(data) if isinstance(data, dict) else data


def within(schema: TypeAdapter[T], data: Any, info: ValidationInfo) -> T:
    """A part of a body validated as the body itself is, in a validator of its own. Raises ValidationError."""
    extra: Extra = (info.context or {}).get(EXTRA)
    return schema.validate_python(data, extra=extra, context=info.context)


def present(data: Mapping[str, Any]) -> dict[str, Any]:
    """The object without what is null."""
    return {name: value for name, value in data.items() if value is not None}


def without(not_yet: Mapping[str, tuple[Any, ...]], data: Any) -> Any:
    """The body without those parameters; one that asks for something is refused by name."""
    if not isinstance(data, dict):
        return data
    for name, value in data.items():
        if name in not_yet and not _asks_for_nothing(value, not_yet[name]):
            raise PydanticCustomError("unsupported_parameter", "is not supported", {"at": (name,)})
    return {name: value for name, value in data.items() if name not in not_yet}


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True is 1 to Python, not to JSON.
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


class TextPart(RequestModel):
    """A piece of a message's content. Images, sounds and files are refused by their type."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content_part", "must be an object with a type")
        if kind == "refusal":  # what an assistant of OpenAI's said instead
            return {"text" if name == "refusal" else name: value for name, value in data.items()}
        if kind != "text":
            raise PydanticCustomError(
                "content_part", "this server reads text only, not a part of type '{kind}'", {"kind": kind}
            )
        return data


_PARTS = TypeAdapter(Annotated[list[TextPart], Field(fail_fast=True)])


def _text(content: Any, info: ValidationInfo) -> Any:
    """Message content as one string: a list of text parts is joined, any other part refused."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content_type", "must be a string, null or a list of text parts")
    return "".join(part.text for part in within(_PARTS, content, info))


Text = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[TextPart] | None)]
