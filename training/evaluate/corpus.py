"""Fixed texts as documents: what somebody else wrote, for drafts at depths that own answers seldom reach.

A text is forced as one answer to its own first tokens. It is not the model's own: no walk of it is serving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backend.text.tokenizer import ChatTokenizer
from training.data import Document
from training.errors import TrainingError

PROMPT = 64  # tokens


def texts(paths: Sequence[Path], tokenizer: ChatTokenizer, longest: int) -> list[Document]:
    """One document a file, named as it is, of its first `longest` tokens. Raises TrainingError."""
    return [_text(path, tokenizer, longest) for path in paths]


def _text(path: Path, tokenizer: ChatTokenizer, longest: int) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise TrainingError(f"cannot read {path}: {reason}") from error
    tokens = np.array(tokenizer.plain(text)[:longest], np.int32)
    if len(tokens) < PROMPT + 2:
        raise TrainingError(f"{path} has {len(tokens)} tokens: a text needs {PROMPT + 2} to be drafted for")
    name = f"{path.name} {hashlib.sha256(tokens.tobytes()).hexdigest()[:12]}"
    return Document(name[-36:], tokens, PROMPT, np.full(len(tokens), np.nan, np.float32), held_out=True)
