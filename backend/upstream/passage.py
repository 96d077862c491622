"""One streamed answer on its way from the upstream to the client: each chunk is noted, and passed on in its order.

A chunk that ends a choice, and what follows the last of them, is held back: it leaves when the row is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.interface import ChatEvent
from backend.upstream.answer import Books
from backend.upstream.faults import Failure, in_band, parsed
from backend.upstream.request import USAGE, Extras, choices, hide

# What a chunk has besides what it tells.
HEAD = ("id", "object", "created", "model", "system_fingerprint", "choices")


class Passage:
    """`take` the events as they arrive; `held` are the chunks that have to wait, `failure` why no more will come."""

    def __init__(self, books: Books, answer_id: str, extras: Extras) -> None:
        self._books, self._id, self._extras = books, answer_id, extras
        self.held: list[dict[str, Any]] = []
        self.done = False
        self.failure: Failure | None = None

    def take(self, events: list[bytes]) -> ChatEvent:
        """All that arrived together, as one event."""
        said: list[ChatEvent] = []
        chunks: list[Mapping[str, Any]] = []
        for data in events:
            if self.done or self.failure is not None:
                break
            if data.strip() == b"[DONE]":
                self.done = True
            elif (chunk := parsed(data)) is None:
                self.failure = Failure("The upstream sent an event that is not JSON.")
            elif (failure := in_band(chunk)) is not None:
                self.failure = failure
            else:
                said.append(self._books.take(chunk))
                chunks += self._passed_on(chunk)
        return ChatEvent(
            content="".join(one.content for one in said),
            reasoning="".join(one.reasoning for one in said),
            tool_calls=tuple(delta for one in said for delta in one.tool_calls),
            tokens=tuple(token for one in said for token in one.tokens),
            raw=tuple(chunks),
        )

    def _passed_on(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunk as the client is to have it now: none where it is held back or was ours alone."""
        told = choices(chunk)
        ours = USAGE in self._extras and bool(chunk.get("usage")) and not told
        hide(chunk, self._extras)
        if ours:
            # llama.cpp tells its timings in the last chunk, which would be the one before, had we not asked.
            if self.held:
                rest = {name: value for name, value in chunk.items() if name not in HEAD}
                self.held[-1] = {**rest, **self.held[-1]}
            return []
        chunk["id"] = self._id
        if (self.held and not told) or any(choice.get("finish_reason") for choice in told):
            self.held.append(chunk)
            return []
        return [chunk]
