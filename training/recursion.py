"""A draft block over several recursive slots at once, for training: what the drafter does, for every base row together.

Base row p stands for a step that has committed the tokens up to x_p. Slot 0 is the ordinary row p; slot j feeds what
the previous slot carried back in at position p + j and sees the true rows up to p and its own base's slots 1 … j.
Knows no loss and no teacher but the bundled model's own (`recursive_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.forms import CausalForm
from backend.models.qwen3_5 import Qwen35
from backend.ops.attention import causal_attention


class RecursiveForm:
    """A form for a draft block's one attention layer; `next_slot` moves it on. Base rows are positions 1 … rows."""

    def __init__(self, batch: int, rows: int, device: torch.device) -> None:
        self.positions = torch.arange(1, rows + 1, device=device).expand(batch, rows)
        self._keys: list[Tensor] = []  # by slot, each [B, R, Hkv, D]
        self._values: list[Tensor] = []

    def next_slot(self) -> None:
        self.positions = self.positions + 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, R, Hq, D], k and v [B, R, Hkv, D] of the slot that comes next → [B, R, Hq, D]."""
        self._keys.append(k)
        self._values.append(v)
        if len(self._keys) == 1:
            return causal_attention(q, k, v)
        group = q.shape[2] // k.shape[2]
        keys = [key.repeat_interleave(group, dim=2) for key in self._keys]  # [B, R, Hq, D]
        values = [value.repeat_interleave(group, dim=2) for value in self._values]
        R = q.shape[1]
        past = torch.einsum("bphd,bkhd->bphk", q, keys[0])  # [B, R, Hq, R]
        later = torch.ones(R, R, dtype=torch.bool, device=q.device).triu(1)  # key row after the base row
        past = past.masked_fill(later[:, None], float("-inf"))
        own = torch.stack([(q * key).sum(-1) for key in keys[1:]], dim=-1)  # [B, R, Hq, slots]
        weights = torch.cat((past, own), dim=-1).mul(q.shape[-1] ** -0.5).softmax(-1)
        out = torch.einsum("bphk,bkhd->bphd", weights[..., :R], values[0])
        for i, value in enumerate(values[1:]):
            out = out + weights[..., R + i, None] * value
        return out

    def convolve(self, layer: int, columns: Tensor, weight: Tensor) -> Tensor:
        raise TypeError("a draft block has no convolution")

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise TypeError("a draft block has no recurrence")


def recursive_outputs(
    block: DraftBlock,
    embed: Callable[[Tensor], Tensor],
    tokens: Tensor,
    hidden: Tensor,
    slots: int,
) -> Iterator[Tensor]:
    """tokens int64 [B, T], hidden [B, T, H] of the trunk → per slot the rows [B, T - 1, w'] that `block.logits` reads.

    Row p - 1 of slot j belongs to base p and predicts x_{p+j+1}; rows whose token x_{p+j} lies past the end hold
    values of no meaning. Slots embed the document's own tokens: up to a base's first miss they are what it drafted, and
    a step keeps nothing after that.
    """
    B, T = tokens.shape
    form = RecursiveForm(B, T - 1, tokens.device)
    fed, previous = tokens[:, 1:], hidden[:, :-1]
    for slot in range(slots):
        scored, previous = block.readout(block(embed(fed), previous, form))
        yield scored
        if slot + 1 == slots:
            return
        form.next_slot()
        fed = F.pad(tokens[:, 2 + slot :], (0, 1 + slot))  # x_{p+j+1} for base p = 1 … T - 1


@dataclass(frozen=True)
class SlotCounts:
    """Per slot: rows judged, their summed loss, and how many drafts equal the trunk's own first choice."""

    rows: list[int]
    loss: list[float]
    hits: list[int]


def recursive_loss(
    model: Qwen35, tokens: Tensor, own: Tensor, slots: int, discount: float, chunk: int = 32
) -> tuple[Tensor, SlotCounts]:
    """Cross-entropy of each slot to the trunk's full distribution, mean over rows, weighted discount^slot.

    tokens int64 [B, T] padded on the right; own bool [B, T], True on the model's own tokens. A row counts where the
    token it predicts and the first one of its draft are the model's own. The trunk gets no gradient.
    """
    B, T = tokens.shape
    block = NativeBlock(model)
    with torch.no_grad():
        hidden = model(tokens, CausalForm(B, T, chunk))
    total = hidden.new_zeros(())
    rows, loss, hits = [], [], []
    for slot, output in enumerate(recursive_outputs(block, model.embed, tokens, hidden, slots)):
        valid = F.pad(own[:, 2:], (0, 1))  # base p = 1 … T - 1: x_{p+1} is the model's own
        valid = valid & F.pad(own[:, 2 + slot :], (0, 1 + slot))
        teacher_rows = F.pad(hidden[:, 1 + slot :], (0, 0, 0, slot))[valid]  # [N, H]
        with torch.no_grad():
            teacher = model.logits(teacher_rows)
        drafted = model.logits(output[valid])  # [N, V]
        summed = F.cross_entropy(drafted, teacher.softmax(-1), reduction="sum")
        count = int(valid.sum())
        total = total + discount**slot * summed / max(count, 1)
        rows.append(count)
        loss.append(float(summed.detach()))
        hits.append(int((drafted.argmax(-1) == teacher.argmax(-1)).sum()))
    return total, SlotCounts(rows, loss, hits)
