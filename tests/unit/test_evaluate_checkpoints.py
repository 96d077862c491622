"""Checkpoints against their teacher: each figure is its definition, over every anchor of one fixed set of documents."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock, StudentConfig
from tests.factory import Shape, build
from training.data import Document, Forced
from training.errors import TrainingError
from training.evaluate import checkpoints
from training.evaluate.checkpoints import Checkpoint, Provenance, provenance
from training.recursion import recursive_outputs

SHAPE = Shape(vocab=48, hidden=32, intermediate=48, layers=("full",), heads=2, kv_heads=1, head_dim=16, std=0.3)
IDS = torch.arange(0, 48, 2, dtype=torch.int32)
SLOTS = 3


@pytest.fixture(scope="module")
def model() -> Qwen35:
    return build(SHAPE)


@pytest.fixture(scope="module")
def documents() -> list[Forced]:
    return [document(i, length, prompt) for i, (length, prompt) in enumerate(((14, 4), (9, 6), (21, 3), (6, 5)))]


def document(seed: int, length: int, prompt: int) -> Forced:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE.vocab, (length,), generator=generator).numpy().astype(np.int32)
    hidden = torch.randn(length, SHAPE.hidden, generator=generator)
    return Forced(Document(str(seed), tokens, prompt, np.zeros(length, np.float32), held_out=True), hidden)


def student(model: Qwen35, seed: int) -> StudentBlock:
    torch.manual_seed(seed)
    block = StudentBlock(StudentConfig.preset("sv", model.config, len(IDS)), model.config, IDS)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.requires_grad_(False)


def judged(model: Qwen35, documents: Sequence[Forced], *blocks: DraftBlock, **options: object) -> Provenance:
    checkpoints = [Checkpoint(f"checkpoint {i}", block, 100 + i) for i, block in enumerate(blocks)]
    given = {"slots": SLOTS, "resamples": 200} | options
    return provenance(model, checkpoints, documents, **given)  # type: ignore[arg-type]


def by_definition(model: Qwen35, block: DraftBlock, documents: Sequence[Forced], slot: int) -> dict[str, list[float]]:
    """Each figure at every anchor, with numpy and without windows."""
    ids = np.arange(SHAPE.vocab) if block.ids is None else block.ids.numpy()
    found: dict[str, list[float]] = {"kl": [], "mass": [], "top1": [], "top5": [], "gold": []}
    for forced in documents:
        tokens = torch.from_numpy(forced.document.tokens.astype(np.int64))
        rows = list(recursive_outputs(block, model.embed, tokens[None], forced.hidden[None], SLOTS))[slot][0]
        for base in range(forced.document.prompt_length, len(tokens) - 1 - slot):
            t = probabilities(model.logits(forced.hidden[base + slot]))
            s = probabilities(block.logits(rows[base - 1]))
            renormalised = t[ids] / t[ids].sum()
            found["kl"].append(float((renormalised * np.log(renormalised / s)).sum()))
            found["mass"].append(float(t[ids].sum()))
            order = ids[np.argsort(-s)]
            found["top1"].append(float(order[0] == t.argmax()))
            found["top5"].append(float(t.argmax() in order[:5]))
            found["gold"].append(float(order[0] == tokens[base + 1 + slot]))
    return found


def probabilities(logits: torch.Tensor) -> np.ndarray:
    values = np.exp(logits.numpy().astype(np.float64))
    return values / values.sum()


@pytest.mark.parametrize("slot", range(SLOTS))
def test_every_figure_is_the_mean_of_its_definition_over_all_anchors(
    model: Qwen35, documents: list[Forced], slot: int
) -> None:
    block = student(model, 1)
    found = judged(model, documents, block).checkpoints[0].slots[slot]
    wanted = by_definition(model, block, documents, slot)
    assert found.positions == len(wanted["kl"])
    means = [found.teacher_kl, found.covered_mass, found.top1, found.top5, found.gold_top1]
    for estimate, values in zip(means, wanted.values(), strict=True):
        assert estimate.value == pytest.approx(float(np.mean(values)), abs=1e-5)
        assert estimate.low <= estimate.value <= estimate.high


def test_a_teachers_choice_outside_the_ids_is_a_miss(model: Qwen35, documents: list[Forced]) -> None:
    """A block that copies the teacher on its ids can be right no more often than the teacher's choice is among them."""
    found = judged(model, documents, NativeBlock(model, IDS), teacher="mtp").checkpoints[0].slots[0]
    within = judged(model, documents, NativeBlock(model), teacher="mtp").checkpoints[0].slots[0]
    assert found.teacher_kl.value == pytest.approx(0, abs=1e-9)
    assert 0 < found.top1.value == found.top5.value < 1
    assert (within.top1.value, within.covered_mass.value) == (1, pytest.approx(1))
    assert found.covered_mass.value < 1


