"""The prefix cache of a hybrid model: prompts' pages, and snapshots of the recurrent state at grid boundaries.

A snapshot stands for the prompt rows before its boundary, as the prefill form left them; nothing that decoding wrote is
ever in it. By the prefix law an answer is bitwise the same with a hit and without.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.engine.cache import PAGE, PromptState
from backend.engine.forms import GRID
from backend.engine.memory import Memory, Place

EVERY = 1024  # positions between the snapshots of a long prompt


@dataclass
class Snapshot:
    """Prompt rows [0, boundary): shared pages, the state after them, which drafter blocks have rows in the pages."""

    boundary: int
    pages: list[int]
    state: PromptState
    blocks: set[str]


class PrefixCache:
    """Least recently used out first, where the snapshots' states outgrow `budget` bytes or a sequence needs a page."""

    def __init__(self, memory: Memory, budget: int) -> None:
        self._memory, self._budget = memory, budget
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self.bytes = 0  # of the snapshots' states
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # of them, found

    def __len__(self) -> int:
        return len(self._snapshots)

    def begin(self, prompt: Sequence[int], salt: str) -> tuple[Place, Snapshot | None]:
        """A place for a prompt, with as much of it as is known: shared pages, a copy of the last one and of the state.

        A hit ends before the prompt's last token. Raises IndexError when there is no page for the copy.
        """
        place = Place(len(prompt))
        keys = _keys(prompt, salt)
        boundary = next(
            (b for b in range(_last_boundary(len(prompt)), 0, -GRID) if keys[b // GRID] in self._snapshots), 0
        )
        if not boundary:
            return place, None
        key = keys[boundary // GRID]
        snapshot = self._snapshots[key]
        self._snapshots.move_to_end(key)
        whole, rest = divmod(boundary, PAGE)
        shared = snapshot.pages[:whole]
        self._memory.table.share(snapshot.pages)  # all of them, so that making room does not take what is copied
        try:
            if rest:
                own: list[int] = shared[-1:]
                self.make_room(1)
                self._memory.take(own)
                self._memory.copy(snapshot.pages[whole], own[-1], rest)
                place.pages = [*shared, own[-1]]
            else:
                place.pages = shared
        except IndexError:
            self._memory.table.release(shared)
            raise
        finally:
            self._memory.table.release(snapshot.pages[whole:])
        place.state = snapshot.state.copy()
        return place, snapshot

    def count(self, queried: int, found: int) -> None:
        """A prompt of `queried` tokens began with `found` of them known."""
        self.queries += queried
        self.hits += found

    def wanted(self, prompt: int, turn: int, boundary: int) -> bool:
        """Is a snapshot at this boundary worth keeping? For a prompt so long whose last user turn begins at `turn`."""
        return boundary % EVERY == 0 or boundary in (_last_boundary(prompt), turn // GRID * GRID)

    def keep(self, prompt: Sequence[int], salt: str, boundary: int, place: Place, blocks: set[str]) -> None:
        """Remember the rows before `boundary`, which have just been run."""
        assert place.state is not None
        key = _keys(prompt[:boundary], salt)[-1]
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return
        size = place.state.bytes
        if size > self._budget:
            return
        while self.bytes + size > self._budget:
            self._drop()
        pages = place.pages[: -(-boundary // PAGE)]
        self._memory.table.share(pages)
        self._snapshots[key] = Snapshot(boundary, pages, place.state.copy(), blocks)
        self.bytes += size

    def make_room(self, pages: int) -> bool:
        """Drop snapshots until so many pages are free; False where even none left is not enough."""
        while self._memory.table.free < pages and self._snapshots:
            self._drop()
        return self._memory.table.free >= pages

    def clear(self) -> None:
        while self._snapshots:
            self._drop()

    def _drop(self) -> None:
        _, snapshot = self._snapshots.popitem(last=False)
        self.bytes -= snapshot.state.bytes
        self._memory.table.release(snapshot.pages)


def _last_boundary(prompt: int) -> int:
    """The last grid boundary strictly before the prompt's last token."""
    return (prompt - 1) // GRID * GRID


def _keys(prompt: Sequence[int], salt: str) -> list[bytes]:
    """One key per grid boundary, [0] for none of the prompt: each a digest of all tokens before it and the salt."""
    ids = np.asarray(prompt, "<u4")
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    keys = [key]
    for start in range(0, len(ids) - len(ids) % GRID, GRID):
        key = hashlib.blake2b(key + ids[start : start + GRID].tobytes(), digest_size=32).digest()
        keys.append(key)
    return keys
