"""Rows as Parquet: token ids, masks and logprobs as the npz shards have them, and the text beside them.

Knows the columns; knows neither folders nor manifests. Needs pyarrow, which the extra `train` brings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from capture.export import EVERYTHING, SHARD_BYTES, Contents, Export, Format, Wanted, export_as, tokens_of
from capture.records import CaptureError, Generation, storable
from capture.store import Store

FORMAT, FORMAT_VERSION = "draftloop-parquet", 1
TEXTS = ("id", "created_at", "model", "status", "finish_reason", "drafter", "client", "response_text", "reasoning")
PRINTS = ("weights_fingerprint", "tokenizer_fingerprint", "template_fingerprint", "drafter_fingerprint", "build")
JSON_TEXTS = ("parameters", "request", "tool_calls")
ROWS_AT_ONCE = 1000  # turned into columns, before there are more of them than a shard's bytes say


def export_parquet(
    store: Store,
    folder: Path,
    wanted: Wanted = EVERYTHING,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_row: Callable[[], None] | None = None,
) -> Export:
    """Write every wanted row, as `capture.export.export_as` does; `shard_bytes` counts before compression.

    Raises CaptureError too where there is no pyarrow.
    """
    try:
        import pyarrow.parquet  # noqa: F401  # a large library: only who asks for this format waits for it
    except ImportError:
        raise CaptureError("--to parquet needs pyarrow: pip install 'draftloop[train]'") from None
    form = Format(FORMAT, FORMAT_VERSION, ".parquet", _Columns)
    return export_as(form, store, folder, wanted, shard_bytes=shard_bytes, on_row=on_row)


def _schema() -> Any:
    import pyarrow as pa

    fields = [(name, pa.string()) for name in (*TEXTS, *PRINTS, *JSON_TEXTS)]
    fields += [("seed", pa.uint64()), ("prompt_length", pa.int32()), ("split", pa.string())]
    fields += [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))]
    return pa.schema([*fields, ("logprobs", pa.list_(pa.float32()))])


class _Columns:
    """The rows of one shard while it grows."""

    def __init__(self) -> None:
        import pyarrow as pa

        self.contents = Contents()
        self._pa = pa
        self._schema = _schema()
        self._batches: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, row: Generation, limit: int) -> bool:
        document, size = _document(row)
        if self.contents.documents and self._bytes + size > limit:
            return False
        document["split"] = "held_out" if self.contents.add(row) else "train"
        self._rows.append(document)
        self._bytes += size
        if len(self._rows) == ROWS_AT_ONCE:
            self._gather()
        return True

    def _gather(self) -> None:
        self._batches.append(self._pa.RecordBatch.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def write(self, file: IO[bytes], meta: Mapping[str, Any]) -> None:
        import pyarrow.parquet as pq

        self._gather()
        schema = self._schema.with_metadata({"draftloop": json.dumps(meta)})
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in self._batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _document(row: Generation) -> tuple[dict[str, Any], int]:
    """Its columns but the split, and their bytes. The mask is 1 and logprobs are known where a token is the model's."""
    prompt, completion = (np.asarray(ids, dtype=np.uint32) for ids in tokens_of(row))
    logprobs = np.full(len(prompt) + len(completion), np.nan, dtype=np.float32)
    if row.logprobs is not None and len(row.logprobs):
        logprobs[len(prompt) :] = row.logprobs
    document: dict[str, Any] = {name: getattr(row, name) for name in (*TEXTS, *PRINTS)}
    document |= {name: storable(json.dumps(getattr(row, name), ensure_ascii=False)) for name in JSON_TEXTS}
    size = sum(len(text or "") for text in document.values()) + 9 * len(logprobs)
    document |= {
        "seed": row.seed,
        "prompt_length": len(prompt),
        "input_ids": np.concatenate([prompt, completion]).astype(np.int32),
        "loss_mask": np.repeat(np.array([0, 1], dtype=np.int8), [len(prompt), len(completion)]),
        "logprobs": logprobs,
    }
    return document, size
