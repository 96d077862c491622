"""OpenAI messages made ready for a chat template: content as one string, reasoning told apart, arguments as mappings.

Knows no tokenizer; must never change what a client said beyond joining, splitting and parsing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from backend.interface import InvalidRequest

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as Qwen's template takes them; raises InvalidRequest naming what it could not.

    Content is a string or None, a call's arguments are a mapping, a developer is the system, and what the system says
    before anybody else is one message.
    """
    turns = [_for_template(f"messages[{index}]", message) for index, message in enumerate(messages)]
    leading = list(takewhile(lambda turn: turn.get("role") == "system", turns))
    if len(leading) > 1:
        said = [turn["content"] for turn in leading if turn.get("content")]
        turns[: len(leading)] = [{"role": "system", "content": "\n\n".join(said)}]
    return turns


def split_reasoning(message: Mapping[str, Any], stand_in: Callable[[str], str]) -> dict[str, Any]:
    """An assistant's `<think>…</think>` content as `reasoning_content` and content, as Qwen's template splits it.

    Done here because the template looks for the literals, which are hidden from it. (It looks for `<tool_response>`
    around a user's content too, to tell tool results from questions; written by a client that is plain text, so such
    a message counts as a question.) `stand_in` keeps an answer's indentation from being trimmed by the template, which
    trims content before it splits and not after.
    """
    content = message.get("content")
    told_apart = any(isinstance(message.get(name), str) for name in _REASONING_FIELDS)
    if message.get("role") != "assistant" or told_apart or not isinstance(content, str) or "</think>" not in content:
        return dict(message)
    before, *_, after = content.strip().split("</think>")
    reasoning = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = after.lstrip("\n")
    if indent := answer[: len(answer) - len(answer.lstrip())]:
        answer = stand_in(indent) + answer[len(indent) :]
    return {**message, "reasoning_content": reasoning, "content": answer}


def _for_template(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", param="messages")
    turn = dict(message)
    content = turn.get("content")
    if isinstance(content, list | tuple):
        turn["content"] = "".join(_text(f"{where}.content[{at}]", part) for at, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be text, a list of parts or null", param="messages")
    if turn.get("role") == "developer":
        turn["role"] = "system"
    if isinstance(turn.get("reasoning"), str) and not isinstance(turn.get("reasoning_content"), str):
        turn["reasoning_content"] = turn["reasoning"]
    if isinstance(calls := turn.get("tool_calls"), list | tuple):
        turn["tool_calls"] = [_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    return turn


def _call(where: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("arguments") is None:
        return call
    arguments = _arguments(f"{where}.function.arguments", function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(where: str, given: Any) -> Mapping[str, Any]:
    """OpenAI's are JSON text; an empty one stands for none."""
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_no_constant) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not valid JSON: {error}", param=where) from None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where} must be a JSON object", param=where)
    return given


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise InvalidRequest(f"{where} has type {kind!r}: only text parts are supported", param="messages")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param="messages")
    return str(part["text"])
