"""What a step of distillation is: its stage, learning rate and teacher, as a function of its number alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Stage = Literal["kd", "ce"]


@dataclass(frozen=True)
class Moment:
    """`alpha`: the trunk's share of the teacher."""

    stage: Stage
    lr: float
    alpha: float

    @property
    def mixed(self) -> bool:
        """Whether the native head's chain has a share in the teacher."""
        return self.stage == "kd" and self.alpha < 1


@dataclass(frozen=True)
class Schedule:
    """`steps` of distillation, the rate up over `warmup` and down a half cosine to `floor` of it, then `ce_steps` of
    reinforcement, the rate straight down from `ce_lr` to 0. α goes straight from `alpha_start` to `alpha`."""

    steps: int
    ce_steps: int
    warmup: int
    lr: float
    ce_lr: float
    floor: float
    alpha_start: float
    alpha: float

    @property
    def total(self) -> int:
        return self.steps + self.ce_steps

    def at(self, step: int) -> Moment:
        """Of the step with this 0-based number."""
        if step >= self.steps:
            left = (self.total - step) / max(self.ce_steps, 1)
            warm = 1.0 if self.steps else min(1.0, (step + 1) / max(self.warmup, 1))
            return Moment("ce", self.ce_lr * left * warm, self.alpha)
        done = step / self.steps
        rate = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        return Moment("kd", self.lr * rate * warm, self.alpha_start + (self.alpha - self.alpha_start) * done)
