"""An answer's text told apart into reasoning and content, while it arrives.

Runs on the event loop, after stop strings; must never know tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.text.stops import overlap

_END = "</think>"


@dataclass(frozen=True)
class Split:
    """Text to append to each side."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Reasoning ends at the first `</think>`; the newlines the template stands around it are dropped.

    Joined, `reasoning` is the text before `</think>` (all of it where none came) without newlines around it, and
    `content` the text after it without newlines before it. Where the prompt does not leave the assistant inside its
    reasoning (`Prompt.in_reasoning`) everything is content, unchanged.
    """

    def __init__(self, in_reasoning: bool) -> None:
        self.in_reasoning = in_reasoning
        self._drop_newlines = in_reasoning  # nothing but newlines seen yet on the side being written
        self._held = ""  # the end of the reasoning so far: newlines, or what may become `</think>`

    def push(self, text: str) -> Split:
        """What `text` makes certain."""
        if not self.in_reasoning:
            return Split(content=self._begin(text))
        before, end, after = self._begin(self._held + text).partition(_END)
        if not end:
            certain = before[: len(before) - overlap(before, _END)].rstrip("\n")
            self._held = before[len(certain) :]
            self._drop_newlines = self._drop_newlines and not certain
            return Split(reasoning=certain)
        self.in_reasoning, self._drop_newlines, self._held = False, True, ""
        return Split(before.rstrip("\n"), self._begin(after))

    def finish(self) -> Split:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return Split(reasoning=held.rstrip("\n"))

    def _begin(self, text: str) -> str:
        if not self._drop_newlines:
            return text
        text = text.lstrip("\n")
        if not self.in_reasoning:
            self._drop_newlines = not text
        return text
