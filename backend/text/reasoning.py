"""An answer's text told apart into reasoning and content, while it arrives.

Runs on the event loop, after stop strings; must never know tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.text.markup import SPACE, tags

_END = {"end": ("</think>",)}
_ENDS = tags(**_END)
# As in vLLM's qwen3 parser: the model may forget `</think>` before a call, and may speak of `<tool_call>`.
_ENDS_OR_CALLS = tags(**_END, call=("<tool_call>", SPACE, "<function="))


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

    `end`: how many characters of the text came before what ended the reasoning; None while nothing has.
    """

    def __init__(self, in_reasoning: bool, *, calls: bool = False) -> None:
        """`calls`: a function called inside the reasoning ends it too, and is content."""
        self.in_reasoning = in_reasoning
        self.end: int | None = None if in_reasoning else 0
        self._ends = _ENDS_OR_CALLS if calls else _ENDS
        self._drop_newlines = in_reasoning  # nothing but newlines seen yet on the side being written
        self._held = ""  # the end of the reasoning so far: newlines, or what may end it
        self._seen = 0

    def push(self, text: str) -> Split:
        """What `text` makes certain."""
        if not self.in_reasoning:
            return Split(content=self._begin(text))
        self._seen += len(text)
        text = self._begin(self._held + text)
        found = self._ends.search(text)
        before = text if found is None else text[: found.start()]
        if found is None or found.lastgroup is None:
            certain = before.rstrip("\n")
            self._held = text[len(certain) :]
            self._drop_newlines = self._drop_newlines and not certain
            return Split(reasoning=certain)
        self.end = self._seen - len(text) + found.start()
        self.in_reasoning, self._drop_newlines, self._held = False, True, ""
        after = text[found.end() if found.lastgroup == "end" else found.start() :]
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
