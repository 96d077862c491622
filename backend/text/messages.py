"""OpenAI messages made ready for a chat template: content as one string, reasoning told apart from it.

Knows no tokenizer; must never change what a client said beyond joining and splitting it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backend.interface import InvalidRequest

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def flatten(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """`message` with its content as a string or None; raises InvalidRequest naming the part that is not text.

    `index`: the message's place, for the error.
    """
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] must be an object", param="messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"messages[{index}].content must be text, a list of parts or null", param="messages")
    return {**message, "content": "".join(_text(f"messages[{index}].content[{at}]", p) for at, p in enumerate(content))}


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


def _text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise InvalidRequest(f"{where} has type {kind!r}: only text parts are supported", param="messages")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param="messages")
    return str(part["text"])
