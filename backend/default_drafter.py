"""Which drafter requests use that name none: the active one, the canary for some, and those before it to go back to.

Knows names alone: neither which drafters there are nor what they do.
"""

from __future__ import annotations

import hashlib
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


@dataclass(frozen=True)
class Canary:
    """A drafter that a share of the requests gets, 0 < share ≤ 1."""

    drafter: str
    share: float


class DefaultDrafter:
    """The default, those before it that promotions have replaced, and the canary beside it."""

    def __init__(self, drafter: str) -> None:
        self._history = deque([Promoted(drafter, time.time())], KEPT)
        self.canary: Canary | None = None

    @property
    def name(self) -> str:
        return self._history[-1].drafter

    @property
    def previous(self) -> str | None:
        """What a roll back makes the default."""
        return self._history[-2].drafter if len(self._history) > 1 else None

    def of(self, request_id: str) -> str:
        """The drafter of a request that names none: by its id alone, so that whoever knows it can tell which it was."""
        if self.canary and place(request_id) < self.canary.share * 2**64:
            return self.canary.drafter
        return self.name

    def state(self, drafter: str) -> str | None:
        """active, canary or previous, the first that it is; None where it is none of them."""
        if drafter == self.name:
            return "active"
        if self.canary and drafter == self.canary.drafter:
            return "canary"
        return "previous" if drafter == self.previous else None

    def promote(self, drafter: str) -> None:
        """Make it the default and end the canary; asking twice is not two promotions."""
        self.canary = None
        if drafter != self.name:
            self._history.append(Promoted(drafter, time.time()))

    def begin_canary(self, drafter: str, share: float) -> None:
        """Give it that share of the requests, in the place of any other canary. Raises InvalidRequest."""
        if drafter == self.name:
            raise InvalidRequest(f"{drafter!r} is the default already: it can be no canary beside it.", param="drafter")
        if not 0 < share <= 1:
            raise InvalidRequest(f"A canary's share is above 0 and at most 1, not {share:g}.", param="canary")
        self.canary = Canary(drafter, share)

    def roll_back(self) -> None:
        """End the canary or else take the last promotion back. Raises InvalidRequest where there is neither."""
        if self.canary:
            self.canary = None
            return
        if len(self._history) == 1:
            raise InvalidRequest(
                f"There is nothing to roll back: {self.name!r} is the default that no promotion has made."
            )
        self._history.pop()
        self._history[-1] = Promoted(self.name, time.time())

    def forget(self, drafter: str) -> None:
        """It cannot be gone back to any more; the default itself cannot be forgotten."""
        kept: list[Promoted] = []
        for one in self._history:
            if one.drafter == drafter and one is not self._history[-1]:
                continue
            if kept and kept[-1].drafter == one.drafter:  # what stood between is what is forgotten
                kept.pop()
            kept.append(one)
        self._history = deque(kept, KEPT)

    def as_json(self) -> list[dict[str, Any]]:
        """Oldest first; the last is in force."""
        return [asdict(one) for one in self._history]


def place(request_id: str) -> int:
    """A request's place among all, 0 … 2⁶⁴ - 1 and even over ids: the first eight bytes of its id's sha256."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")
