"""The output of one response: a generation's events become items, and every step of their making a stream event.

Knows the wire's shapes; knows neither HTTP nor how the generation is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from backend.interface import ChatEvent, GenerationFailed, ToolCallDelta
from serve.answers import token_logprob
from serve.schemas.answer import TokenLogprob
from serve.schemas.response_output import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)

Told = dict[str, Any]  # a stream event, not numbered yet
Kind = Literal["reasoning", "message", "function_call"]
PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
TEXTS: dict[Kind, str] = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}


class Output:
    """`add` every event of the generation, then `close`; `items` is what has come of them.

    One item is open at a time: what the model thinks, says and calls comes one after the other.
    """

    def __init__(self, response_id: str, *, logprobs: bool) -> None:
        self.items: list[OutputItem] = []
        self._response_id, self._logprobs = response_id, logprobs
        self._open: _Item | None = None
        self._calls = 0  # begun so far
        self._unsaid: list[TokenLogprob] = []  # tokens whose text is still to come

    def add(self, event: ChatEvent) -> Iterator[Told]:
        """What a client hears of the event."""
        if event.reasoning:
            yield from self._turn_to("reasoning")
            yield self._more(event.reasoning)
        if self._logprobs:
            self._unsaid += [token_logprob(token) for token in event.tokens if token.part == "content"]
        if event.content:
            yield from self._turn_to("message")
        if event.content or (self._unsaid and self._is_open("message")):
            yield self._more(event.content)
        for delta in event.tool_calls:
            yield from self._call(delta)

    def close(self, status: ItemStatus) -> Iterator[Told]:
        """End the last item. An answer that is complete has a message, if only an empty one, or a call."""
        if status == "completed" and not self._is_open("function_call"):
            yield from self._turn_to("message")
            if self._unsaid:
                yield self._more("")
        yield from self._end(status)

    def _call(self, delta: ToolCallDelta) -> Iterator[Told]:
        if delta.index == self._calls:
            self._calls += 1
            self._unsaid = []
            yield from self._begin("function_call", call_id=delta.id or "", name=delta.name or "")
        elif delta.index != self._calls - 1 or not self._is_open("function_call"):
            raise GenerationFailed("The backend went back to a tool call that it had left.")
        if delta.arguments:
            yield self._more(delta.arguments)

    def _is_open(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _turn_to(self, kind: Kind) -> Iterator[Told]:
        if not self._is_open(kind):
            yield from self._begin(kind)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Told]:
        yield from self._end("completed")
        index = len(self.items)
        self._open = item = _Item(kind, f"{PREFIXES[kind]}_{self._response_id}_{index}", index, call_id, name)
        yield {"type": "response.output_item.added", "output_index": index, "item": item.told("in_progress")}
        if (part := item.part()) is not None:
            yield {"type": "response.content_part.added", **item.place, "part": part}

    def _more(self, text: str) -> Told:
        item = self._open
        assert item is not None
        item.pieces.append(text)
        told = {"type": f"response.{TEXTS[item.kind]}.delta", **item.place, "delta": text}
        if item.kind == "message":
            tokens, self._unsaid = self._unsaid, []
            item.tokens += tokens
            told["logprobs"] = tokens
        return told

    def _end(self, status: ItemStatus) -> Iterator[Told]:
        if (item := self._open) is None:
            return
        self._open = None
        told = {"type": f"response.{TEXTS[item.kind]}.done", **item.place}
        match part := item.part():
            case None:
                yield {**told, "arguments": item.text}
            case ReasoningText():
                yield {**told, "text": part.text}
            case OutputText():
                yield {**told, "text": part.text, "logprobs": part.logprobs}
        if part is not None:
            yield {"type": "response.content_part.done", **item.place, "part": part}
        self.items.append(item.told(status))
        yield {"type": "response.output_item.done", "output_index": item.index, "item": self.items[-1]}


@dataclass
class _Item:
    """An item in the making: the pieces of its one text."""

    kind: Kind
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> Told:
        """Where its text is, as stream events say it."""
        part = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.index, **part}

    def part(self) -> OutputText | ReasoningText | None:
        """Its content so far; a call has none."""
        match self.kind:
            case "reasoning":
                return ReasoningText(type="reasoning_text", text=self.text)
            case "message":
                return OutputText(type="output_text", annotations=[], logprobs=self.tokens.copy(), text=self.text)
            case "function_call":
                return None

    def told(self, status: ItemStatus) -> OutputItem:
        """As a client sees it. In progress it has no content yet: parts are added by events of their own."""
        part = None if status == "in_progress" else self.part()
        match self.kind:
            case "reasoning":
                content = [part] if isinstance(part, ReasoningText) else []
                return OutputReasoning(id=self.id, type="reasoning", status=status, summary=[], content=content)
            case "message":
                said = [part] if isinstance(part, OutputText) else []
                return OutputMessage(id=self.id, type="message", status=status, role="assistant", content=said)
            case "function_call":
                return OutputCall(
                    id=self.id,
                    type="function_call",
                    status=status,
                    call_id=self.call_id,
                    name=self.name,
                    arguments=self.text,
                )
