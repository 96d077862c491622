"""Counters of the engine: each drafter's slots since start and over the last minute (law L5: DESIGN §6 names them),
and what the steps took that it alone had.

Knows no tensor and no request, only verify steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from backend.interface import DrafterStats, Step, StepTimes

WINDOW_SECONDS = 60.0


@dataclass(frozen=True)
class TimedStep:
    """A verify step whose `batch` sequences all had this drafter, and beside which nothing ran: t_draft + t_verify."""

    drafter: str  # "none" is one that drafts nothing
    batch: int
    accepted: int  # draft tokens, of all its sequences
    seconds: float


class SpeculationCounts:
    """P_s and A_s per drafter and slot; written by the engine thread, read by any.

    `drafters`: the names that are counted at first, in the order of `snapshot`. `slots`: the most a step drafts.
    """

    def __init__(self, drafters: Iterable[str], slots: int) -> None:
        self._lock, self._slots = threading.Lock(), slots
        self._counts = {name: _Counts(slots) for name in drafters}
        self._times: dict[str, dict[int, StepTimes]] = {}

    def begin(self, drafter: str) -> None:
        """Count for one more drafter, after the others; one that is counted goes on as it is."""
        with self._lock:
            self._counts.setdefault(drafter, _Counts(self._slots))

    def forget(self, drafter: str) -> None:
        """Count for it no more: none of its sequences runs."""
        with self._lock:
            self._counts.pop(drafter, None)
            self._times.pop(drafter, None)

    def add(self, drafter: str, step: Step) -> None:
        """Count one sequence's verify step: slot s was proposed iff drafted > s, accepted iff accepted > s.

        Raises KeyError for a drafter that is not counted, IndexError for more drafts than slots.
        """
        with self._lock:
            self._counts[drafter].add(step, time.monotonic())

    def add_timed(self, step: TimedStep) -> None:
        """Count what a step took, under its drafter and its batch rounded up to a power of two.

        Not of a drafter that is not counted: the step's end may come after that of its last sequence.
        """
        bucket = 1 << (step.batch - 1).bit_length()
        with self._lock:
            if step.drafter not in self._counts and step.drafter != "none":
                return
            of = self._times.setdefault(step.drafter, {})
            known = of.get(bucket, StepTimes(bucket))
            of[bucket] = StepTimes(
                batch=bucket,
                steps=known.steps + 1,
                sequences=known.sequences + step.batch,
                accepted=known.accepted + step.accepted,
                seconds=known.seconds + step.seconds,
            )

    def times(self, drafter: str) -> tuple[StepTimes, ...]:
        """What the steps took that this drafter alone had ("none": those without any), the smallest batches first."""
        with self._lock:
            of = self._times.get(drafter, {})
            return tuple(of[bucket] for bucket in sorted(of))

    def snapshot(self) -> tuple[DrafterStats, ...]:
        """One for each drafter that is counted, zeros included; all as of one moment."""
        with self._lock:
            now = time.monotonic()
            return tuple(counts.stats(name, now) for name, counts in self._counts.items())


class _Counts:
    """One drafter's. The recent sums are kept, not made anew for each reader: the engine would wait for it."""

    def __init__(self, slots: int) -> None:
        self._drafts = 0
        self._proposed, self._accepted = [0] * slots, [0] * slots
        self._recent_proposed, self._recent_accepted = [0] * slots, [0] * slots
        self._recent: deque[tuple[float, Step]] = deque()

    def add(self, step: Step, now: float) -> None:
        self._forget(now)
        if not step.drafted:
            return
        self._drafts += 1
        self._recent.append((now, step))
        _count(step, 1, self._proposed, self._accepted)
        _count(step, 1, self._recent_proposed, self._recent_accepted)

    def stats(self, name: str, now: float) -> DrafterStats:
        self._forget(now)
        return DrafterStats(
            drafter=name,
            drafts=self._drafts,
            draft_tokens_per_pos=tuple(self._proposed),
            accepted_tokens_per_pos=tuple(self._accepted),
            recent_draft_tokens_per_pos=tuple(self._recent_proposed),
            recent_accepted_tokens_per_pos=tuple(self._recent_accepted),
        )

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            _, step = self._recent.popleft()
            _count(step, -1, self._recent_proposed, self._recent_accepted)


def _count(step: Step, by: int, proposed: list[int], accepted: list[int]) -> None:
    for slot in range(step.drafted):
        proposed[slot] += by
        accepted[slot] += by * (slot < step.accepted)
