"""Counters of the engine: speculation per slot since start and over the last minute (law L5: DESIGN §6 names them)."""

from __future__ import annotations

import threading
import time
from collections import deque

from backend.interface import Step

WINDOW_SECONDS = 60.0


class SpeculationCounts:
    """P_s and A_s per slot; written by the engine thread, read by any."""

    def __init__(self, slots: int) -> None:
        self._lock = threading.Lock()
        self._slots = slots
        self.drafts = 0  # verify steps that proposed at least one slot
        self.proposed = [0] * slots
        self.accepted = [0] * slots
        self._recent: deque[tuple[float, Step]] = deque()

    def add(self, step: Step) -> None:
        """Count one verify step: slot s was proposed iff drafted > s, accepted iff accepted > s."""
        if not step.drafted:
            return
        with self._lock:
            self.drafts += 1
            for slot in range(step.drafted):
                self.proposed[slot] += 1
                self.accepted[slot] += slot < step.accepted
            now = time.monotonic()
            self._recent.append((now, step))
            self._forget(now)

    def snapshot(self) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """drafts, P_s, A_s since start; P_s, A_s of the last WINDOW_SECONDS."""
        with self._lock:
            self._forget(time.monotonic())
            recent = [step for _, step in self._recent]
            proposed = tuple(sum(step.drafted > slot for step in recent) for slot in range(self._slots))
            accepted = tuple(sum(step.accepted > slot for step in recent) for slot in range(self._slots))
            return self.drafts, tuple(self.proposed), tuple(self.accepted), proposed, accepted

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