def test_the_native_block_is_its_own_perfect_copy_in_every_slot(model: Qwen35, documents: list[Forced]) -> None:
    for slot in judged(model, documents, NativeBlock(model), teacher="mtp").checkpoints[0].slots:
        assert slot.teacher_kl.value == pytest.approx(0, abs=1e-9)
        assert (slot.top1.value, slot.top5.value, slot.covered_mass.value) == (1, 1, pytest.approx(1))


def test_windows_as_long_as_the_documents_and_longer_are_the_same(model: Qwen35, documents: list[Forced]) -> None:
    whole, longer = (judged(model, documents, student(model, 1), window=window) for window in (21, 512))
    assert whole == longer
    assert whole.windows == 3  # the fourth document has one own token, and no anchor


def test_each_anchor_is_judged_once_however_short_the_windows(model: Qwen35, documents: list[Forced]) -> None:
    counts = [[slot.positions for slot in found.slots] for found in short(model, documents)]
    assert counts == [[9 + 2 + 17, 8 + 1 + 16, 7 + 0 + 15]] * 3


def short(model: Qwen35, documents: list[Forced]) -> list[object]:
    return [judged(model, documents, student(model, 1), window=window).checkpoints[0] for window in (4, 7, 512)]


def test_the_same_checkpoint_twice_differs_by_nothing(model: Qwen35, documents: list[Forced]) -> None:
    found = judged(model, documents, student(model, 1), student(model, 1), student(model, 2)).checkpoints
    assert found[0].differences is None
    assert found[1].differences is not None
    assert found[2].differences is not None
    for same, other in zip(found[1].differences, found[2].differences, strict=True):
        assert all((one.value, one.low, one.high) == (0, 0, 0) for one in same.values())
        assert other["teacher_kl"].value != 0


def test_redrawn_documents_are_the_same_for_all_checkpoints(model: Qwen35, documents: list[Forced]) -> None:
    """Paired: an advantage that every document has is told apart from noise that the checkpoints share."""
    a, b = judged(model, documents, student(model, 1), NativeBlock(model, IDS), teacher="mtp").checkpoints
    assert b.differences is not None
    paired = b.differences[0]["teacher_kl"]
    assert paired.high < 0
    assert paired.high - paired.low == pytest.approx(a.slots[0].teacher_kl.high - a.slots[0].teacher_kl.low)


def test_slots_that_no_document_reaches_are_left_out(model: Qwen35) -> None:
    found = judged(model, [document(0, 7, 5)], student(model, 1))
    assert [slot.positions for slot in found.checkpoints[0].slots] == [1]
    assert math.isfinite(found.checkpoints[0].slots[0].teacher_kl.value)
    assert (found.tokens, found.windows, found.documents) == (2, 1, 1)


def test_a_slot_is_judged_before_the_teachers_logits_of_the_next_are_made(
    model: Qwen35, documents: list[Forced], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    logits, sums = model.logits, checkpoints._sums

    def taught(hidden: torch.Tensor) -> torch.Tensor:
        done.append("taught")
        return logits(hidden)

    def counted(*arguments: Any) -> Any:
        done.append("judged")
        return sums(*arguments)

    monkeypatch.setattr(model, "logits", taught)
    monkeypatch.setattr(checkpoints, "_sums", counted)
    judged(model, documents[:1], student(model, 1), student(model, 2))
    assert done == ["taught", "judged", "judged"] * SLOTS


def test_the_table_is_plain_json(model: Qwen35, documents: list[Forced]) -> None:
    text = json.dumps(judged(model, documents, student(model, 1), student(model, 2)).as_json(), allow_nan=False)
    assert json.loads(text)["checkpoints"][1]["differences"][0]["top1"].keys() == {"value", "low", "high", "n"}


def test_documents_without_an_anchor_are_refused(model: Qwen35) -> None:
    with pytest.raises(TrainingError, match="none of 1 documents"):
        judged(model, [document(0, 6, 5)], student(model, 1))
