"""Muon for matrices, AdamW for everything else, and the warm-up-stable-decay schedule they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon

_ADAM_MATRICES = ("embed_tokens", "lm_head", "conv1d", "in_proj_a", "in_proj_b")


@dataclass(frozen=True)
class Plan:
    """Learning-rate factor over `steps`: linear up over `warmup`, constant, linear down to 0 over the last `decay`."""

    steps: int
    warmup: int
    decay: int

    def factor(self, step: int) -> float:
        """For the step with this 0-based index."""
        return min(1.0, (step + 1) / self.warmup, max(0.0, (self.steps - step) / max(self.decay, 1)))

    def replanned(self, step: int, steps: int, share: float) -> Plan:
        """The plan made `steps` long while the rate is still constant at `step`; unchanged once it decays."""
        if step >= self.steps - self.decay:
            return self
        decay = max(1, int(steps * share))
        return replace(self, steps=max(steps, step + decay), decay=decay)


class Optimizer:
    """Both optimizers as one; `rate` multiplies their base learning rates at each step."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], matrix_lr: float, other_lr: float) -> None:
        parameters = list(named)
        matrices = [p for name, p in parameters if p.dim() == 2 and not any(key in name for key in _ADAM_MATRICES)]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in parameters if id(p) not in chosen]
        self._parts = [
            Muon(matrices, lr=matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._base = [matrix_lr, other_lr]

    def step(self, rate: float) -> None:
        """Update from the gradients, then clear them."""
        for part, base in zip(self._parts, self._base, strict=True):
            for group in part.param_groups:
                group["lr"] = base * rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load(self, state: list[dict[str, Any]]) -> None:
        for part, content in zip(self._parts, state, strict=True):
            part.load_state_dict(content)
