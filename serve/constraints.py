"""What an answer must match: OpenAI's response_format and vLLM's structured_outputs, each made into a Grammar.

Knows the shapes alone; whether a grammar compiles is the backend's to find out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from backend.interface import Grammar
from serve.strict import RequestModel, without

MAX_CHOICES = 1024

# Constraints that vLLM knows and we do not serve, with the values that ask for nothing.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "structural_tag": (),
    "whitespace_pattern": (),
}
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")


def _json_schema(schema: Any) -> Any:
    """A schema given as JSON text, read."""
    if not isinstance(schema, str):
        return schema
    try:
        return from_json(schema, allow_inf_nan=False)
    except ValueError as error:
        raise PydanticCustomError("json_schema", "not valid JSON: {why}", {"why": str(error)}) from None


class JsonSchema(RequestModel):
    """Always enforced as `strict` asks: there is no laxer way."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's: text asks for nothing."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "is required", {"at": ("json_schema",)})
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError("conflict", "needs type to be json_schema", {"at": ("json_schema",)})
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar("json_schema", _dump(self.json_schema.schema_))
        return Grammar("json_object") if self.type == "json_object" else None


class StructuredOutputs(RequestModel):
    """vLLM's: exactly one constraint."""

    json_: (
        Annotated[dict[str, Any], BeforeValidator(_json_schema, json_schema_input_type=str | dict[str, Any])] | None
    ) = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
        ]
        | None
    ) = None
    grammar_: Annotated[str, Field(min_length=1)] | None = Field(None, alias="grammar")  # in Lark's syntax

    @model_validator(mode="before")
    @classmethod
    def _one_constraint(cls, data: Any) -> Any:
        data = without(NOT_YET, data)
        if (
            isinstance(data, dict)
            and (given := [name for name in CONSTRAINTS if data.get(name) is not None]) != given[:1]
        ):
            raise PydanticCustomError(
                "constraints", "takes one constraint, not {given}", {"given": " and ".join(given)}
            )
        return data

    @model_validator(mode="after")
    def _a_constraint(self) -> Self:
        if self.grammar is None:
            raise PydanticCustomError("constraints", "needs one of {names}", {"names": ", ".join(CONSTRAINTS)})
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.json_ is not None:
            return Grammar("json_schema", _dump(self.json_))
        if self.json_object:
            return Grammar("json_object")
        if self.choice is not None:
            return Grammar("regex", "|".join(map(re.escape, self.choice)))
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.grammar_ is None else Grammar("lark", self.grammar_)


def _dump(schema: dict[str, Any]) -> str:
    """The schema as JSON text; its order of properties is the answer's."""
    return json.dumps(schema, ensure_ascii=False)
