"""What a draft is judged by: losses over the student's whole head, and a head that never holds all of its logits.

The student is normalised over every row it has, because its argmax is taken over every row when it serves; a loss over
the teacher's best ids alone leaves the others free to drift up (the subset-KL bug). Knows no model and no data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RowLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""logits float32 [n, S] of these rows → their summed loss, and something about each of them, [n]."""


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """-Σ_x t(x) log q(x), q the softmax over all S: logits, teacher float32 [n, S] → [n].

    A teacher that sums to less than one weighs its row by as much: t(x | S) · t(S) is the unrenormalised t.
    """
    return -(teacher * logits.log_softmax(-1)).sum(-1)


def bucketed_cross_entropy(logits: Tensor, teacher: Tensor, rows: Tensor, tail: Tensor) -> Tensor:
    """-Σ_x t(x) log q(x) over k rows of the head, and of all others together -t(tail) log q(tail): → [n].

    logits float32 [n, S]; teacher float32 [n, k] and rows int64 [n, k]: the teacher's likeliest, and where in the head
    they stand; tail float32 [n]: what it leaves to the others. q is the softmax over all S.
    """
    all_of_it = logits.logsumexp(-1, keepdim=True)
    told = -(teacher * (logits.gather(-1, rows) - all_of_it)).sum(-1)
    if rows.shape[-1] == logits.shape[-1]:
        return told
    others = logits.scatter(-1, rows, float("-inf")).logsumexp(-1)
    return told - tail * (others - all_of_it[:, 0])


def hard_cross_entropy(logits: Tensor, rows: Tensor) -> Tensor:
    """-log q(row): logits float32 [n, S], rows int64 [n] of the head → [n], 0 where it has no such row (-1)."""
    return F.cross_entropy(logits, rows, reduction="none", ignore_index=-1)


def acceptance_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """-log Σ_x min(t(x), q(x)): float32 [n, S] → [n]; `teacher` unrenormalised on S, so that the sum is 1 - TV.

    The acceptance of a sampled draft (speculators' `nla`, LK-alpha).
    """
    both = torch.minimum(teacher, logits.softmax(-1)).sum(-1)
    return -both.clamp_min(torch.finfo(both.dtype).tiny).log()  # a draft that is hardly ever accepted learns too


def head_loss(rows: Tensor, weight: Tensor, loss: RowLoss, chunk: int) -> tuple[Tensor, Tensor]:
    """Run a head, weight [S, w], over rows [N, w]: the summed loss, and what `loss` says of each row, [N].

    At most `chunk` rows of logits exist at a time, forward and backward.
    """
    if len(rows) <= chunk or not torch.is_grad_enabled():
        parts = [loss(F.linear(rows[at], weight).float(), at) for at in _spans(len(rows), chunk)]
        return torch.stack([total for total, _ in parts]).sum(), torch.cat([about for _, about in parts])
    found: tuple[Tensor, Tensor] = _ByChunks.apply(rows, weight, loss, chunk)  # type: ignore[no-untyped-call]
    return found


class _ByChunks(torch.autograd.Function):
    """Gradients are taken chunk by chunk in the forward pass, as in Liger Kernel's fused linear cross-entropy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, loss: RowLoss, chunk: int) -> tuple[Tensor, Tensor]:
        total, abouts, row_grads = rows.new_zeros((), dtype=torch.float32), [], []
        weight_grad = torch.zeros_like(weight) if weight.requires_grad else None
        for at in _spans(len(rows), chunk):
            with torch.enable_grad():
                part = rows[at].detach().requires_grad_()
                head = weight.detach().requires_grad_(weight.requires_grad)
                value, about = loss(F.linear(part, head).float(), at)
            wanted = (part,) if weight_grad is None else (part, head)
            grads = torch.autograd.grad(value, wanted)
            row_grads.append(grads[0])
            if weight_grad is not None:
                weight_grad += grads[1]
            total = total + value.detach()
            abouts.append(about)
        ctx.save_for_backward(torch.cat(row_grads), weight_grad)
        about = torch.cat(abouts)
        ctx.mark_non_differentiable(about)
        return total, about

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        return rows * grads[0].to(rows.dtype), None if weight is None else weight * grads[0], None, None


def _spans(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, max(count, 1), chunk)]
