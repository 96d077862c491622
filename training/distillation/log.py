"""What a run of distillation says of itself: a line of JSON every few steps, and what the held-out walk found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.distillation.schedule import Moment
from training.distillation.step import Counted


@dataclass(frozen=True)
class Walked:
    """Held-out documents walked: chain is the mean of surv, tau 1 + accepted / steps."""

    steps: int
    proposed: list[int]
    accepted: list[int]

    @property
    def surv(self) -> list[float]:
        return [a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed, strict=True)]

    def as_json(self) -> dict[str, Any]:
        surv = self.surv
        return {
            "steps": self.steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "surv": surv,
            "chain": sum(surv) / len(surv),
            "tau": self.tau,
        }

    @property
    def tau(self) -> float:
        return 1 + sum(self.accepted) / max(self.steps, 1)


class Log:
    """log.jsonl, without the lines of steps that are to be run again."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() and step else []
        path.write_text("".join(line for line in kept if _step_of(line, step) <= step), encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str, step: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return step + 1  # the half line of a process that was killed


def line_of(step: int, moment: Moment, counted: Counted, norm: float, skipped: int, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "stage": moment.stage,
        "lr": moment.lr,
        "alpha": moment.alpha,
        "loss": counted.mean,
        "hits": [hits / max(rows, 1) for hits, rows in zip(counted.hits, counted.rows, strict=True)],
        "outside": [outside / max(rows, 1) for outside, rows in zip(counted.outside, counted.rows, strict=True)],
        "rows": counted.rows,
        "grad_norm": norm,
        "skipped": skipped,
        "seconds": round(seconds, 3),
    }
