"""A student's losses look at its whole head; what goes wrong otherwise, as a gradient and in figures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from training.losses import (
    acceptance_loss,
    bucketed_cross_entropy,
    hard_cross_entropy,
    head_loss,
    soft_cross_entropy,
)

TOP = 4


def on_the_teachers_best(logits: Tensor, teacher: Tensor) -> Tensor:
    """The bug: both sides renormalised over the teacher's best ids."""
    best = teacher.topk(TOP, dim=-1)
    shown = best.values / best.values.sum(-1, keepdim=True)
    return F.kl_div(logits.gather(-1, best.indices).log_softmax(-1), shown, reduction="none").sum(-1)


def test_a_huge_logit_outside_the_teachers_best_is_seen_and_pushed_down() -> None:
    teacher = torch.tensor([[8.0, 7.0, 6.5, 6.0, *[-20.0] * 28]]).softmax(-1)
    logits = teacher.clamp_min(1e-9).log()
    logits[0, 20] = 12.0
    logits.requires_grad_()
    assert float(on_the_teachers_best(logits.detach(), teacher)) < 1e-4
    loss = soft_cross_entropy(logits, teacher).sum()
    assert float(loss.detach()) > 10
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient[0, 20]) > 0.9
    assert all(float(value) < 0 for value in gradient[0, :TOP])
    (blind,) = torch.autograd.grad(on_the_teachers_best(logits, teacher).sum(), logits)
    assert float(blind[0, 20]) == 0


def fitted(loss: str) -> dict[str, float]:
    """A student that has too few directions for its teacher, trained by one loss: what it is worth."""
    generator = torch.Generator().manual_seed(0)
    rows, ids, wide, narrow = 512, 128, 32, 6
    x = torch.randn(rows, wide, generator=generator)
    teacher = (x @ torch.randn(wide, ids, generator=generator) * 0.7).softmax(-1)
    down = nn.Parameter(torch.randn(wide, narrow, generator=generator) * wide**-0.5)
    head = nn.Parameter(torch.randn(narrow, ids, generator=generator) * 0.1)
    optimizer = torch.optim.Adam([down, head], lr=3e-2)
    functions = {"whole": soft_cross_entropy, "best": on_the_teachers_best, "acceptance": acceptance_loss}
    for _ in range(150):
        functions[loss](x @ down @ head, teacher).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        student = (x @ down @ head).softmax(-1)
    best = teacher.topk(TOP, dim=-1).indices
    inside = student.gather(-1, best)
    return {
        "argmax": float((student.argmax(-1) == teacher.argmax(-1)).float().mean()),
        "accepted": float(torch.minimum(student, teacher).sum(-1).mean()),
        "outside": 1 - float(inside.sum(-1).mean()),
        "argmax seen on the best alone": float((inside.argmax(-1) == 0).float().mean()),
    }


def test_what_a_loss_over_the_teachers_best_costs_and_why_nobody_notices() -> None:
    whole, best, acceptance = fitted("whole"), fitted("best"), fitted("acceptance")
    assert whole["accepted"] > 2 * best["accepted"]
    assert whole["argmax"] > 1.5 * best["argmax"]
    assert best["outside"] > 0.8 > whole["outside"]
    assert best["argmax seen on the best alone"] > 0.8 * whole["argmax seen on the best alone"]
    assert acceptance["accepted"] > whole["accepted"]


def test_a_row_weighs_what_the_teacher_puts_on_the_hot_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 8, generator=generator)
    shares = torch.randn(3, 8, generator=generator).softmax(-1)
    mass = torch.tensor([1.0, 0.5, 0.0])
    whole = soft_cross_entropy(logits, shares)
    torch.testing.assert_close(soft_cross_entropy(logits, shares * mass[:, None]), whole * mass)
    torch.testing.assert_close(whole, F.cross_entropy(logits, shares, reduction="none"))


