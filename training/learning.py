"""The log of a distillation as the few lines that a ledger keeps of it. Knows the log's fields, not how it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KEPT = ("step", "stage", "loss", "hits", "held_out")


def learning_curve(log: Path, most: int = 200) -> list[dict[str, Any]]:
    """Every walk over the held-out documents, and of the steps' losses and hits about so many at most, evenly.

    A line that was cut short, by a process that was killed, is left out; no log is no lines.
    """
    told = list(_lines(log))
    steps = [i for i, line in enumerate(told) if "loss" in line]
    kept = set(steps[:: max(1, len(steps) // most)])
    return [
        {name: line[name] for name in _KEPT if name in line}
        for i, line in enumerate(told)
        if i in kept or "held_out" in line
    ]


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("step"), int):
            yield told
