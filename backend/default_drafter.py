"""Which drafter requests use that name none, since when, and which ones it was before.

Knows names alone: neither which drafters there are nor what they do.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from backend.interface import InvalidRequest

KEPT = 64  # defaults that can be told of and gone back to


@dataclass(frozen=True)
class Promoted:
    """A default: the drafter's name, and the Unix time from which on it was one."""

    drafter: str
    since: float


class DefaultDrafter:
    """The default, and those before it that promotions have replaced."""

    def __init__(self, drafter: str) -> None:
        self._history = deque([Promoted(drafter, time.time())], KEPT)

    @property
    def name(self) -> str:
        return self._history[-1].drafter

    def promote(self, drafter: str) -> None:
        """Make it the default; without effect where it is, so that asking twice is not two promotions."""
        if drafter != self.name:
            self._history.append(Promoted(drafter, time.time()))

    def roll_back(self) -> None:
        """Take the last promotion back. Raises InvalidRequest where there is none."""
        if len(self._history) == 1:
            raise InvalidRequest(
                f"There is nothing to roll back: {self.name!r} is the default that no promotion has made."
            )
        self._history.pop()
        self._history[-1] = Promoted(self.name, time.time())

    def as_json(self) -> list[dict[str, Any]]:
        """Oldest first; the last is in force."""
        return [asdict(one) for one in self._history]
