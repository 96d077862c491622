"""Stop strings in a text that arrives in pieces: nothing of one is ever let through.

Knows strings; must never know tokens or what the text means.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.interface import InvalidRequest


class StopMatcher:
    """Ends a text at the first stop string to stand complete in it, the longest where several end together.

    As with OpenAI and vLLM the text is cut before the stop string. Where stop strings overlap ("abcd" and "bc" in
    "abcd") the one that is complete first counts, so the result is the same however the text is cut into pieces
    and no further token is needed to decide.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string."""
        if not all(stops):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string that ended it; after that nothing more is shown."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back in case a stop string followed: the text ended without one."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
