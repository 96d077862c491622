"""One step's losses: every slot of every anchor of a batch, and the gradients of their weighted mean.

Knows no optimizer, no schedule and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.models.qwen3_5 import Qwen35
from training.distillation.batches import Batch
from training.distillation.native import TrainableBlock
from training.distillation.schedule import Moment
from training.distillation.teacher import Teacher
from training.distillation.world import World
from training.losses import acceptance_loss, bucketed_cross_entropy, hard_cross_entropy, head_loss, soft_cross_entropy
from training.recursion import recursive_outputs
from training.target_files import Chain


@dataclass(frozen=True)
class Objective:
    """What is minimised: Σ_j discount^j · (mean loss of slot j over its supervised positions).

    `reinforce`: the second stage's loss. `visited`: by how much an anchor whose own draft has missed before slot j
    weighs less there; serving never gets to such a slot.
    """

    slots: int
    discount: float
    reinforce: str  # "ce" | "acceptance"
    visited: float
    chunk: int  # rows of logits at a time


@dataclass(frozen=True)
class Counted:
    """By slot, over the whole batch: weighted loss, weight, positions, drafts that equal the document's token, and
    document tokens outside the head."""

    loss: list[float]
    weight: list[float]
    rows: list[float]
    hits: list[float]
    outside: list[float]

    @property
    def mean(self) -> list[float]:
        return [loss / max(weight, 1e-9) for loss, weight in zip(self.loss, self.weight, strict=True)]


class Lesson:
    """`block` is to learn from `teacher` by `objective`; `rank` int64 [V]: the head's row of each id, -1 without."""

    def __init__(self, model: Qwen35, block: TrainableBlock, teacher: Teacher, objective: Objective) -> None:
        self._model, self._block, self._teacher, self._objective = model, block, teacher, objective
        device = model.model.embed_tokens.weight.device
        vocab = model.config.vocab_size
        if block.ids is None:
            self._rank = torch.arange(vocab, device=device)
        else:
            self._rank = torch.full((vocab,), -1, device=device)
            self._rank[block.ids.to(device, torch.int64)] = torch.arange(len(block.ids), device=device)

    def gradients(self, batch: Batch | None, moment: Moment, world: World) -> Counted:
        """Add this process's gradients of the whole batch's loss; `batch` is its share (None: it has none)."""
        slots = self._objective.slots
        if batch is None:
            totals = torch.zeros(5, slots, dtype=torch.float64, device=world.device)
            world.sum([totals])
            return Counted(*totals.tolist())
        losses, figures = [], []
        for loss, counts in self._slots(batch, moment):
            losses.append(loss)
            figures.append(torch.cat((loss.detach().double()[None], counts)))
        totals = torch.stack(figures, dim=1)  # [5, slots]
        world.sum([totals])
        discounts = [self._objective.discount**slot for slot in range(slots)]
        total = sum(
            (discount / weight.clamp_min(1.0).float()) * loss
            for discount, weight, loss in zip(discounts, totals[1], losses, strict=True)
        )
        assert isinstance(total, Tensor)
        total.backward()
        return Counted(*totals.tolist())

    def _slots(self, batch: Batch, moment: Moment) -> list[tuple[Tensor, Tensor]]:
        """By slot the summed loss and float64 [4]: weight, rows, hits, tokens outside."""
        slots, visited = self._objective.slots, self._objective.visited
        chain = self._teacher.chain(batch, slots) if moment.mixed and batch.chain is None else None
        told = batch.chain if moment.mixed else None
        head, found = self._block.head_weight, []
        alive = batch.anchors
        rows = recursive_outputs(self._block, self._model.embed, batch.tokens, batch.given, slots)
        for slot, scored in enumerate(rows):
            valid = batch.supervised(slot)
            chosen = self._rank[batch.ahead(batch.tokens, 1 + slot)[valid]]  # [n], x_{p+1+j}
            weight = 1 - visited * (~alive[valid]).float()
            hard = moment.stage == "ce" and self._objective.reinforce == "ce"
            if hard:
                weight = weight * (chosen >= 0)
            trunk = batch.ahead(batch.hidden, slot)[valid]
            log_z = None if batch.log_z is None else batch.ahead(batch.log_z, slot)[valid]
            native = None if chain is None else chain[slot][valid]
            kept = None if told is None else told.at(slot, valid[batch.anchors])

            def loss(
                logits: Tensor,
                at: slice,
                chosen: Tensor = chosen,
                weight: Tensor = weight,
                trunk: Tensor = trunk,
                log_z: Tensor | None = log_z,
                native: Tensor | None = native,
                kept: Chain | None = kept,
                hard: bool = hard,
            ) -> tuple[Tensor, Tensor]:
                hit = logits.detach().argmax(-1) == chosen[at]
                if hard:
                    each = hard_cross_entropy(logits, chosen[at])
                else:
                    wanted = self._teacher.target(
                        trunk[at],
                        None if log_z is None else log_z[at],
                        None if native is None else native[at],
                        moment.alpha if chain is not None else 1.0,
                    )
                    function = soft_cross_entropy if moment.stage == "kd" else acceptance_loss
                    each = function(logits, wanted)
                    if kept is not None:
                        imitated = wanted.sum(-1) * chain_cross_entropy(logits, kept, at)
                        each = moment.alpha * each + (1 - moment.alpha) * imitated
                return (each * weight[at]).sum(), hit

            total, hits = head_loss(scored[valid], head, loss, self._objective.chunk)
            reached = torch.zeros_like(valid)
            reached[valid] = hits
            alive = alive & reached
            counts = [weight.sum(), valid.sum(), hits.sum(), (chosen < 0).sum()]
            found.append((total, torch.stack([one.double() for one in counts])))
        return found


def chain_cross_entropy(logits: Tensor, chain: Chain, at: slice) -> Tensor:
    """logits float32 [n, S] against these rows of one slot of a precomputed chain: → [n]."""
    teacher = chain.logprobs[at].float().exp()
    if chain.indices is None:
        return soft_cross_entropy(logits, teacher)
    return bucketed_cross_entropy(logits, teacher, chain.indices[at], chain.tail[at])
