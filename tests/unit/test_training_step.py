"""A step of distillation minimises what its losses are defined as, anchor by anchor and slot by slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.forced_answers import answers, lesson_of, write_hot
from training.distillation.batches import collate, windows
from training.distillation.schedule import Moment, Stage
from training.distillation.step import Lesson, Objective
from training.distillation.world import World
from training.recursion import recursive_outputs

PROMPT, LENGTH, SLOTS, DISCOUNT = 6, 26, 4, 0.8


@pytest.mark.parametrize(("stage", "reinforce"), [("kd", "ce"), ("ce", "ce"), ("ce", "acceptance")])
def test_losses_and_gradients_are_those_of_the_definition(tmp_path: Path, stage: Stage, reinforce: str) -> None:
    model, block, teacher = lesson_of(write_hot(tmp_path / "few.safetensors", 60))
    documents = [replace(forced, scalars=None) for forced in answers()[1]]
    chosen = [windows(i, PROMPT, LENGTH, 512, SLOTS)[0] for i in range(4)]
    batch = collate(chosen, documents, torch.device("cpu"), torch.float32)
    ids = block.ids.tolist()

    total = torch.zeros(())
    losses, weights, rows, hits = ([0.0] * SLOTS for _ in range(4))
    drafted = list(recursive_outputs(block, model.embed, batch.tokens, batch.hidden, SLOTS))
    for j in range(SLOTS):
        each = []
        for b in range(len(chosen)):
            for p in range(PROMPT, LENGTH - 1 - j):  # from the first generated token on, while x_{p+1+j} is there
                logits = F.linear(drafted[j][b, p - 1], block.head_weight)
                token = int(batch.tokens[b, p + 1 + j])
                taught = model.logits(batch.hidden[b, p + j]).softmax(-1)[ids].detach()  # of x_{p+1+j}, unrenormalised
                rows[j] += 1
                hits[j] += ids[int(logits.argmax())] == token
                if stage == "kd":
                    each.append(-(taught * logits.log_softmax(-1)).sum())
                elif reinforce == "acceptance":
                    each.append(-torch.minimum(taught, logits.softmax(-1)).sum().log())
                elif token in ids:
                    each.append(-logits.log_softmax(-1)[ids.index(token)])
        losses[j], weights[j] = float(torch.stack(each).detach().sum()), len(each)
        total = total + DISCOUNT**j * torch.stack(each).mean()
    total.backward()
    gradients = {name: parameter.grad for name, parameter in block.named()}
    for _, parameter in block.named():
        parameter.grad = None

    lesson = Lesson(model, block, teacher, Objective(SLOTS, DISCOUNT, reinforce, 0.0, 4096))
    found = lesson.gradients(batch, Moment(stage, 1.0, 1.0), World(0, 1, torch.device("cpu")))
    assert (found.weight, found.rows, found.hits) == (weights, rows, hits)
    assert 0 < sum(hits) < sum(rows)
    torch.testing.assert_close(found.loss, losses, rtol=1e-4, atol=0)
    for name, parameter in block.named():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
