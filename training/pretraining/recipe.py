"""The recipe of the bundled model, end to end: corpus, tokenizer, stage A, stage B, checkpoint directory.

Everything it makes stands in one run directory, and each part is made once: running again continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from backend.models.qwen3_5 import Qwen35
from training.errors import TrainingError
from training.pretraining import sources
from training.pretraining.corpus import Encode, Rows, conversations, encode_document, pack, tokenizer_texts
from training.pretraining.export import model_config, special_ids
from training.pretraining.optimizer import Plan
from training.pretraining.pretrain import Progress, Run, Settings, pretrain
from training.pretraining.tokenizer import save, train

ROW_TOKENS = 256
HELD_OUT_ROWS = 24
TOKENIZER_SEED, CORPUS_SEED, HELD_OUT_SEED = 1, 0, 0
_PACE_STEPS = 4


@dataclass(frozen=True)
class Prepared:
    """What both stages stand on."""

    tokenizer: Qwen3_5Tokenizer
    facts: list[sources.Fact]
    encode: Encode


def prepare(directory: Path) -> Prepared:
    """Collect the facts; train the tokenizer, or load the one this run already has."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = sources.collect()
    folder = directory / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        save(train(tokenizer_texts(facts, TOKENIZER_SEED, 40_000)), folder)
    tokenizer: Qwen3_5Tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return Prepared(tokenizer, facts, encode)


def rows_of(prepared: Prepared, count: int, *, held_out: bool = False) -> Rows:
    """`count` packed rows of the corpus."""
    seed = HELD_OUT_SEED if held_out else CORPUS_SEED
    stream = conversations(prepared.facts, seed, held_out=held_out)
    documents = (encode_document(conversation, prepared.encode) for conversation in stream)
    return pack(documents, ROW_TOKENS, count, special_ids(prepared.tokenizer)[1])


def stage_a(
    directory: Path, minutes: float, steps: int | None, settings: Settings, report: Callable[[Progress], None]
) -> None:
    """Train trunk and MTP slot 0, planned for `minutes` from now or for exactly `steps`; resumes what it finds."""
    began = time.monotonic()
    prepared = prepare(directory)
    kept = directory / "rows.npz"
    if kept.exists():
        with np.load(kept) as content:
            rows = Rows(content["tokens"], content["weights"].astype(np.float32) / 4)
            planned = int(content["steps"])
    else:
        planned = steps or _affordable(prepared, minutes, settings)
        spare = 1.0 if steps else 1.5  # text for a machine that turns out faster than the trial
        rows = rows_of(prepared, int(planned * spare) * settings.rows_per_step)
        quarters = np.round(rows.weights * 4).astype(np.uint8)
        np.savez_compressed(kept, tokens=rows.tokens, weights=quarters, steps=planned)
    plan = Plan(planned, settings.warmup, max(1, int(planned * settings.decay_share)))
    run = Run(model_config(prepared.tokenizer), rows, plan, settings)
    if (directory / "stage_a.pt").exists():
        run.resume(directory / "stage_a.pt")
    facts = {
        "settings": asdict(settings),
        "planned_steps": planned,
        "tokens_per_step": settings.rows_per_step * ROW_TOKENS,
    }
    facts |= {"packages": sources.versions(), "facts": len(prepared.facts), "threads": torch.get_num_threads()}
    (directory / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    remaining = minutes - (time.monotonic() - began) / 60 if steps is None else None
    pretrain(run, rows_of(prepared, HELD_OUT_ROWS, held_out=True), directory, minutes=remaining, report=report)


def trained_trunk(directory: Path, prepared: Prepared) -> Qwen35:
    """The finished stage A model. Raises TrainingError when stage A has not ended."""
    path = directory / "stage_a.pt"
    if not path.exists():
        raise TrainingError(f"{directory} holds no stage A checkpoint: run stage a first")
    content = torch.load(path, weights_only=True)
    if content["step"] < content["plan"]["steps"]:
        raise TrainingError(f"stage A stands at step {content['step']} of {content['plan']['steps']}: finish it first")
    model = Qwen35(model_config(prepared.tokenizer))
    model.load_state_dict(content["model"])
    return model


def _affordable(prepared: Prepared, minutes: float, settings: Settings) -> int:
    """How many steps fit into `minutes` at the pace of a few trial steps."""
    rows = rows_of(prepared, _PACE_STEPS * settings.rows_per_step)
    trial = Run(model_config(prepared.tokenizer), rows, Plan(_PACE_STEPS, 1, 1), replace(settings, seed=1))
    trial.advance()  # the first step pays for allocations
    began = time.monotonic()
    while not trial.done:
        trial.advance()
    pace = (time.monotonic() - began) / (_PACE_STEPS - 1)
    return max(settings.warmup + 10, int(minutes * 60 / pace))
