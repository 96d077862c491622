"""Stage B: the trunk is frozen as it will be shipped; the MTP head alone learns to draft the trunk's own answers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.models.qwen3_5 import Qwen35
from training.pretraining.curve import summary
from training.pretraining.export import export
from training.pretraining.optimizer import Optimizer, Plan
from training.pretraining.own_answers import Documents, answer, prompts
from training.pretraining.recipe import Prepared, prepare, trained_trunk
from training.recursion import SlotCounts, recursive_loss
from training.repetition import loops

Report = Callable[[str, int, int], None]  # what is going on, done, of how many


@dataclass(frozen=True)
class Settings:
    """What stage B depends on besides its documents."""

    documents: int = 1500
    held_out: int = 64
    slots: int = 4
    discount: float = 0.8
    tokens_per_step: int = 2048
    matrix_lr: float = 2e-3
    other_lr: float = 1e-3
    warmup: int = 10
    decay_share: float = 0.6
    seed: int = 2


def stage_b(directory: Path, minutes: float, settings: Settings, report: Report) -> None:
    """Answer the prompts, train the MTP head for what is left of `minutes`, export to directory/model.

    The exported directory also gets training.json, the run's facts and its curve.
    """
    began = time.monotonic()
    prepared = prepare(directory)
    model = trained_trunk(directory, prepared)
    _round(model)
    shipped = directory / "model"
    export(model, prepared.tokenizer, shipped)
    documents = {kind: _documents(directory, kind, prepared, settings, report) for kind in ("train", "held_out")}
    left = max(minutes * 60 - (time.monotonic() - began), 30.0)
    _train(model, documents["train"], documents["held_out"], settings, left, directory / "loss.jsonl", report)
    export(model, prepared.tokenizer, shipped)
    (shipped / "training.json").write_text(json.dumps(summary(directory)) + "\n", encoding="utf-8")


def _round(model: Qwen35) -> None:
    """Round all weights to bfloat16 values: the head learns from the trunk that is shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def _documents(directory: Path, kind: str, prepared: Prepared, settings: Settings, report: Report) -> Documents:
    path = directory / f"own_answers_{kind}.npz"
    if path.exists():
        return Documents.load(path)
    held_out = kind == "held_out"
    count = settings.held_out if held_out else settings.documents
    asked = prompts(prepared.facts, settings.seed, count, prepared.encode, held_out=held_out)
    pairs: list[tuple[list[int], list[int]]] = []
    for temperature, share in ((0.0, asked[::2]), (0.7, asked[1::2])):
        done = len(pairs)
        pairs += answer(
            directory / "model",
            share,
            temperature,
            settings.seed,
            partial(_report_answers, report, kind, done, count),
        )
    # A loop is easy to foresee and long: it would crowd out what the head has to learn, and flatter its figures.
    documents = Documents.join([(asked_ids, own) for asked_ids, own in pairs if not loops(own)])
    documents.save(path)
    return documents


def _report_answers(report: Report, kind: str, before: int, count: int, done: int) -> None:
    report(f"stage B  own answers ({kind})", before + done, count)


def batches(documents: Documents, tokens: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass in random order: (tokens int64 [B, L] padded with 0, own bool [B, L]), about `tokens` each.

    Documents of like length stand together, so that little is padding.
    """
    offsets = documents.doc_offsets
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    order = sorted(range(len(documents)), key=lambda d: (lengths[d], rng.random()))
    groups: list[list[int]] = [[]]
    for d in order:
        if groups[-1] and lengths[d] * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(d)
    rng.shuffle(groups)
    for group in groups:
        width = max(lengths[d] for d in group)
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        own = torch.zeros(len(group), width, dtype=torch.bool)
        for row, d in enumerate(group):
            ids[row, : lengths[d]] = torch.from_numpy(documents.tokens[offsets[d] : offsets[d + 1]].astype("int64"))
            own[row, documents.prompt_lengths[d] : lengths[d]] = True
        yield ids, own


@torch.no_grad()
def hit_rates(model: Qwen35, documents: Documents, settings: Settings) -> list[float]:
    """hit_s per slot: the share of drafts that equal the trunk's first choice, the document's tokens being given."""
    hits, rows = [0] * settings.slots, [0] * settings.slots
    for ids, own in batches(documents, settings.tokens_per_step, random.Random(0)):
        _, counts = recursive_loss(model, ids, own, settings.slots, settings.discount)
        hits = [a + b for a, b in zip(hits, counts.hits, strict=True)]
        rows = [a + b for a, b in zip(rows, counts.rows, strict=True)]
    return [h / max(r, 1) for h, r in zip(hits, rows, strict=True)]


def _train(
    model: Qwen35,
    documents: Documents,
    held_out: Documents,
    settings: Settings,
    seconds: float,
    curve: Path,
    report: Report,
) -> None:
    assert model.mtp is not None
    model.requires_grad_(False)
    model.mtp.requires_grad_(True)
    optimizer = Optimizer(model.mtp.named_parameters(), settings.matrix_lr, settings.other_lr)
    steps = 10_000  # more than any time allows; the pace decides
    plan = Plan(steps, settings.warmup, 1)
    rng = random.Random(f"stage b {settings.seed}")
    stream = _endless(documents, settings.tokens_per_step, rng)
    began = time.monotonic()
    with curve.open("a", encoding="utf-8") as lines:

        def note(step: int, **content: Any) -> None:
            line = {"stage": "b", "step": step, **content, "seconds": time.monotonic() - began}
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        note(0, documents=len(documents), held_out_hits=hit_rates(model, held_out, settings))
        step = 0
        while step < plan.steps:
            ids, own = next(stream)
            loss, counts = recursive_loss(model, ids, own, settings.slots, settings.discount)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.mtp.parameters(), 1.0)
            optimizer.step(plan.factor(step))
            step += 1
            note(step, loss=_means(counts), hits=_shares(counts))
            if step >= settings.warmup and step % 10 == 0:
                pace = (time.monotonic() - began) / step
                plan = plan.replanned(step, max(int(seconds / pace), step + 1), settings.decay_share)
            report(f"stage B  slots {' '.join(f'{x:.2f}' for x in _shares(counts))}", step, plan.steps)
        note(step, held_out_hits=hit_rates(model, held_out, settings))


def _endless(documents: Documents, tokens: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches(documents, tokens, rng)


def _means(counts: SlotCounts) -> list[float]:
    return [loss / max(rows, 1) for loss, rows in zip(counts.loss, counts.rows, strict=True)]


def _shares(counts: SlotCounts) -> list[float]:
    return [hits / max(rows, 1) for hits, rows in zip(counts.hits, counts.rows, strict=True)]
