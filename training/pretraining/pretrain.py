"""Stage A: the trunk and, with a smaller weight, the first slot of its MTP head, from random weights.

A run is a function of its corpus rows, its settings and the thread count: stopping and resuming changes no bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.models.config import ModelConfig
from backend.models.forms import CausalForm
from backend.models.qwen3_5 import Qwen35
from training.errors import TrainingError
from training.pretraining.corpus import Rows
from training.pretraining.optimizer import Optimizer, Plan


@dataclass(frozen=True)
class Settings:
    """What a run depends on besides its rows. Rates are those of the stable phase."""

    rows_per_step: int = 16
    rows_per_pass: int = 4  # gradient accumulation: small passes stay in the processor's cache
    chunk: int = 32
    mtp_weight: float = 0.3
    matrix_lr: float = 5e-3
    other_lr: float = 3e-3
    warmup: int = 20
    decay_share: float = 0.3
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Losses:
    """Mean weighted cross-entropy in nats of the trunk and of MTP slot 0; `answers` is the trunk's on its own words."""

    trunk: float
    mtp: float
    answers: float


def losses(model: Qwen35, tokens: Tensor, weights: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens int64 [B, T], weights float32 [B, T] of each token as a target → summed weighted losses of the trunk and
    of MTP slot 0, and the trunk's loss per target [B, T - 1]."""
    B, T = tokens.shape
    hidden = model(tokens, CausalForm(B, T, chunk))  # [B, T, H]
    per_target = _cross_entropy(model, hidden[:, :-1], tokens[:, 1:])  # [B, T - 1]
    trunk = (per_target * weights[:, 1:]).sum()
    if model.mtp is None:
        return trunk, trunk.new_zeros(()), per_target
    # Row p pairs the embedding of x_p with H_{p-1} and predicts x_{p+1}.
    form = CausalForm(B, T - 2, chunk, start=1)
    drafted = model.mtp(model.embed(tokens[:, 1:-1]), hidden[:, :-2], form)  # [B, T - 2, H]
    mtp = (_cross_entropy(model, drafted, tokens[:, 2:]) * weights[:, 2:]).sum()
    return trunk, mtp, per_target


def _cross_entropy(model: Qwen35, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = model.logits(hidden)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@torch.no_grad()
def evaluate(model: Qwen35, rows: Rows, chunk: int) -> Losses:
    """Mean losses over all `rows`, four at a time."""
    sums = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(rows.tokens), 4):
        tokens, weights = batch(rows, start, min(start + 4, len(rows.tokens)))
        trunk, mtp, per_target = losses(model, tokens, weights, chunk)
        own = weights[:, 1:] == 1.0
        sums += torch.stack((trunk, mtp, (per_target * own).sum())).double()
        counts += torch.stack((weights[:, 1:].sum(), weights[:, 2:].sum(), own.sum())).double()
    trunk_mean, mtp_mean, answers = (sums / counts.clamp(min=1)).tolist()
    return Losses(trunk_mean, mtp_mean, answers)


def batch(rows: Rows, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Rows start … stop as tensors: tokens int64, weights float32, both [stop - start, L]."""
    return torch.from_numpy(rows.tokens[start:stop].astype("int64")), torch.from_numpy(rows.weights[start:stop])


class Run:
    """A model in training and all that resuming it needs."""

    def __init__(self, config: ModelConfig, rows: Rows, plan: Plan, settings: Settings) -> None:
        if len(rows.tokens) < plan.steps * settings.rows_per_step:
            raise TrainingError(f"{plan.steps} steps need {plan.steps * settings.rows_per_step} rows of text")
        self.model = Qwen35(config)
        self.model.initialise(seed=settings.seed)
        self.rows, self.plan, self.settings = rows, plan, settings
        self.step = 0
        self._optimizer = Optimizer(self.model.named_parameters(), settings.matrix_lr, settings.other_lr)
        self._corpus = hashlib.sha256(rows.tokens.tobytes()).hexdigest()

    @property
    def done(self) -> bool:
        return self.step >= self.plan.steps

    def advance(self) -> Losses:
        """One optimizer step over the next rows."""
        s = self.settings
        first = self.step * s.rows_per_step
        _, all_weights = batch(self.rows, first, first + s.rows_per_step)
        own_count = (all_weights[:, 1:] == 1.0).sum().clamp(min=1)
        trunk_norm, mtp_norm = all_weights[:, 1:].sum().clamp(min=1), all_weights[:, 2:].sum().clamp(min=1)
        sums = torch.zeros(3)
        for start in range(first, first + s.rows_per_step, s.rows_per_pass):
            tokens, weights = batch(self.rows, start, min(start + s.rows_per_pass, first + s.rows_per_step))
            trunk, mtp, per_target = losses(self.model, tokens, weights, s.chunk)
            (trunk / trunk_norm + s.mtp_weight * mtp / mtp_norm).backward()
            own = (per_target.detach() * (weights[:, 1:] == 1.0)).sum()
            sums += torch.stack((trunk.detach() / trunk_norm, mtp.detach() / mtp_norm, own / own_count))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self._optimizer.step(self.plan.factor(self.step))
        self.step += 1
        if not torch.isfinite(sums).all():
            raise TrainingError(f"the loss is not finite at step {self.step}")
        return Losses(*sums.tolist())

    def replan(self, steps: int) -> None:
        """Plan for `steps` in all, as far as the rows reach, unless the rate decays already."""
        available = len(self.rows.tokens) // self.settings.rows_per_step
        self.plan = self.plan.replanned(self.step, min(steps, available), self.settings.decay_share)

    def save(self, path: Path) -> None:
        """Write a checkpoint under a temporary name, then rename it."""
        content = {
            "step": self.step,
            "plan": asdict(self.plan),
            "settings": asdict(self.settings),
            "corpus": self._corpus,
            "threads": torch.get_num_threads(),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state(),
        }
        temporary = path.with_suffix(".partial")
        torch.save(content, temporary)
        temporary.replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. Raises TrainingError when it belongs to other rows or settings."""
        content: dict[str, Any] = torch.load(path, weights_only=True)
        for name, mine in (("corpus", self._corpus), ("settings", asdict(self.settings))):
            if content[name] != mine:
                raise TrainingError(f"{path} was written by a run with another {name}: start in a new directory")
        self.model.load_state_dict(content["model"])
        self._optimizer.load(content["optimizer"])
        self.step, self.plan = content["step"], Plan(**content["plan"])


@dataclass(frozen=True)
class Progress:
    """What a caller hears after each step; `seconds` since this process began the stage."""

    step: int
    steps: int
    losses: Losses
    seconds: float


def pretrain(
    run: Run,
    held_out: Rows,
    directory: Path,
    *,
    minutes: float | None,
    report: Callable[[Progress], None],
    checkpoint_seconds: float = 180.0,
    evaluate_every: int = 50,
) -> None:
    """Train to the end of the plan, which follows the machine's pace so that it takes `minutes` (None: as planned).

    Appends to directory/loss.jsonl and keeps directory/stage_a.pt.
    """
    began = saved = time.monotonic()
    first = run.step
    with (directory / "loss.jsonl").open("a", encoding="utf-8") as curve:
        while not run.done:
            found = run.advance()
            now = time.monotonic()
            line: dict[str, Any] = {"stage": "a", "step": run.step, "rate": run.plan.factor(run.step - 1)}
            line |= {"trunk": found.trunk, "mtp": found.mtp, "answers": found.answers, "seconds": now - began}
            if run.step % evaluate_every == 0 or run.done:
                line["held_out"] = asdict(evaluate(run.model, held_out, run.settings.chunk))
            curve.write(json.dumps(line) + "\n")
            curve.flush()
            report(Progress(run.step, run.plan.steps, found, now - began))
            if now - saved > checkpoint_seconds:
                if minutes is not None:
                    pace = (now - began) / (run.step - first)
                    run.replan(run.step + int((minutes * 60 - (now - began)) / pace))
                run.save(directory / "stage_a.pt")
                saved = now
    run.save(directory / "stage_a.pt")
