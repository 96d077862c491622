"""Rows as npz shards of token ids, logprobs and masks (DESIGN §7): what our own training reads.

Knows the arrays; knows neither folders nor manifests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from capture.export import EVERYTHING, SHARD_BYTES, Contents, Export, Format, Wanted, export_as, tokens_of
from capture.records import Generation
from capture.store import Store

FORMAT = "draftloop-npz"
FORMAT_VERSION = 1
# What a token and a document add to a shard, and what the archive's own headers take at most.
TOKEN_BYTES = 4 + 1 + 4
DOCUMENT_BYTES = 8 + 4 + 36 * 4 + 1
ARCHIVE_BYTES = 16_384


def export_npz(
    store: Store,
    folder: Path,
    wanted: Wanted = EVERYTHING,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_row: Callable[[], None] | None = None,
) -> Export:
    """Write every wanted row's tokens, as `capture.export.export_as` does."""
    form = Format(FORMAT, FORMAT_VERSION, ".npz", _Arrays)
    return export_as(form, store, folder, wanted, shard_bytes=shard_bytes, on_row=on_row)


class _Arrays:
    """The arrays of one shard while they grow, as raw bytes: about the size of the file, whatever the rows."""

    def __init__(self) -> None:
        self.contents = Contents()
        self._tokens, self._loss_mask, self._logprobs = bytearray(), bytearray(), bytearray()
        self._offsets = [0]
        self._prompt_lengths: list[int] = []
        self._ids: list[str] = []
        self._split: list[int] = []

    def add(self, row: Generation, limit: int) -> bool:
        prompt, completion = (np.asarray(ids, dtype="<u4").tobytes() for ids in tokens_of(row))
        n, m = len(prompt) // 4, len(completion) // 4
        if self._ids and self._size_with(n + m) > limit:
            return False
        # Ids are below 2**31 (records.py), so the same bytes are int32.
        self._tokens += prompt + completion
        self._loss_mask += bytes(n) + b"\x01" * m
        known = b"" if row.logprobs is None else np.asarray(row.logprobs, dtype="<f4").tobytes()
        self._logprobs += _unknown(n) + (known or _unknown(m))
        self._offsets.append(self._offsets[-1] + n + m)
        self._prompt_lengths.append(n)
        self._ids.append(row.id)
        self._split.append(self.contents.add(row))
        return True

    def _size_with(self, tokens: int) -> int:
        """Bytes of the file after one more document of so many tokens."""
        total = self._offsets[-1] + tokens
        meta = 4 * len(json.dumps(self.contents.fingerprints()))
        return ARCHIVE_BYTES + meta + TOKEN_BYTES * total + DOCUMENT_BYTES * (len(self._ids) + 1)

    def write(self, file: IO[bytes], meta: Mapping[str, Any]) -> None:
        np.savez(
            file,
            tokens=np.frombuffer(self._tokens, dtype="<i4"),
            doc_offsets=np.array(self._offsets, dtype="<i8"),
            prompt_lengths=np.array(self._prompt_lengths, dtype="<i4"),
            loss_mask=np.frombuffer(self._loss_mask, dtype=np.uint8),
            logprobs=np.frombuffer(self._logprobs, dtype="<f4"),
            doc_ids=np.array(self._ids, dtype="<U36"),
            split=np.array(self._split, dtype=np.uint8),
            meta=np.array(json.dumps(meta)),
        )


def _unknown(count: int) -> bytes:
    return np.full(count, np.nan, dtype="<f4").tobytes()
