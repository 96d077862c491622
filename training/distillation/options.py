"""How to distil: every choice in one place, and those left open as they are for a model of that size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from backend.drafters.student import check_name
from backend.interface import BackendError
from backend.models.config import ModelConfig
from backend.models.student import PRESETS, StudentConfig
from training.distillation.schedule import Schedule
from training.distillation.state import Resume
from training.errors import TrainingError
from training.student import How, check_cut

_SMALL = 512  # hidden size below which a model is trained on a CPU in minutes
# What changes where a run's files are, how often, and on what it is run, but not what is computed.
_NOT_IDENTITY = ("data", "model", "hot_vocab", "out", "resume", "device", "save_every", "log_every", "name", "targets")


@dataclass(frozen=True)
class DistillOptions:
    """None: by the model's size, as `settled` has it. Rates are AdamW's."""

    data: Path  # a folder that `training extract` made
    hot_vocab: Path | None = None  # the student's ids; of no use to the native block, which keeps them all
    out: Path = Path("student")
    model: str = "tiny"
    target: Literal["student", "mtp"] = "student"
    preset: str = "sv"
    widths: Mapping[str, Any] = field(default_factory=dict)  # fields of StudentConfig in place of the preset's
    initialise: How = "principal"
    steps: int | None = None  # of distillation
    ce_steps: int | None = None  # of reinforcement after it
    tokens_per_step: int | None = None  # padding included, over all processes
    window: int = 512  # tokens; longer documents are cut
    slots: int = 4
    discount: float = 0.8  # weight of slot j: discount^j
    alpha: float = 1.0  # the trunk's share of the teacher, the rest is the native head's chain; at the last step
    alpha_start: float | None = None  # at the first; None: the same
    targets: bool = False  # that chain as `training targets` left it beside the data, without `noise`
    reinforce: Literal["ce", "acceptance"] = "ce"
    visited: float = 0.0  # by how much slots behind an own miss weigh less
    noise: float = 0.0  # on the hidden states, of their own root mean square
    lr: float | None = None
    ce_lr: float | None = None
    head_lr: float = 0.3  # of the head's rows, as a factor
    warmup: int | None = None  # steps
    floor: float = 0.1  # of the rate, where distillation ends
    weight_decay: float = 0.01  # of matrices
    clip: float = 1.0
    ema: float = 0.999  # of the weights that are evaluated and kept
    chunk: int = 4096  # rows of logits at a time
    evaluate_every: int | None = None  # steps between walks over the held-out documents; 0: only at the end
    save_every: int | None = None
    log_every: int = 10
    seed: int = 0
    device: str = "auto"
    resume: Resume = "auto"
    name: str | None = None  # of the drafter

    def settled(self, config: ModelConfig) -> DistillOptions:
        """Nothing left open. Raises TrainingError for what cannot be.

        The rate goes as width^-½ from the 3e-4 that suits d_inner 2048.
        """
        small = config.hidden_size < _SMALL
        width = config.hidden_size if self.target == "mtp" else self.architecture(config, 1).d_inner
        lr = 3e-4 * (2048 / width) ** 0.5 if self.lr is None else self.lr
        steps = (1500 if small else 24_000) if self.steps is None else self.steps
        ce_steps = (250 if small else 4_000) if self.ce_steps is None else self.ce_steps
        every = max((steps + ce_steps) // 12, 1) if self.evaluate_every is None else self.evaluate_every
        settled = replace(
            self,
            steps=steps,
            ce_steps=ce_steps,
            tokens_per_step=(1024 if small else 4096) if self.tokens_per_step is None else self.tokens_per_step,
            lr=lr,
            ce_lr=lr * self.floor if self.ce_lr is None else self.ce_lr,
            warmup=min(500, max(1, steps // 50)) if self.warmup is None else self.warmup,
            alpha_start=self.alpha if self.alpha_start is None else self.alpha_start,
            evaluate_every=every,
            save_every=(every or 1000) if self.save_every is None else self.save_every,
        )
        settled._check()
        return settled

    def architecture(self, config: ModelConfig, hot_rows: int) -> StudentConfig:
        """The student's widths on a model of this shape. Raises TrainingError for those that cannot be."""
        if given := sorted(self.widths.keys() & {"hidden_size", "hot_rows"}):
            raise TrainingError(f"no such student: {' and '.join(given)} follow from the model and the hot vocabulary")
        try:
            preset = StudentConfig.preset(self.preset, config, hot_rows)
            student = StudentConfig(**{**preset.model_dump(), **self.widths})
            check_cut(student, config)
            return student
        except ValidationError as error:
            told = "; ".join(" ".join([*map(str, one["loc"]), one["msg"]]) for one in error.errors())
            raise TrainingError(f"no such student: {told}") from None
        except (TypeError, ValueError) as error:
            raise TrainingError(f"no such student: {error}") from None

    def schedule(self) -> Schedule:
        """Of settled options."""
        values = (self.steps, self.ce_steps, self.warmup, self.lr, self.ce_lr, self.floor, self.alpha_start, self.alpha)
        assert not any(value is None for value in values), "the options are not settled"
        return Schedule(*values)  # type: ignore[arg-type]

    def identity(self) -> dict[str, Any]:
        """What a run must have in common with one that it continues, beside its inputs' hashes."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_IDENTITY}

    def _check(self) -> None:
        if self.target == "student" and self.hot_vocab is None:
            raise TrainingError("a student needs a hot vocabulary: `training hot-vocab` makes one")
        if self.target == "student":
            try:
                check_name(self.name or self.out.resolve().name)
            except BackendError as error:
                raise TrainingError(f"{error}: give a --name") from None
        if self.targets and self.target == "mtp":
            raise TrainingError("targets are over a hot vocabulary, and the native block learns over all ids")
        if self.targets and self.alpha == 1 and self.alpha_start in (None, 1):
            raise TrainingError("targets are the native head's chain, which has no share in the teacher at alpha 1")
        if self.preset not in PRESETS:
            raise TrainingError(f"unknown preset {self.preset!r}: expected {' or '.join(PRESETS)}")
        assert self.steps is not None
        assert self.ce_steps is not None
        if self.steps + self.ce_steps < 1 or min(self.steps, self.ce_steps) < 0:
            raise TrainingError("a run has at least one step")
        for name, low, high in (("alpha", 0, 1), ("alpha_start", 0, 1), ("visited", 0, 1), ("ema", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise TrainingError(f"{name} is {getattr(self, name)}, expected {low} to {high}")
        for name in ("lr", "ce_lr", "head_lr", "floor", "weight_decay", "clip", "discount", "noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TrainingError(f"{name} is {getattr(self, name)}, expected a number from 0 on")
        if self.slots < 1 or self.window < 4 * self.slots:
            raise TrainingError(f"a window of {self.window} tokens is too short for {self.slots} slots")
