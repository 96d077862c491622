"""Who runs: admission by memory in order of arrival, one prompt after the other, preemption of the youngest.

Owns the memory's accounts; computes nothing. A preempted sequence loses its place, not its tokens: readmitted, its
prompt is run again and its tokens are pushed through the verify form, so nothing of it changes (law L1).
"""

from __future__ import annotations

import time
from collections import deque

from backend.drafters.protocol import Drafter
from backend.engine.cache import PAGE, pages_for
from backend.engine.forms import GRID
from backend.engine.memory import Memory, Place
from backend.engine.prefix import PrefixCache, Snapshot
from backend.engine.sequence import Sequence
from backend.engine.speculation import go_on_without_drafts
from backend.ops.delta_replay import MAX_ROWS


class Scheduler:
    """Sequences that wait, and those that run: some in their prompts, some decoding, in the order of their slots."""

    def __init__(self, memory: Memory, max_sequences: int, prefix: PrefixCache | None) -> None:
        self.memory, self.prefix = memory, prefix
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []  # the one in slot i is i-th
        self.preemptions = 0
        self._max_sequences = max_sequences

    def renewed(self) -> Scheduler:
        """One over the same memory, whose accounts have been begun anew, with an empty prefix cache."""
        prefix = self.prefix and PrefixCache(self.memory, self.prefix.budget)
        return Scheduler(self.memory, self._max_sequences, prefix)

    @property
    def longest(self) -> int:
        """Positions that a sequence may need at most, if it is ever to run."""
        return self.memory.table.total * PAGE - MAX_ROWS

    @property
    def usage(self) -> float:
        """Share of the pages that running sequences hold."""
        places = [sequence.place for sequence in list(self.running)]  # read on other threads than the engine's
        held = {page for place in places if place for page in place.pages}
        return len(held) / max(self.memory.table.total, 1)

    def admit(self) -> None:
        """Let the longest waiting one run, if no other's prompt is under way and there is memory for its own.

        Prompts run one after the other; that each begins only when its turn has come lets it find what those before it
        left in the prefix cache, and keeps no memory for it meanwhile.
        """
        if not self.waiting or self.prompt or len(self.running) == self._max_sequences:
            return
        if self._begin(self.waiting[0]):
            sequence = self.waiting.popleft()
            if sequence.admitted_at is None:
                sequence.admitted_at = time.monotonic()
            self.running.append(sequence)

    @property
    def prompt(self) -> Sequence | None:
        """The running sequence whose prompt is under way."""
        return next((sequence for sequence in self.running if not sequence.decoding), None)

    def chunk(self, sequence: Sequence) -> int:
        """Rows of its next prompt chunk: up to the grid's next line."""
        return min(GRID, len(sequence.prompt) - sequence.prefilled)

    def after_chunk(self, sequence: Sequence) -> None:
        """Of one that goes on: remember its prefix where that is worth it, let it join where its prompt is done."""
        assert sequence.place is not None
        at, length = sequence.prefilled, len(sequence.prompt)
        if (
            self.prefix is not None
            and at % GRID == 0
            and at < length
            and self.prefix.wanted(length, sequence.last_turn, at)
        ):
            block = sequence.drafter.block if sequence.drafter else None
            self.prefix.keep(sequence.prompt, sequence.salt, at, sequence.place, {block} if block else set())
        if at == length:
            assert sequence.place.state is not None
            sequence.place.slot = len(self.decoding)
            self.memory.slots.join(sequence.place.slot, sequence.place.state)
            sequence.place.state = None
            self.decoding.append(sequence)

    def reserve(self) -> None:
        """Pages for the next step of every sequence being decoded; the youngest make room where there are none."""
        for sequence in list(self.running):  # the oldest first: it never has to make room
            if sequence.decoding:
                self._grow(sequence, sequence.held + MAX_ROWS)

    def leave(self, sequence: Sequence) -> None:
        """Take back what an ended sequence holds."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._vacate(sequence)

    def _begin(self, sequence: Sequence) -> bool:
        """Give it a place with room for its prompt and first step, without taking anybody else's."""
        begun = self._place(sequence, pages_for(sequence.length + MAX_ROWS))
        if begun is None:
            return False
        place, snapshot = begun
        sequence.place = place
        sequence.prefilled = snapshot.boundary if snapshot else 0
        sequence.replayed = 0
        if self.prefix is not None and sequence.admitted_at is None and not sequence.scoring:
            sequence.cached = sequence.prefilled
            self.prefix.count(len(sequence.prompt), sequence.cached)
        if sequence.drafter:
            sequence.draft_state = sequence.drafter.new_state(sequence.prompt, place.pages)
            if snapshot:
                try:
                    self._resume(sequence, sequence.drafter, place, snapshot)
                except Exception:
                    go_on_without_drafts(sequence)
        return True

    def _resume(self, sequence: Sequence, drafter: Drafter, place: Place, snapshot: Snapshot) -> None:
        block = drafter.block
        known = block is None or block in snapshot.blocks
        drafter.resume(sequence.draft_state, snapshot.boundary, known)
        if self.prefix is not None and block is not None and not known:
            self.prefix.learn(snapshot, place, block)

    def _place(self, sequence: Sequence, pages: int) -> tuple[Place, Snapshot | None] | None:
        if self.prefix is not None:
            return self.prefix.begin(sequence.prompt, sequence.salt, pages, look_up=not sequence.scoring)
        if not self._room(pages):
            return None
        place = Place(len(sequence.prompt))
        for _ in range(pages):
            self.memory.take(place.pages)
        return place, None

    def _room(self, pages: int) -> bool:
        if self.prefix is not None:
            return self.prefix.make_room(pages)
        return self.memory.table.free >= pages

    def _grow(self, sequence: Sequence, positions: int) -> None:
        while sequence.place and len(sequence.place.pages) < pages_for(positions):
            if self._room(1):
                self.memory.take(sequence.place.pages)
            else:
                self._preempt(self.running[-1])  # it may be the one that grows

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.prefilled = sequence.replayed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        place = sequence.place
        if place is None:
            return
        if place.slot is not None:
            last = self.decoding.pop()
            if last is not sequence:
                assert last.place is not None
                assert last.place.slot is not None
                self.memory.slots.move(last.place.slot, place.slot)
                last.place.slot = place.slot
                self.decoding[place.slot] = last
        self.memory.table.release(place.pages)
        sequence.place = sequence.draft_state = None
