"""A row as a conversation: the messages the model read, in chat completions' form whatever endpoint they came to, and
its answer as the last of them.

Knows the bodies of the endpoints as clients send them; knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capture.records import CaptureError, Generation

Message = dict[str, Any]


class UnreadableError(CaptureError):
    """A request that is no conversation of texts."""


@dataclass(frozen=True)
class Conversation:
    """`messages` end with the answer; content is always text. `thinking`: whether it was asked for; None: not said."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    thinking: bool | None


def conversation_of(row: Generation) -> Conversation | None:
    """The row's conversation; None of a raw prompt, which has no turns.

    Raises UnreadableError where there is more to it than text, as other servers' requests may have it.
    """
    try:
        return _conversation_of(row)
    except (LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"generation {row.id}: its request is no conversation") from error


def _conversation_of(row: Generation) -> Conversation | None:
    request = row.request
    if request.get("messages") is not None:
        asked = [_plain(message) for message in request["messages"]]
        tools = list(request.get("tools") or ())
        choice = _allowed(request.get("tool_choice"))
        names = None if choice is None else {tool["function"]["name"] for tool in choice}
        tools = tools if names is None else [tool for tool in tools if tool["function"]["name"] in names]
    elif request.get("input") is not None:
        asked = _from_items(request.get("instructions"), request["input"])
        tools = [_for_chat(tool) for tool in request.get("tools") or ()]
        choice = _allowed(request.get("tool_choice"))
        names = None if choice is None else {tool["name"] for tool in choice}
        tools = tools if names is None else [tool for tool in tools if tool["function"]["name"] in names]
    else:
        return None
    answer: Message = {"role": "assistant", "content": row.response_text}
    if row.reasoning:
        answer["reasoning_content"] = row.reasoning
    if row.tool_calls:
        answer["tool_calls"] = [_call(call) for call in row.tool_calls]
    shown = [] if request.get("tool_choice") == "none" else tools
    return Conversation([*asked, answer], shown, _thinking(request))


def said(row: Generation) -> str:
    """All that was thought, said and called, as text; nothing where nothing was."""
    calls = json.dumps(list(row.tool_calls), ensure_ascii=False) if row.tool_calls else ""
    return " ".join(part for part in (row.reasoning, row.response_text, calls) if part)


def opening(row: Generation) -> str:
    """The conversation up to the end of its first user turn, the same in all that follows from it; a raw prompt whole.

    Raises as `conversation_of` does.
    """
    conversation = conversation_of(row)
    if conversation is None:
        return json.dumps(row.request.get("prompt"), ensure_ascii=False)
    asked = conversation.messages[:-1]
    users = [at for at, message in enumerate(asked) if message["role"] == "user"]
    return json.dumps(asked[: users[0] + 1] if users else asked, ensure_ascii=False)


def _allowed(choice: Any) -> Sequence[Mapping[str, Any]] | None:
    """The tools that an `allowed_tools` choice leaves, in either endpoint's form."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    tools: Sequence[Mapping[str, Any]] = (choice.get("allowed_tools") or choice)["tools"]
    return tools


def _thinking(request: Mapping[str, Any]) -> bool | None:
    """What is said most directly counts."""
    told = (request.get("chat_template_kwargs") or {}).get("enable_thinking")
    told = request.get("enable_thinking") if told is None else told
    if told is not None:
        return bool(told)
    effort = request.get("reasoning_effort") or (request.get("reasoning") or {}).get("effort")
    return None if effort is None else effort != "none"


def _plain(message: Mapping[str, Any]) -> Message:
    content = _text(message.get("content"))
    content = _text(message.get("refusal")) if content is None else content
    plain: Message = {"role": _role(message["role"]), "content": content or ""}
    thought = message.get("reasoning_content")
    if (thought := message.get("reasoning") if thought is None else thought) is not None:
        plain["reasoning_content"] = thought
    if message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return plain | {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}


def _role(role: str) -> str:
    """OpenAI's newer name for a system message is one that other programs take for somebody else."""
    return "system" if role == "developer" else role


def _text(content: Any) -> str | None:
    """Parts joined, as the server joins them."""
    if content is None or isinstance(content, str):
        return content
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` as JSON text."""
    arguments = call["function"].get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def _for_chat(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _from_items(instructions: str | None, given: str | Iterable[Mapping[str, Any]]) -> list[Message]:
    """The Responses API's items as messages: what was thought, said and called in one turn is one of them."""
    found: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    turn: Message | None = None
    for item in given:
        kind = item.get("type", "message")
        ours = kind in ("reasoning", "function_call") or (kind == "message" and item["role"] == "assistant")
        if not ours:
            turn = None
            found.append(_turn_of_others(kind, item))
            continue
        if turn is None or _ends(turn, kind):
            turn = {"role": "assistant"}
            found.append(turn)
        match kind:
            case "reasoning":
                content = _text(item.get("content"))
                thought = _text(item.get("summary")) if content is None else content
                if thought:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "function_call":
                call = {"id": item["call_id"], "function": item}
                turn.setdefault("tool_calls", []).append(_call(call))
            case _:
                turn["content"] = _text(item["content"]) or ""
    return [
        {"role": message["role"], "content": "", **message} for message in found if message != {"role": "assistant"}
    ]


def _turn_of_others(kind: str, item: Mapping[str, Any]) -> Message:
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"]) or ""}
    return {"role": _role(item["role"]), "content": _text(item["content"]) or ""}


def _ends(turn: Message, kind: str) -> bool:
    """Whether an item of this kind cannot be of the turn: within one the model thinks, then speaks, then calls."""
    spoken, called = "content" in turn, "tool_calls" in turn
    return {"reasoning": spoken or called, "message": spoken}.get(kind, False)