def test_a_teachers_best_and_one_bucket_for_the_rest_still_push_down_what_is_outside() -> None:
    generator = torch.Generator().manual_seed(4)
    teacher = torch.randn(3, 32, generator=generator).mul(2).softmax(-1)
    best = teacher.topk(TOP, dim=-1)
    tail = 1 - best.values.sum(-1)
    logits = torch.randn(3, 32, generator=generator)
    logits[:, int(teacher[0].argmin())] = 12.0
    logits.requires_grad_()
    loss = bucketed_cross_entropy(logits, best.values, best.indices, tail)
    for row in range(3):  # a coarser pair of distributions: TOP ids, and all the others as one
        inside = best.indices[row].tolist()
        q = logits[row].softmax(-1)
        merged = torch.stack([*(q[i] for i in inside), sum(q[i] for i in range(32) if i not in inside)])  # type: ignore[list-item]
        expected = -(torch.cat((best.values[row], tail[row, None])) * merged.log()).sum()
        torch.testing.assert_close(loss[row], expected, rtol=1e-4, atol=1e-5)
    assert bool((loss <= soft_cross_entropy(logits, teacher)).all())
    (gradient,) = torch.autograd.grad(loss[0], logits)
    assert float(gradient[0].max()) == float(gradient[0, int(teacher[0].argmin())]) > 0.5
    everything = teacher.topk(32, dim=-1)
    whole = bucketed_cross_entropy(logits, everything.values, everything.indices, torch.full((3,), 1e-7))
    torch.testing.assert_close(whole, soft_cross_entropy(logits, teacher))


def test_tokens_outside_the_hot_vocabulary_cost_nothing_in_hard_cross_entropy() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss = hard_cross_entropy(logits, torch.tensor([5, -1, 0]))
    assert float(loss[1].detach()) == 0
    torch.testing.assert_close(loss[0], -logits[0].log_softmax(-1)[5])
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert float(gradient[1].abs().sum()) == 0


def test_the_acceptance_loss_is_that_of_a_sampled_draft() -> None:
    generator = torch.Generator().manual_seed(3)
    p, logits = torch.randn(16, generator=generator).softmax(-1), torch.randn(1, 16, generator=generator)
    tv = 0.5 * (p - logits.softmax(-1)).abs().sum()
    assert float(acceptance_loss(logits, p[None])) == pytest.approx(-float((1 - tv).log()), rel=1e-5)
    hot = p[None, :8]  # unrenormalised: what lies outside is lost
    assert float(acceptance_loss(logits[:, :8], hot)) >= -float(hot.sum().log()) - 1e-6


def test_a_draft_that_is_hardly_ever_accepted_is_pushed_up_too() -> None:
    logits = torch.tensor([[40.0, 0.0]], requires_grad=True)  # q is e^-40 where the teacher is
    loss = acceptance_loss(logits, torch.tensor([[0.0, 1.0]]))
    assert loss.item() == pytest.approx(40, rel=1e-6)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([1, -1], rel=1e-6)


@settings(max_examples=25)
@given(st.integers(1, 23), st.integers(1, 8), st.booleans())
def test_a_head_in_chunks_is_the_head_at_once(rows: int, chunk: int, frozen: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    teacher = torch.randn(rows, 12, generator=generator).softmax(-1)
    found = []
    for size in (chunk, 100):
        generator.manual_seed(chunk)
        x = torch.randn(rows, 6, generator=generator).requires_grad_()
        weight = torch.randn(12, 6, generator=generator).requires_grad_(not frozen)

        def loss(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            return soft_cross_entropy(logits, teacher[at]).sum(), logits.detach().argmax(-1)

        total, picked = head_loss(x, weight, loss, size)
        (total * 3).backward()
        found.append((total.detach(), picked, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        if one is None:
            assert other is None
        else:
            torch.testing.assert_close(one, other)


def test_no_more_than_a_chunk_of_logits_exists_at_a_time() -> None:
    seen: list[int] = []

    def loss(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return logits.square().sum(), logits[:, 0].detach()

    head_loss(torch.ones(10, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True), loss, 4)
    assert seen == [4, 4, 2]
