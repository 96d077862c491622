"""What a client of /v1/responses says to the model: its input items, and the chat messages they come to.

Knows the wire alone: no template, no tool's schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, from_json

from serve.strict import RequestModel, within

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


def _joined(parts: Any, kinds: Mapping[str, str]) -> Any:
    """Content as one string: a list of parts of those kinds is joined, any other part refused."""
    if not isinstance(parts, list):
        if parts is None or isinstance(parts, str):
            return parts
        raise PydanticCustomError("content_type", "must be a string or a list of parts")
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content_part", "must be an object with a type", {"at": (i,)})
        if kind not in kinds:
            raise PydanticCustomError(
                "content_part", "this server reads text only, not a part of type '{kind}'", {"at": (i,), "kind": kind}
            )
        if not isinstance(text := part.get(kinds[kind]), str):
            raise PydanticCustomError("content_part", "must be a string", {"at": (i, kinds[kind])})
        texts.append(text)
    return "".join(texts)


def _parts_schema(kinds: Iterable[str]) -> WithJsonSchema:
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}, mode="validation")


def _arguments(text: str) -> str:
    """Arguments as a model wrote them: a JSON object, or nothing at all."""
    try:
        fine = not text.strip() or isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        fine = False
    if not fine:
        raise PydanticCustomError("arguments", "must be the text of a JSON object")
    return text


Text = Annotated[str, BeforeValidator(lambda parts: _joined(parts, TEXT_PARTS)), _parts_schema(("input_text", "text"))]
Thought = Annotated[
    str, BeforeValidator(lambda parts: _joined(parts, REASONING_PARTS)), _parts_schema(("reasoning_text",))
]


class Item(RequestModel):
    """Base of what stands in `input`. An answer's items are sent back as they came: what they say besides is let be."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class ReasoningItem(Item):
    type: Literal["reasoning"]
    content: Thought | None = None
    summary: Thought | None = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, AfterValidator(_arguments)]


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Text


InputItem = MessageItem | ReasoningItem | CallItem | OutputItem
ITEMS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
}


def _item(data: Any) -> InputItem:
    """An item by its type. Raises where there is none such, naming what the client can do about it."""
    if not isinstance(data, dict):
        raise PydanticCustomError("model_type", "must be an object")
    kind = data.get("type")
    if kind is None:
        kind = "message" if "role" in data else "item_reference"  # OpenAI lets both leave out their type
    if kind == "item_reference":
        raise PydanticCustomError(
            "unsupported_parameter", "refers to a stored item, and this server stores none: send the item itself"
        )
    if not isinstance(kind, str) or kind not in ITEMS:
        raise PydanticCustomError(
            "item", "{kind} is no item that this server reads; it reads {known}",
            {"at": ("type",), "kind": repr(kind)[:60], "known": ", ".join(ITEMS)},
        )  # fmt: skip
    return ITEMS[kind].model_validate(data)


Input = Annotated[InputItem, BeforeValidator(_item)]


def _calls_before_outputs(items: Sequence[InputItem]) -> Sequence[InputItem]:
    called = set()
    for i, item in enumerate(items):
        if isinstance(item, CallItem):
            called.add(item.call_id)
        if isinstance(item, OutputItem) and item.call_id not in called:
            raise PydanticCustomError(
                "call_id", "no function call before it has the call_id {call_id}",
                {"at": (i, "call_id"), "call_id": repr(item.call_id)[:80]},
            )  # fmt: skip
    return items


_Items = Annotated[list[Input], Field(min_length=1, fail_fast=True), AfterValidator(_calls_before_outputs)]
_items: TypeAdapter[list[InputItem]] = TypeAdapter(_Items, config=ConfigDict(strict=True))


def _given(data: Any, info: ValidationInfo) -> str | list[InputItem]:
    if isinstance(data, str):
        return data
    if not isinstance(data, list):
        raise PydanticCustomError("input_type", "must be a string or a list of items")
    return within(_items, data, info)


Given = Annotated[str | list[InputItem], BeforeValidator(_given)]


def messages(instructions: str | None, given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The chat messages: what the model thought, said and called in one turn is one assistant message."""
    found: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant message that the next item may belong to
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for item in given:
        ours = not isinstance(item, OutputItem) and (not isinstance(item, MessageItem) or item.role == "assistant")
        if ours and (turn is None or _ends(turn, item)):
            turn = {"role": "assistant", "content": None}
            found.append(turn)
        match item:
            case ReasoningItem():
                assert turn is not None
                # What was thought is known from content; a summary is the next best thing to it.
                thought = item.summary if item.content is None else item.content
                if thought:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case CallItem():
                assert turn is not None
                function = {"name": item.name, "arguments": item.arguments}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case OutputItem():
                turn = None
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case MessageItem(role="assistant"):
                assert turn is not None
                turn["content"] = item.content
            case MessageItem():
                turn = None
                found.append({"role": item.role, "content": item.content})
    return [message for message in found if message != {"role": "assistant", "content": None}]


def _ends(turn: Mapping[str, Any], item: InputItem) -> bool:
    """Whether the item cannot be of this turn: within one the model thinks, then speaks, then calls."""
    spoken, called = turn["content"] is not None, "tool_calls" in turn
    match item:
        case ReasoningItem():
            return spoken or called
        case MessageItem():
            return spoken
        case _:
            return False
