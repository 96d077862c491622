"""The functions a model may call and the calls it made, as /v1/chat/completions shapes them.

Knows the wire alone: whether the model's template can show tools is the backend's to know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serve.strict import RequestModel, present, within

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _object_schema(parameters: Any) -> Any:
    if isinstance(parameters, dict) and parameters.get("type", "object") != "object":
        raise PydanticCustomError("parameters", 'must be a JSON schema of type "object"')
    return parameters


class Function(RequestModel):
    """Its parameters are a JSON schema, or absent where it takes none."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = None
    strict: bool | None = None


class FunctionTool(RequestModel):
    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    name: Name


class FunctionReference(RequestModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionReference], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ChosenTool(RequestModel):
    """tool_choice as an object: one function, or some of them."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "is required", {"at": (self.type,)})
        return self


_TOOLS = TypeAdapter(Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)])
_CHOSEN = TypeAdapter(ChosenTool)


def _tools(tools: Any, info: ValidationInfo) -> Any:
    """The tools as they were sent, for a template to print, once they are known to be tools."""
    names = [tool.function.name for tool in within(_TOOLS, tools, info)]
    for i, name in enumerate(names):
        if name in names[:i]:
            at = {"at": (i, "function", "name"), "name": name}
            raise PydanticCustomError("duplicate", "there are two functions named {name}", at)
    return [{**_known(FunctionTool, tool), "function": _known(Function, tool["function"])} for tool in tools]


def _known(schema: type[RequestModel], sent: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in present(sent).items() if name in schema.model_fields}


def _tool_choice(choice: Any, info: ValidationInfo) -> Any:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if not isinstance(choice, dict):
        raise PydanticCustomError("tool_choice", "must be none, auto, required or an object that names a function")
    return within(_CHOSEN, choice, info)


Choice = Literal["none", "auto", "required"] | ChosenTool
Tools = Annotated[list[dict[str, Any]], BeforeValidator(_tools, json_schema_input_type=list[FunctionTool])]
ToolChoice = Annotated[Choice, BeforeValidator(_tool_choice)]


def check(tools: list[dict[str, Any]] | None, choice: Choice | None) -> None:
    """Raises PydanticCustomError where the choice is not among the tools."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise PydanticCustomError("conflict", "needs tools", {"at": ("tool_choice",)})
    known = {tool["function"]["name"] for tool in tools}
    for path, name in _names(choice):
        if name not in known:
            raise PydanticCustomError("tool_choice", "there is no tool named {name}", {"at": path, "name": name})


def _names(choice: object) -> list[tuple[tuple[str | int, ...], str]]:
    """Every function the choice names, and where."""
    match choice:
        case ChosenTool(type="function", function=FunctionName(name=name)):
            return [(("tool_choice", "function", "name"), name)]
        case ChosenTool(allowed_tools=AllowedTools(tools=tools)):
            at = ("tool_choice", "allowed_tools", "tools")
            return [((*at, i, "function", "name"), tool.function.name) for i, tool in enumerate(tools)]
    return []


def offered(tools: list[dict[str, Any]] | None, choice: Choice | None) -> dict[str, Any]:
    """The fields of ChatRequest that say which tools there are and which must be called."""
    tools = tools or []
    match choice:
        case ChosenTool(type="function", function=FunctionName(name=name)):
            return {"tools": tools, "tool_choice": "required", "tool_name": name}
        case ChosenTool(allowed_tools=AllowedTools(mode=mode)):
            allowed = {name for _, name in _names(choice)}
            return {"tools": [t for t in tools if t["function"]["name"] in allowed], "tool_choice": mode}
    return {"tools": tools, "tool_choice": choice or "auto"}


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str | dict):
        return arguments
    raise PydanticCustomError("arguments_type", "must be a string of JSON or an object")


class MadeFunction(RequestModel):
    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any])] = "{}"


class MadeCall(RequestModel):
    """A call in the history. `index` stands in calls that were put together from a stream."""

    id: str
    type: Literal["function"] = "function"
    function: MadeFunction
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """The call for a chat template."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str


class Called(BaseModel):
    """A call in an answer; in a stream its later pieces have an index and more arguments alone."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
