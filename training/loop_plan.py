"""What a turn of the loop would take, before it is taken: rows, tokens, bytes and time, as far as they can be told.

Reckons from the capture file, the model's config and earlier runs in the ledger; loads no model.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from training.distillation.plan import disk_bytes
from training.ledger import Ledger, Run
from training.loop import ROUND, Captured, server_version
from training.loop_stages import LoopOptions
from training.stages import read_json

HELD_OUT = 0.1
_NPZ_BYTES = 9  # a token: id, mask, logprob
_SCALAR_BYTES = 4 + 4 + 4 + 2
_PASSES = 3  # of a training step, in forwards
_WALKS = 3 * 4  # drafters and slots of an evaluation, each of them small beside the trunk


@dataclass(frozen=True)
class Estimate:
    """Of one stage. `seconds` is None where nothing tells; `measured`: from an earlier run, else at the least, from the
    arithmetic and how fast this machine multiplies matrices."""

    stage: str
    bytes: int
    seconds: float | None
    measured: bool


@dataclass(frozen=True)
class LoopPlan:
    """`continues`: an unfinished turn would be gone on with. `held_out`: documents, about."""

    captured: Captured
    continues: bool
    held_out: int
    student_parameters: int
    stages: tuple[Estimate, ...]
    free_bytes: int

    @property
    def bytes(self) -> int:
        return sum(stage.bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds or 0.0 for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_loop(options: LoopOptions, ledger: Ledger) -> LoopPlan:
    """Raises as `loop` does where server, capture file or model cannot be read."""
    settled = options.distillation_settled()
    captured = Captured.of(options.capture_path, server_version(options))
    left = read_json(options.workdir / ROUND)
    config, tokens = options.config, captured.completion_tokens + captured.prompt_tokens
    student = _parameters(settled.architecture(config, options.rows), options)
    trunk = sum(file.stat().st_size for file in options.directory.glob("*.safetensors")) // 2  # bfloat16, as published
    steps = (settled.steps or 0) + (settled.ce_steps or 0)
    learned = steps * (settled.tokens_per_step or 0)
    heard = int(captured.completion_tokens * HELD_OUT)
    asked = 2 * (options.pairs + 1) * min(options.requests, max(int(captured.rows * HELD_OUT), 1))
    answer = captured.completion_tokens / max(captured.rows, 1)
    per_second = _multiplications(options)
    runs = ledger.read()[0] if ledger.path.is_file() else []
    width = 4 if options.dtype == "float32" else 2
    stages = (
        _estimate("export", tokens * _NPZ_BYTES, runs, captured.rows, "documents", None),
        _estimate("hot-vocab", 12 * options.rows, runs, captured.rows, "documents", None),
        _estimate(
            "extract",
            tokens * (width * config.hidden_size + _NPZ_BYTES + _SCALAR_BYTES),
            runs,
            tokens,
            "tokens",
            tokens * trunk / per_second,
        ),
        _estimate(
            "distill",
            disk_bytes(student),
            runs,
            learned,
            "tokens_learned",
            learned * settled.slots * _PASSES * student / per_second,
        ),
        _estimate("evaluate", 0, runs, heard, "tokens", heard * (trunk + _WALKS * student) / per_second),
        _estimate("promote", 0, runs, int(asked * answer), "tokens_served", asked * answer * trunk / per_second),
    )
    return LoopPlan(
        captured=captured,
        continues=bool(left and not left.get("finished")),
        held_out=int(captured.rows * HELD_OUT),
        student_parameters=student,
        stages=stages,
        free_bytes=shutil.disk_usage(_existing(options.workdir)).free,
    )


def _estimate(stage: str, size: int, runs: Sequence[Run], amount: int, unit: str, at_least: float | None) -> Estimate:
    """From the last run of the stage that ended well, by what it did of `unit`; else by the arithmetic."""
    for run in reversed(runs):
        counts, seconds = run.figures.get("counts"), run.wall_seconds
        done = (counts if isinstance(counts, dict) else run.figures).get(unit)
        if run.command == stage and run.outcome in ("ok", "negative") and isinstance(done, int) and done and seconds:
            return Estimate(stage, size, seconds * amount / done, measured=True)
    return Estimate(stage, size, at_least, measured=False)


def _parameters(architecture: Any, options: LoopOptions) -> int:
    from backend.models.student import StudentBlock

    with torch.device("meta"):
        return StudentBlock(architecture, options.config, torch.arange(options.rows)).parameters_read


def _multiplications(options: LoopOptions) -> float:
    """Multiplications a second of a matrix product of the model's width, on the device asked for."""
    name = options.device
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    size = options.config.hidden_size
    rows, weight = torch.zeros(512, size, device=device), torch.zeros(size, 4 * size, device=device)
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        (rows @ weight).sum().item()
        best = min(best, time.perf_counter() - begun)
    return 512 * size * 4 * size / best


def _existing(path: Path) -> Path:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place
