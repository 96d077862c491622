"""The log of a distillation as the few lines that a ledger keeps of it. Knows the log's fields, not how it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KEPT = ("step", "stage", "loss", "hits", "held_out")


def figures_of(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a ledger keeps of a finished distillation's folder, and the fingerprints it names."""
    header = next(path for name in ("config.json", "training.json") if (path := out / name).is_file())
    told = json.loads(header.read_text(encoding="utf-8"))
    taught = told["training"]
    figures = {
        "name": told.get("name") or out.resolve().name,
        "evaluation": told["evaluation"],
        "training": taught,
        "curve": learning_curve(out / "log.jsonl"),
        # Positions that the steps went over, padding included.
        "tokens_learned": (taught["steps"] + taught["ce_steps"]) * taught["tokens_per_step"],
    }
    hashes = {name: told[name] for name in ("weights_sha256", "d2t_sha256") if name in told}
    return figures, {**told["target"], **hashes}


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
