"""The body of /v1/responses, as OpenAI shapes it, and what of it is refused: whatever would need a stored state.

Knows the wire alone: no sampling defaults, no templates, no limits of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from backend.interface import Grammar
from serve.constraints import JsonSchema, ResponseFormat
from serve.schemas.response_input import Given, messages
from serve.schemas.sampling import INT64_MAX, MAX_TOP_LOGPROBS, Generating
from serve.schemas.tools import MAX_TOOLS, Function
from serve.strict import RequestModel, within, without

LOGPROBS = "message.output_text.logprobs"

# Parameters that OpenAI knows and this server does not serve, each with the values that ask for nothing.
NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
}
# Parameters of chat completions that have another name here.
ELSEWHERE = {
    "logprobs": f"include: ['{LOGPROBS}']",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


_PLAIN, _SCHEMA = TypeAdapter(PlainFormat), TypeAdapter(JsonSchemaFormat)


def _format(data: Any, info: ValidationInfo) -> PlainFormat | JsonSchemaFormat:
    kind = data.get("type") if isinstance(data, dict) else None
    return within(_SCHEMA, data, info) if kind == "json_schema" else within(_PLAIN, data, info)


class TextOptions(RequestModel):
    format: Annotated[PlainFormat | JsonSchemaFormat, BeforeValidator(_format)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def grammar(self) -> Grammar | None:
        match self.format:
            case JsonSchemaFormat() as schema:
                return ResponseFormat(type="json_schema", json_schema=schema).grammar
            case PlainFormat(type="json_object"):
                return ResponseFormat(type="json_object").grammar
            case _:
                return None


class Reasoning(RequestModel):
    """`effort` none switches thinking off, every other one on. No summaries are made: the thoughts are told."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class FunctionTool(Function):
    """A function of chat completions without the object around it."""

    # What else a function may say (who may call it, when it is loaded) means nothing to a server without other tools.
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _functions_only(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "function":
            raise PydanticCustomError(
                "tool", "this server has function tools only, not '{kind}'", {"at": ("type",), "kind": kind[:60]}
            )
        return data

    def for_chat(self) -> dict[str, Any]:
        """The tool as chat completions have it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_unset=True)}


class NamedTool(RequestModel):
    type: Literal["function"]
    name: str


class AllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


_NAMED, _ALLOWED = TypeAdapter(NamedTool), TypeAdapter(AllowedTools)


def _tool_choice(data: Any, info: ValidationInfo) -> str | NamedTool | AllowedTools:
    if isinstance(data, str) and data in ("none", "auto", "required"):
        return data
    if not isinstance(data, dict):
        raise PydanticCustomError("tool_choice", "must be none, auto, required or an object that names a function")
    return within(_ALLOWED, data, info) if data.get("type") == "allowed_tools" else within(_NAMED, data, info)


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | AllowedTools, BeforeValidator(_tool_choice)]


def _without_others_names(schema: dict[str, Any]) -> None:
    for name in ELSEWHERE:
        schema["properties"].pop(name, None)


class ResponsesRequest(Generating):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra=_without_others_names)

    input: Given
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: (
        list[
            Literal[
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
                "reasoning.encrypted_content",
                "message.output_text.logprobs",
            ]
        ]
        | None
    ) = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of tools that the server runs itself: it has none
    # What does not fit is refused either way: nothing that was said is dropped in silence.
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_served(cls, data: Any) -> Any:
        data = without(NOT_SERVED, data)
        if isinstance(data, dict):
            for name in ELSEWHERE.keys() & data.keys():
                if data[name] not in (None, False):
                    raise PydanticCustomError(
                        "unsupported_parameter", "is '{name}' here", {"at": (name,), "name": ELSEWHERE[name]}
                    )
        return data

    @model_validator(mode="after")
    def _something_is_said(self) -> Self:
        if not self.messages:
            raise PydanticCustomError("input", "nothing in it is for the model to read", {"at": ("input",)})
        return self

    @model_validator(mode="after")
    def _agree_on_tools(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise PydanticCustomError("tool", "there are two tools of this name", {"at": ("tools", i, "name")})
        match self.tool_choice:
            case NamedTool(name=name) if name not in names:
                raise PydanticCustomError("tool_choice", "there is no such tool", {"at": ("tool_choice", "name")})
            case AllowedTools(tools=allowed):
                for i, tool in enumerate(allowed):
                    if tool.name not in names:
                        at = ("tool_choice", "tools", i, "name")
                        raise PydanticCustomError("tool_choice", "there is no such tool", {"at": at})
            case "required" if not names:
                raise PydanticCustomError("tool_choice", "needs tools to choose from", {"at": ("tool_choice",)})
        if self.structured_outputs is not None and self.text is not None and self.text.grammar:
            raise PydanticCustomError("conflict", "cannot be joined with text.format", {"at": ("structured_outputs",)})
        return self

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """What the model reads, as chat completions have it."""
        return messages(self.instructions, self.input)

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def alternatives(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0

    @property
    def grammar(self) -> Grammar | None:
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar
        return None if self.text is None else self.text.grammar

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the template is told; chat_template_kwargs count more than what only implies them."""
        told: dict[str, Any] = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            told["enable_thinking"] = self.reasoning.effort != "none"
        if self.enable_thinking is not None:
            told["enable_thinking"] = self.enable_thinking
        return {**told, **(self.chat_template_kwargs or {})}

    def offered(self) -> dict[str, Any]:
        """The fields of ChatRequest that say which tools there are and which must be called."""
        tools = [tool.for_chat() for tool in self.tools or ()]
        match self.tool_choice:
            case NamedTool(name=name):
                return {"tools": tools, "tool_choice": "required", "tool_name": name}
            case AllowedTools(mode=mode, tools=allowed):
                names = {tool.name for tool in allowed}
                return {"tools": [tool for tool in tools if tool["function"]["name"] in names], "tool_choice": mode}
            case mode:
                return {"tools": tools, "tool_choice": mode or "auto"}

    def spelled(self, param: str | None) -> str | None:
        """A parameter that the backend named, by the name it has here."""
        match (param or "").partition("[")[0]:
            case "messages":
                return "input"
            case "max_tokens":
                return "max_output_tokens"
            case "thinking_budget":
                return "thinking_token_budget"
            case "response_format":
                return "text.format" if self.structured_outputs is None else "structured_outputs"
            case _:
                return param
