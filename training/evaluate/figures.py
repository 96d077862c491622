"""From documents' sums to figures: ratios with their n, intervals by a bootstrap over documents, paired differences.

Documents are drawn with all their tokens, because tokens of one document are not independent. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.evaluate.stride import DEPTHS, Sums
from training.evaluate.walk import DocumentCounts

Floats = NDArray[np.float64]
_LOW, _HIGH = 2.5, 97.5  # percentiles


@dataclass(frozen=True)
class Figure:
    """A ratio, its 95 % interval and its denominator; None where there is nothing to divide by."""

    value: float | None
    low: float | None
    high: float | None
    n: int


Ratio = tuple[Floats, Floats]
"""Numerator and denominator by document, [D] each."""


class Bootstrap:
    """Documents drawn with replacement, the same draws for whatever is compared: that is what pairs differences."""

    def __init__(self, documents: int, rounds: int, seed: int) -> None:
        draws = np.random.default_rng(seed).multinomial(documents, np.full(documents, 1 / documents), size=rounds)
        self._weights: Floats = draws.astype(np.float64)  # [rounds, D]

    def figure(self, ratio: Ratio, plus: float = 0.0) -> Figure:
        """The ratio of the sums over all documents, `plus` a constant."""
        return self._told(_ratio(ratio, plus), self._resampled(ratio, plus), ratio)

    def difference(self, mine: Ratio, theirs: Ratio) -> Figure:
        """My ratio less theirs, on the same documents; n is mine."""
        value = _ratio(mine, 0.0) - _ratio(theirs, 0.0)
        return self._told(value, self._resampled(mine, 0.0) - self._resampled(theirs, 0.0), mine)

    def _resampled(self, ratio: Ratio, plus: float) -> Floats:
        numerator, denominator = (self._weights @ part for part in ratio)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = numerator / denominator + plus
        return found

    def _told(self, value: float, resampled: Floats, ratio: Ratio) -> Figure:
        n = round(float(ratio[1].sum()))
        known = resampled[np.isfinite(resampled)]
        if not np.isfinite(value) or not len(known):
            return Figure(None, None, None, n)
        low, high = np.percentile(known, (_LOW, _HIGH))
        return Figure(float(value), float(low), float(high), n)


def _ratio(ratio: Ratio, plus: float) -> float:
    numerator, denominator = (float(part.sum()) for part in ratio)
    return numerator / denominator + plus if denominator else float("nan")


@dataclass(frozen=True, eq=False)
class Walked:
    """One drafter's counts over some documents: `steps` [D], the others by slot [D, K]."""

    steps: Floats
    proposed: Floats
    reached: Floats
    accepted: Floats

    @classmethod
    def of(cls, counts: Sequence[DocumentCounts]) -> Walked:
        found = cls(*(np.array([getattr(one, field.name) for one in counts], float) for field in fields(cls)))
        assert np.array_equal(found.reached[:, 0], found.proposed[:, 0]), "surv_0 is cond_0"
        return found

    def part(self, who: Sequence[int]) -> Walked:
        """Of these documents alone."""
        return Walked(*(getattr(self, field.name)[list(who)] for field in fields(self)))

    @property
    def tau(self) -> Ratio:
        """Less one."""
        return self.accepted.sum(-1), self.steps

    @property
    def chain(self) -> Ratio:
        return self.accepted.sum(-1), self.proposed.sum(-1)

    def figures(self, bootstrap: Bootstrap) -> dict[str, Any]:
        """surv and cond by slot, chain (accepted / drafted), τ; DESIGN §6."""
        slots = range(self.accepted.shape[1])
        return {
            "steps": round(float(self.steps.sum())),
            "proposed": [round(float(self.proposed[:, s].sum())) for s in slots],
            "accepted": [round(float(self.accepted[:, s].sum())) for s in slots],
            "surv": [bootstrap.figure((self.accepted[:, s], self.proposed[:, s])) for s in slots],
            "cond": [bootstrap.figure((self.accepted[:, s], self.reached[:, s])) for s in slots],
            "chain": bootstrap.figure(self.chain),
            "tau": bootstrap.figure(self.tau, 1.0),
        }


@dataclass(frozen=True, eq=False)
class Strided:
    """One drafter's sums over some documents, by name [D, depths, K]."""

    sums: dict[str, Floats]

    @classmethod
    def of(cls, documents: Sequence[Sums]) -> Strided:
        found = cls({name: np.stack([sums[name] for sums in documents]) for name in documents[0]})
        assert np.array_equal(found.sums["surv"][..., 0], found.sums["hit"][..., 0]), "surv_0 is hit_0"
        return found

    def part(self, who: Sequence[int]) -> Strided:
        """Of these documents alone."""
        return Strided({name: sums[list(who)] for name, sums in self.sums.items()})

    def at(self, depth: int | None) -> dict[str, Floats]:
        """[D, K] of one depth, or of all."""
        return {name: sums.sum(1) if depth is None else sums[:, depth] for name, sums in self.sums.items()}

    def chain(self, depth: int | None = None) -> Ratio:
        """Over anchors with every slot, where it is the mean of surv."""
        sums = self.at(depth)
        return sums["full_surv"].sum(-1), sums["full"].sum(-1)

    def figures(self, bootstrap: Bootstrap, depth: int | None = None) -> dict[str, Any]:
        sums = self.at(depth)
        slots = range(sums["n"].shape[1])

        def each(name: str, of: str = "n") -> list[Figure]:
            return [bootstrap.figure((sums[name][:, s], sums[of][:, s])) for s in slots]

        chain = bootstrap.figure(self.chain(depth))
        surv = [bootstrap.figure((sums["full_surv"][:, s], sums["full"][:, s])).value for s in slots]
        if chain.value is not None:
            mean = float(np.mean([value for value in surv if value is not None]))
            assert abs(mean - chain.value) < 1e-12, "chain is the mean of surv where every slot is drafted"
        found: dict[str, Any] = {
            "anchors": round(float(sums["n"][:, 0].sum())),
            "hit": each("hit"),
            "surv": each("surv"),
            "cond": each("surv", "reached"),
            "chain": chain,
            "tau": bootstrap.figure((sums["full_surv"].sum(-1), sums["full"][:, 0]), 1.0),
        }
        for name in sums:
            kind, _, temperature = name.partition("@")
            if temperature:
                found.setdefault(kind, {})[temperature] = each(name, "sampled")
        for name, of in (("covered", "n"), ("run", "n"), ("mass", "sampled")):
            if name in sums:
                found[name] = each(name, of)
        return found


def depths() -> list[str]:
    """The buckets' names, in order."""
    lower = ("0", *map(str, DEPTHS))
    return [f"{low}-{high}" for low, high in zip(lower, (*map(str, DEPTHS), ""), strict=True)]
