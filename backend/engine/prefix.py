"""The prefix cache of a hybrid model: prompts' pages, and snapshots of the recurrent state at grid boundaries.

A snapshot stands for the prompt rows before its boundary, as the prefill form left them; nothing that decoding wrote is
ever in it. By the prefix law an answer is bitwise the same with a hit and without.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.engine.cache import PAGE, PromptState, pages_for
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
        self._memory, self.budget = memory, budget
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._held: Counter[int] = Counter()  # by how many snapshots each page is held
        self._asked: tuple[Sequence[int], str, list[bytes]] = ((), "", [])  # the last one's prompt, salt and keys
        self.bytes = 0  # of the snapshots' states
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # of them, found

    def __len__(self) -> int:
        return len(self._snapshots)

    def begin(
        self, prompt: Sequence[int], salt: str, pages: int, look_up: bool = True
    ) -> tuple[Place, Snapshot | None] | None:
        """A place of so many pages for a prompt, with as much of the prompt as is known; without `look_up`, none of it.

        Whole pages of it are shared, the rest of the last and the state are copied. A hit ends before the prompt's last
        token. None, and nothing dropped, where there is no room.
        """
        known = self._find(prompt, salt) if look_up else None
        # Where a hit's copy has no room beside its source, the source must go.
        for snapshot in (known, None) if known else (None,):
            place = self._place(len(prompt), pages, snapshot)
            if place:
                return place, snapshot
        return None

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
        if size > self.budget:
            return
        while self.bytes + size > self.budget:
            self._drop(next(iter(self._snapshots)))
        pages = place.pages[: pages_for(boundary)]
        self._memory.table.share(pages)
        self._held.update(pages)
        self._snapshots[key] = Snapshot(boundary, pages, place.state.copy(), blocks)
        self.bytes += size

    def make_room(self, pages: int) -> bool:
        """Drop snapshots until so many pages are free; False, and none dropped, where that would not be enough."""
        table = self._memory.table
        if table.free >= pages:
            return True
        ours = {page for page, count in self._held.items() if count and table.holders(page) == count}
        if table.free + len(ours) < pages:
            return False
        for key, snapshot in list(self._snapshots.items()):
            if not ours.isdisjoint(snapshot.pages):  # what running sequences hold as well costs nothing to remember
                self._drop(key)
            if table.free >= pages:
                break
        return True

    def learn(self, snapshot: Snapshot, place: Place, block: str) -> None:
        """A drafter block's rows before the boundary have just been run on the place that begins with this snapshot."""
        if not any(one is snapshot for one in self._snapshots.values()):
            return  # it had to make room meanwhile
        whole, rest = divmod(snapshot.boundary, PAGE)
        if rest:  # whole pages are the same ones; this copy has all that its source has, and those rows
            self._memory.copy(place.pages[whole], snapshot.pages[whole], rest)
        snapshot.blocks.add(block)

    def forget_block(self, block: str) -> None:
        """No snapshot has a drafter block's rows any more: they have been let go."""
        for snapshot in self._snapshots.values():
            snapshot.blocks.discard(block)

    def clear(self) -> None:
        for key in list(self._snapshots):
            self._drop(key)

    def _find(self, prompt: Sequence[int], salt: str) -> Snapshot | None:
        """The longest known beginning."""
        if self._asked[0] is not prompt or self._asked[1] != salt:  # who waits for room asks again in every turn
            self._asked = prompt, salt, _keys(prompt, salt)
        keys = self._asked[2]
        for boundary in range(_last_boundary(len(prompt)), 0, -GRID):
            if snapshot := self._snapshots.get(keys[boundary // GRID]):
                self._snapshots.move_to_end(keys[boundary // GRID])
                return snapshot
        return None

    def _place(self, prompt: int, pages: int, snapshot: Snapshot | None) -> Place | None:
        memory, known = self._memory, snapshot.pages if snapshot else []
        whole, rest = divmod(snapshot.boundary if snapshot else 0, PAGE)
        memory.table.share(known)  # so that making room does not take what is to be copied
        try:
            if not self.make_room(pages - whole):
                return None
            place = Place(prompt)
            memory.table.share(known[:whole])
            place.pages += known[:whole]
            for _ in range(pages - whole):
                memory.take(place.pages)
            if rest:
                memory.copy(known[whole], place.pages[whole], rest)
            place.state = snapshot.state.copy() if snapshot else None
            return place
        finally:
            memory.table.release(known)

    def _drop(self, key: bytes) -> None:
        snapshot = self._snapshots.pop(key)
        self.bytes -= snapshot.state.bytes
        self._held.subtract(snapshot.pages)
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
