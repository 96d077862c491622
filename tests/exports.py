"""Exported answers of the bundled model's tokenizer, for tests of what training makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend.tiny
from backend.text.tokenizer import ChatTokenizer
from capture.export import held_out
from capture.export_npz import export_npz
from capture.records import Generation
from capture.store import Store
from tests.capture_rows import generation, write

TINY = ChatTokenizer.load(Path(backend.tiny.__file__).parent)
VOCAB = TINY.vocab_size
SPECIAL = sorted(TINY.added_ids)
PLAIN = [index for index in range(VOCAB) if index not in TINY.added_ids]


def prompt(number: int, *, is_held_out: bool) -> list[int]:
    """The number-th prompt of this split."""
    found = ([n, 5, 6] for n in range(100_000) if held_out([n, 5, 6], 0) == is_held_out)
    return [next(found) for _ in range(number + 1)][-1]


def row(answer: list[int], number: int = 0, *, is_held_out: bool = False, **fields: Any) -> Generation:
    """A captured answer to that prompt of that split."""
    given: dict[str, Any] = {
        "prompt_tokens": prompt(number, is_held_out=is_held_out),
        "completion_tokens": answer,
        "logprobs": [-0.5] * len(answer),
        "tokenizer_fingerprint": TINY.fingerprint,
    }
    return generation(**given | fields)


def exported(tmp_path: Path, *rows: Generation, name: str = "export", shard_bytes: int = 10**9) -> Path:
    """A folder of shards that holds them."""
    with Store.open(write(tmp_path / f"{name}.db", *rows)) as store:
        return export_npz(store, tmp_path / name, shard_bytes=shard_bytes).folder
