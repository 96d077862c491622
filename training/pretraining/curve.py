"""A run's loss curve made small enough to keep beside the model: windows of steps, averaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WINDOW = {"a": 20, "b": 10}


def summary(directory: Path) -> dict[str, Any]:
    """Facts of a run and its curve: {"run": run.json, "a": [...], "b": [...]}, each window by its last step.

    Numbers are averaged over the window, held-out figures stand at the step that took them.
    """
    lines = [json.loads(line) for line in (directory / "loss.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"run": json.loads((directory / "run.json").read_text(encoding="utf-8"))}
    for stage, size in _WINDOW.items():
        of_stage = [line for line in lines if line["stage"] == stage]
        found[stage] = [_window(of_stage[i : i + size]) for i in range(0, len(of_stage), size)]
    return found


def _window(lines: list[dict[str, Any]]) -> dict[str, Any]:
    last = lines[-1]
    out: dict[str, Any] = {"step": last["step"], "seconds": round(last["seconds"], 1)}
    for name in ("trunk", "mtp", "answers", "loss", "hits"):
        values = [line[name] for line in lines if name in line]
        if values:
            out[name] = _mean(values)
    out |= {"documents": lines[0]["documents"]} if "documents" in lines[0] else {}
    for name in ("held_out", "held_out_hits"):
        values = [line[name] for line in lines if name in line]
        if values:
            out[name] = _rounded(values[-1])
    return out


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [_mean(list(column)) for column in zip(*values, strict=True)]
    return round(sum(values) / len(values), 4)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round(number, 4) for name, number in value.items()}
    return [round(number, 4) for number in value]
