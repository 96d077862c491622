"""The text of one answer as its tokens arrive: detokenized, cut at stop strings.

Runs on the engine's thread; must never know reasoning or tool calls, which are told apart later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.text.detokenizer import Detokenizer
from backend.text.stops import StopMatcher


@dataclass(frozen=True)
class Piece:
    """Text to append to the answer, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class AnswerText:
    """Joined, its pieces are the decoded answer up to its first stop string, whatever the steps it came in."""

    def __init__(self, text_bytes: Callable[[int], bytes], stops: Sequence[str]) -> None:
        """`text_bytes`: as for Detokenizer. Raises InvalidRequest for an empty stop string."""
        self._detokenizer = Detokenizer(text_bytes)
        self._stops = StopMatcher(stops)

    def push(self, token_id: int) -> Piece:
        """The text this token makes certain. A token whose piece has a stop ends the answer."""
        return Piece(*self._stops.push(self._detokenizer.push(token_id)))

    def finish(self) -> Piece:
        """What was held back, once no token follows; an unfinished character may still complete a stop string."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return Piece(text + self._stops.flush(), stop)
