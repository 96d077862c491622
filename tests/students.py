"""Students of the bundled model, made once in a test process: its own head as a student, and one that knows nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from backend.drafters.student import StudentHeader, Target, save_student
from backend.models.student import StudentBlock, StudentConfig
from backend.models.weights import LoadedModel, load_model
from backend.text.tokenizer import ChatTokenizer
from tests.checkpoints import BUNDLED
from training.student import How, initialise


@cache
def bundled() -> LoadedModel:
    """In float32, with its MTP head."""
    return load_model(BUNDLED, torch.device("cpu"), torch.float32, with_mtp=True)


def whole(directory: Path, **header: Any) -> Path:
    """As wide as the native head and with its weights: it drafts whatever that drafts."""
    source = bundled()
    return _save(directory, StudentConfig.like_native(source.config, source.config.vocab_size), "slice", header)


def wild(directory: Path, **header: Any) -> Path:
    """Random weights over few ids: hardly ever right."""
    return _save(directory, StudentConfig.preset("sv-slim", bundled().config, 512), "random", header)


def _save(directory: Path, config: StudentConfig, how: How, header: dict[str, Any]) -> Path:
    source = bundled()
    block = StudentBlock(config, source.config, torch.arange(config.hot_rows))
    initialise(block, source.model, how)
    block = block.to(torch.bfloat16)
    target = Target(weights=source.weights, tokenizer=ChatTokenizer.load(BUNDLED).fingerprint, chat_template="any")
    save_student(directory, block, StudentHeader.of(block, target, **header))
    return directory
