"""Which part of an answer each of its tokens belongs to, by the markup between them.

Knows ids alone; what the parts say is told apart from their text, elsewhere.
"""

from __future__ import annotations

from typing import Literal

from backend.text.tokenizer import ChatTokenizer

Part = Literal["reasoning", "content", "call"]


class Parts:
    """Takes an answer's tokens one after the other. Markup belongs to the part that it begins or ends."""

    def __init__(self, tokenizer: ChatTokenizer, *, in_reasoning: bool, calls: bool) -> None:
        """`calls`: the answer may have some."""
        self._thought = tokenizer.literal_id("</think>")
        self._begin, self._end = (
            tokenizer.literal_id(tag) if calls else None for tag in ("<tool_call>", "</tool_call>")
        )
        self.now: Part = "reasoning" if in_reasoning else "content"

    def of(self, token_id: int) -> Part:
        """The part of the token that comes next."""
        if self.now == "content" and token_id == self._begin:
            self.now = "call"
        part = self.now
        if token_id == (self._thought if part == "reasoning" else self._end):
            self.now = "content"
        return part
