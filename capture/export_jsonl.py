"""Rows as JSON lines of conversations, as trainers read them: TRL, SpecForge, speculators.

Knows those lines; knows neither folders nor manifests, and no chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from capture.conversation import Conversation, UnreadableError, conversation_of
from capture.export import EVERYTHING, SHARD_BYTES, Contents, Export, Format, SkipError, Wanted, export_as, split_of
from capture.records import Generation
from capture.store import Store

FORMAT, FORMAT_VERSION = "draftloop-jsonl", 1
HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: readers refuse the whole file for its escape

# messages: TRL's, with arguments as the objects that chat templates print. conversations: SpecForge's and speculators',
# with arguments as text, so that a loader need not find one type for all of them. Both read tools from text.
Style = Literal["messages", "conversations"]


def export_jsonl(
    store: Store,
    folder: Path,
    wanted: Wanted = EVERYTHING,
    *,
    style: Style = "messages",
    shard_bytes: int = SHARD_BYTES,
    on_row: Callable[[], None] | None = None,
) -> Export:
    """Write every wanted conversation, one a line, as `capture.export.export_as` does: also where only text is kept."""
    form = Format(f"{FORMAT}-{style}", FORMAT_VERSION, ".jsonl", partial(_Lines, style), needs_ids=False)
    return export_as(form, store, folder, wanted, shard_bytes=shard_bytes, on_row=on_row)


def line_of(row: Generation, style: Style) -> dict[str, Any]:
    """The row as one object. Raises SkipError where it has no such form."""
    try:
        conversation = conversation_of(row)
    except UnreadableError:
        raise SkipError("not_text") from None
    if conversation is None:
        raise SkipError("no_chat")
    messages = _with_objects(conversation)
    line: dict[str, Any] = {"id": row.id, style: messages if style == "messages" else conversation.messages}
    if conversation.tools:
        line["tools"] = json.dumps(conversation.tools, ensure_ascii=False)
    if conversation.thinking is not None:
        line["chat_template_kwargs"] = {"enable_thinking": conversation.thinking}
    return {**line, "split": split_of(row)}


class _Lines:
    """The lines of one shard while it grows, as bytes."""

    def __init__(self, style: Style) -> None:
        self.contents = Contents()
        self._style: Style = style
        self._lines = bytearray()

    def add(self, row: Generation, limit: int) -> bool:
        text = json.dumps(line_of(row, self._style), ensure_ascii=False, separators=(",", ":"))
        line = HALF.sub("\ufffd", text).encode() + b"\n"
        if self._lines and len(self._lines) + len(line) > limit:
            return False
        self._lines += line
        self.contents.add(row)
        return True

    def write(self, file: IO[bytes], meta: Mapping[str, Any]) -> None:
        file.write(self._lines)


def _with_objects(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages with every call's arguments as an object. Raises SkipError where one is none: it was cut off."""
    messages = []
    for message in conversation.messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return messages


def _object(arguments: str) -> dict[str, Any]:
    try:
        read = json.loads(arguments) if arguments.strip() else {}
        json.dumps(read, allow_nan=False)  # a number beyond all, which JSON lacks
    except (ValueError, RecursionError):
        raise SkipError("broken_calls") from None
    if not isinstance(read, dict):
        raise SkipError("broken_calls")
    return read
