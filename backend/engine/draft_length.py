"""How many tokens to draft in the next verify step: a fixed number, or what measured acceptance and cost say pays.

Pure policy: knows no tensor, no clock and no model; the engine tells it what each step cost and yielded.
Emitted tokens do not depend on it (L2), only speed does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from backend.interface import Step

EXPLORATION = 0.01  # steps' worth of time per step that may be lost to other lengths than the best known
CREDIT = 6.0  # steps' worth that may be lost at once
LEAST_CHARGE = 0.25  # what an exploration counts as losing at least, so that the length changes rarely
PAUSE = 8  # steps between explorations, to compare with and so that a disturbance does not meet them all
HYSTERESIS = 0.01  # gain in tokens per second below which the length stays


class DraftLength(Protocol):
    """Decides K of every verify step. Called by the engine thread alone."""

    def choose(self, batch: int) -> int:
        """K of the next step, in which `batch` ≥ 1 sequences draft. Asking twice changes nothing."""

    def observe(self, batch: int, k: int, seconds: float | None, steps: Sequence[Step]) -> None:
        """What a step of `k` slots (the longest draft in it) cost, and the outcome of each sequence in it.

        `seconds`: of draft, verify and sampling. None where the step did other work too (a prompt chunk), so that
        its duration tells nothing.
        """


@dataclass(frozen=True)
class FixedDraftLength:
    """Always `k`."""

    k: int

    def choose(self, batch: int) -> int:
        return self.k

    def observe(self, batch: int, k: int, seconds: float | None, steps: Sequence[Step]) -> None:
        pass


class AutoDraftLength:
    """The K of 0 … `most` with the most expected tokens per second, (1 + Σ surv) / cost(K).

    Acceptance is followed over all sequences together, cost for each batch size (rounded up to a power of two). What
    steps of the best known length do not show, the cost of others and at K = 0 acceptance, is explored in few steps,
    paid from an account that EXPLORATION fills: that bounds the loss where speculation does not pay.
    """

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self._acceptance = _Acceptance(most)
        self._sizes: dict[int, _BatchSize] = {}
        self._credit = CREDIT
        self._last = 0
        self._number = 0  # of the step
        self._seen = 0  # how many steps told something

    def choose(self, batch: int) -> int:
        size = self._size(batch)
        if size.exploring is not None:
            return size.exploring
        may_explore = self._credit > 0 and self._number >= size.pause_until
        if size.decided == self._seen and not may_explore:
            return size.length
        size.decided = self._seen
        costs, tokens = size.costs, self._acceptance.tokens()
        rates = _rates(tokens, costs.estimate)
        best = max((k for k in range(self.most + 1) if k == size.length or costs.known(k)), key=rates.__getitem__)
        if rates[best] > rates[size.length] * (1 + HYSTERESIS):
            size.before, size.length = size.length, best
        if may_explore and costs.known(size.length):
            size.exploring = self._worth_exploring(size, _rates(tokens, costs.hoped()))
        return size.length if size.exploring is None else size.exploring

    def observe(self, batch: int, k: int, seconds: float | None, steps: Sequence[Step]) -> None:
        size = self._size(batch)
        self._number += 1
        self._acceptance.observe(k, steps)
        rested, self._last = k > 0 and self._last == 0, k
        # 0: a clock too coarse to tell. A step after K = 0 also does what the drafter left undone: the next one tells.
        measured = (
            not rested
            and bool(seconds)
            and size.costs.observe(self._number, k, seconds or 0.0, size.before if k == size.length else size.length)
        )
        self._seen += measured or k > 0
        self._credit = min(self._credit + EXPLORATION, CREDIT)
        if size.exploring is None:
            return
        estimate, tokens, best = size.costs.estimate, self._acceptance.tokens(), size.length
        loss = estimate[k] / estimate[best] - tokens[k] / tokens[best]
        self._credit -= max(loss, 0.0 if size.repeated else LEAST_CHARGE)
        # A new length is run until it is known. At K = 0 only explorations show acceptance: one that paid is repeated.
        emitted = len(steps) + sum(step.accepted for step in steps)
        paid = best == 0 and emitted * estimate[0] > len(steps) * estimate[k]
        size.repeated = bool(seconds) and (rested or paid or (measured and not size.costs.known(k)))
        if not size.repeated:
            size.exploring, size.pause_until = None, self._number + PAUSE

    def _worth_exploring(self, size: _BatchSize, hoped: list[float]) -> int | None:
        """The one run longest ago of the neighbours and of what would be best if it cost as little as may be."""
        lengths = {size.length - 1, size.length + 1, hoped.index(max(hoped))} - {size.length, -1, self.most + 1}
        return min(lengths, key=lambda k: (size.costs.last_run[k], -hoped[k]), default=None)

    def _size(self, batch: int) -> _BatchSize:
        rounded = 1 << (batch - 1).bit_length()
        if rounded not in self._sizes:
            self._sizes[rounded] = _BatchSize(_Costs(self.most))
        return self._sizes[rounded]


def _rates(tokens: list[float], costs: list[float]) -> list[float]:
    return [emitted / cost for emitted, cost in zip(tokens, costs, strict=True)]


@dataclass
class _BatchSize:
    """What is known and under way at one batch size."""

    costs: _Costs
    length: int = 0  # the best known
    before: int = 0  # the one in use before
    decided: int = -1  # after how many steps that told something
    exploring: int | None = None
    pause_until: int = 0  # the number of a step
    repeated: bool = False  # the exploration under way is past its first step


class _Acceptance:
    """Per slot s, of the recent drafts accepted up to it, the share that was accepted in it too (DESIGN §6: cond).

    A slot that stood empty though the step had it (the answer ends, the drafter knew no more) counts as not accepted:
    it yields no token either.
    """

    REMEMBERED = 80.0  # drafts per slot
    KEPT = 4.0  # drafts that are not forgotten by mere passing of steps, and the weight of the slot before
    FORGETTING = 1 / 128  # per step
    EXPECTED = 0.6  # of slot 0, before anything is seen

    def __init__(self, most: int) -> None:
        self._drafts, self._accepted = [0.0] * most, [0.0] * most
        self._unseen = 0  # steps for which nothing was forgotten yet
        self._drafts[:1], self._accepted[:1] = [self.KEPT][:most], [self.EXPECTED * self.KEPT][:most]

    def observe(self, k: int, steps: Sequence[Step]) -> None:
        self._unseen += 1
        if not k or not steps:
            return
        self._forget()
        reached = len(steps)
        for slot in range(min(k, len(self._drafts))):
            accepted = sum(step.accepted > slot for step in steps)
            keep = (1 - 1 / self.REMEMBERED) ** reached
            self._drafts[slot] = self._drafts[slot] * keep + reached
            self._accepted[slot] = self._accepted[slot] * keep + accepted
            reached = accepted

    def _forget(self) -> None:
        """For the steps since it was last done, in every slot."""
        keep = (1 - self.FORGETTING) ** self._unseen
        self._unseen = 0
        for slot, drafts in enumerate(self._drafts):
            least = 0.0 if slot else min(self.KEPT, drafts)
            kept = max(keep, least / drafts) if drafts else 0.0
            self._drafts[slot], self._accepted[slot] = drafts * kept, self._accepted[slot] * kept

    def tokens(self) -> list[float]:
        """Expected tokens a step yields a sequence, for K = 0 … most; an unseen slot is taken for the one before."""
        self._forget()
        expected, survival, rate = [1.0], 1.0, 0.0
        for slot, (drafts, accepted) in enumerate(zip(self._drafts, self._accepted, strict=True)):
            prior = self.KEPT if slot else 0.0
            rate = (accepted + prior * rate) / (drafts + prior)
            survival *= rate
            expected.append(expected[-1] + survival)
        return expected


class _Costs:
    """Cost of a step for each draft length at one batch size: medians about a fitted line.

    In no unit: only ratios matter, and only steps close to each other in time are compared, for the machine may change
    its pace at any moment (other load, longer contexts). A step is measured against those of another
    length just before it.
    """

    RUNS = 24  # remembered per length
    KNOWN = 5  # steps from which a length's median is used: the first of a shape may be very slow
    CLOSE = 12  # steps
    COMPARED = 3  # steps at least that one is compared with
    SLOPE = 0.2  # of a slot in plain steps, expected before two lengths are known
    LEAST_SLOPE = 0.02  # of a slot, whatever was measured

    def __init__(self, most: int) -> None:
        self.estimate = [1.0 + self.SLOPE * k for k in range(most + 1)]  # for K = 0 … most
        self.last_run = [0] * (most + 1)  # of this batch size's steps; 0: never
        self._steps = 0
        self._slope = self.SLOPE
        self._close: deque[tuple[int, int, float]] = deque()  # the last steps: number, length, seconds
        # Steps of one length in a row are one measurement: whatever disturbs one of them disturbs them all.
        self._runs: list[deque[list[float]]] = [deque(maxlen=self.RUNS) for _ in range(most + 1)]

    def known(self, k: int) -> bool:
        return sum(map(len, self._runs[k])) >= self.KNOWN

    def observe(self, number: int, k: int, seconds: float, base: int) -> bool:
        """Step `number` of all: measured, if it can be, against steps of `base`, the length in use; whether it was."""
        self._steps += 1
        self.last_run[k] = self._steps
        while self._close and number - self._close[0][0] > self.CLOSE:
            self._close.popleft()
        goes_on = bool(self._close) and self._close[-1][1] == k
        before = [taken for _, length, taken in self._close if length == base]
        self._close.append((number, k, seconds))
        if k != base and len(before) >= self.COMPARED:
            # As dear as k + 1 plain steps never pays: dearer need not be told apart, and is mostly a disturbance.
            cost = seconds / median_low(before) * self.estimate[base]
            cost = min(cost, 1.1 * (k + 1) * self.estimate[0]) if k else cost
        elif k or self.known(0) or any(self._runs[1:]):
            return False
        else:
            cost = 1.0  # the unit
        runs = self._runs[k]
        if goes_on and runs:
            runs[-1].append(cost)
        else:
            runs.append([cost])
        self._fit()
        return True

    def hoped(self) -> list[float]:
        """The estimate, but with half the slope from a known length on to lengths that are not."""
        hoped = self.estimate[:1]
        for k in range(1, len(self.estimate)):
            hoped.append(self.estimate[k] if self.known(k) else hoped[-1] + max(self._slope, 0.0) / 2)
        return hoped

    def _fit(self) -> None:
        """Least squares of a + b·k over known lengths, b drawn to SLOPE·a; a known one keeps its deviation."""
        medians = [median_low(map(median_low, runs)) if runs else 0.0 for runs in self._runs]
        weights = [min(sum(map(len, runs)), 8) * self.known(k) for k, runs in enumerate(self._runs)]
        if not any(weights):
            return
        # a, b = argmin Σ w (median - a - b k)² + (b - SLOPE a)²
        aa, ab, bb, am, bm = self.SLOPE**2, -self.SLOPE, 1.0, 0.0, 0.0
        for k, (w, median) in enumerate(zip(weights, medians, strict=True)):
            aa, ab, bb = aa + w, ab + w * k, bb + w * k * k
            am, bm = am + w * median, bm + w * k * median
        determinant = aa * bb - ab * ab
        a, self._slope = (bb * am - ab * bm) / determinant, (aa * bm - ab * am) / determinant
        line = [a + self._slope * k for k in range(len(weights))]
        costs = [at + (m - at) * w / (w + 1) for at, m, w in zip(line, medians, weights, strict=True)]
        self.estimate = [max(cost, costs[0] * (1 + self.LEAST_SLOPE * k)) for k, cost in enumerate(costs)]
