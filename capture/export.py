"""Rows out as npz shards for training, whole documents each, with a manifest beside them.

Knows the shard format (DESIGN §7) and how a file is put down safely; knows no model and no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import numpy as np

from capture.records import CaptureError, Generation, TokenIds, utc_now
from capture.store import Store

FORMAT = "draftloop-npz"
FORMAT_VERSION = 1
SHARD_BYTES = 256_000_000
# What a token and a document add to a shard, and what the archive's own headers take at most.
TOKEN_BYTES = 4 + 1 + 4
DOCUMENT_BYTES = 8 + 4 + 36 * 4 + 1
ARCHIVE_BYTES = 16_384

GROUP = ("weights_fingerprint", "tokenizer_fingerprint", "template_fingerprint")
FINISHED_ONLY = "status = 'finished'"


class NothingToExportError(CaptureError):
    """No row of the file makes a document."""


@dataclass(frozen=True)
class Skipped:
    """Rows that became no document, by reason."""

    unfinished: int = 0  # failed or cancelled, and not asked for
    no_tokens_kept: int = 0  # the row's token ids are not in the file
    no_completion: int = 0  # nothing was generated


@dataclass(frozen=True)
class Shard:
    """One written file."""

    file: str
    bytes: int
    sha256: str
    documents: int
    held_out_documents: int
    prompt_tokens: int
    completion_tokens: int
    fingerprints: dict[str, Any]


@dataclass(frozen=True)
class Export:
    """A complete export: `folder` holds the shards and manifest.json."""

    folder: Path
    shards: tuple[Shard, ...]
    skipped: Skipped

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


def default_folder(parent: Path) -> Path:
    """`draftloop-export-<UTC time>` in `parent`, with a number after it where that is taken."""
    name = f"draftloop-export-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    candidate, attempt = parent / name, 1
    while candidate.exists():
        attempt += 1
        candidate = parent / f"{name}-{attempt}"
    return candidate


def held_out(prompt: TokenIds, key_length: int) -> bool:
    """Whether a document is in the held-out tenth: by its token ids up to the end of the first user turn alone.

    So retries of a question, and later turns of its conversation, stay on one side. `key_length` 0: the whole prompt.
    """
    key = np.asarray(prompt, dtype="<u4")[: key_length or None]
    return int.from_bytes(hashlib.sha256(key.tobytes()).digest()[:8], "big") % 10 == 0


def export_npz(
    store: Store,
    folder: Path,
    *,
    include_unfinished: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_row: Callable[[], None] | None = None,
) -> Export:
    """Write every trainable row of `store` into `folder`, as it stands at one moment.

    Documents of different weights, tokenizer or template fingerprints never share a shard. A shard exceeds
    `shard_bytes` only where one document alone does. `folder` may exist if it is empty. manifest.json is written last:
    without it an export is not complete. On failure what was written is removed again. `on_row` follows each row read.
    Raises NothingToExportError, or CaptureError where the folder cannot be written.
    """
    try:
        with _fresh_folder(folder), store.snapshot():
            return _export(store, folder, include_unfinished, shard_bytes, on_row or (lambda: None))
    except OSError as error:
        raise CaptureError(f"cannot export to {folder}: {error.strerror or error}") from error


def _export(
    store: Store, folder: Path, include_unfinished: bool, shard_bytes: int, on_row: Callable[[], None]
) -> Export:
    created = utc_now()
    shards: list[Shard] = []
    skipped: Counter[str] = Counter()
    chosen = None if include_unfinished else FINISHED_ONLY
    if not include_unfinished:
        skipped["unfinished"] = sum(n for (status,), n in store.groups(["status"]) if status != "finished")
    for fingerprints, _ in store.groups(GROUP, where=chosen):
        same = " AND ".join(f"{name} = ?" for name in GROUP)
        rows = store.iterate(where=f"{same} AND {chosen or 'true'}", arguments=fingerprints)
        for batch in _batches(rows, shard_bytes, skipped, on_row):
            shards.append(batch.write(folder, f"shard-{len(shards):05d}.npz", created))
    reasons = Skipped(**skipped)
    if not shards:
        raise NothingToExportError(f"nothing to export from {store.path}: {_describe(reasons)}")
    _put_down(folder / "manifest.json", lambda file: file.write(_manifest(created, shards, reasons)))
    return Export(folder, tuple(shards), reasons)


def _batches(
    rows: Iterator[Generation], limit: int, skipped: Counter[str], on_row: Callable[[], None]
) -> Iterator[_Batch]:
    """Gather rows into batches of at most `limit` bytes; count those that make no document."""
    batch = _Batch()
    for row in rows:
        on_row()
        if row.prompt_tokens is None or row.completion_tokens is None:
            skipped["no_tokens_kept"] += 1
        elif not len(row.completion_tokens):
            skipped["no_completion"] += 1
        else:
            tokens = len(row.prompt_tokens) + len(row.completion_tokens)
            if batch.ids and batch.size_with(tokens) > limit:
                yield batch
                batch = _Batch()
            batch.add(row)
    if batch.ids:
        yield batch


@dataclass
class _Batch:
    """The arrays of one shard while they grow, as raw bytes: about the size of the file, whatever the rows."""

    tokens: bytearray = field(default_factory=bytearray)
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=lambda: [0])
    prompt_lengths: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    weights: str = ""
    tokenizer: str = ""
    template: str = ""
    drafters: set[tuple[str, str]] = field(default_factory=set)
    builds: set[str] = field(default_factory=set)

    def size_with(self, tokens: int) -> int:
        """Bytes of the file after one more document of so many tokens."""
        total = self.offsets[-1] + tokens
        meta = 4 * len(json.dumps(self.fingerprints()))
        return ARCHIVE_BYTES + meta + TOKEN_BYTES * total + DOCUMENT_BYTES * (len(self.ids) + 1)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "chat_template": self.template,
            "drafters": [{"name": name, "fingerprint": fingerprint} for name, fingerprint in sorted(self.drafters)],
            "builds": sorted(self.builds),
        }

    def add(self, row: Generation) -> None:
        prompt, completion = _bytes(row.prompt_tokens, "<u4"), _bytes(row.completion_tokens, "<u4")
        # Ids are below 2**31 (records.py), so the same bytes are int32.
        self.tokens += prompt + completion
        n, m = len(prompt) // 4, len(completion) // 4
        self.loss_mask += bytes(n) + b"\x01" * m
        known = _bytes(row.logprobs, "<f4")
        self.logprobs += _unknown(n) + (known or _unknown(m))
        self.offsets.append(self.offsets[-1] + n + m)
        self.prompt_lengths.append(n)
        self.ids.append(row.id)
        self.split.append(held_out(row.prompt_tokens if row.prompt_tokens is not None else (), row.split_key_length))
        self.weights, self.tokenizer = row.weights_fingerprint, row.tokenizer_fingerprint
        self.template = row.template_fingerprint
        self.drafters.add((row.drafter, row.drafter_fingerprint))
        self.builds.add(row.build)

    def write(self, folder: Path, name: str, created: str) -> Shard:
        fingerprints = self.fingerprints()
        meta = {**_header(created), "fingerprints": fingerprints}
        path = folder / name
        _put_down(
            path,
            lambda file: np.savez(
                file,
                tokens=np.frombuffer(self.tokens, dtype="<i4"),
                doc_offsets=np.array(self.offsets, dtype="<i8"),
                prompt_lengths=np.array(self.prompt_lengths, dtype="<i4"),
                loss_mask=np.frombuffer(self.loss_mask, dtype=np.uint8),
                logprobs=np.frombuffer(self.logprobs, dtype="<f4"),
                doc_ids=np.array(self.ids, dtype="<U36"),
                split=np.array(self.split, dtype=np.uint8),
                meta=np.array(json.dumps(meta)),
            ),
        )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Shard(
            file=name,
            bytes=path.stat().st_size,
            sha256=digest,
            documents=len(self.ids),
            held_out_documents=sum(self.split),
            prompt_tokens=sum(self.prompt_lengths),
            completion_tokens=self.offsets[-1] - sum(self.prompt_lengths),
            fingerprints=fingerprints,
        )


def _bytes(values: Any, dtype: str) -> bytes:
    return b"" if values is None else np.asarray(values, dtype=dtype).tobytes()


def _unknown(count: int) -> bytes:
    return np.full(count, np.nan, dtype="<f4").tobytes()


def _header(created: str) -> dict[str, Any]:
    try:
        tool = version("draftloop")
    except PackageNotFoundError:  # run from a source tree that is not installed
        tool = "unknown"
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "created": created, "tool": f"draftloop {tool}"}


def _manifest(created: str, shards: list[Shard], skipped: Skipped) -> bytes:
    summed = ("documents", "held_out_documents", "prompt_tokens", "completion_tokens")
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in summed}
    manifest = {
        **_header(created),
        "counts": {**counts, "skipped_rows": asdict(skipped)},
        "shards": [asdict(shard) for shard in shards],
    }
    return (json.dumps(manifest, indent=2) + "\n").encode()


def _describe(skipped: Skipped) -> str:
    reasons = {
        "failed or cancelled (--include-unfinished exports them)": skipped.unfinished,
        "without token ids": skipped.no_tokens_kept,
        "without generated tokens": skipped.no_completion,
    }
    found = [f"{count} {'row' if count == 1 else 'rows'} {reason}" for reason, count in reasons.items() if count]
    return ", ".join(found) or "it holds no rows"


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[None]:
    """Make the folder, or take an empty one; on failure leave things as they were."""
    made = not folder.exists()
    # As closed to others as the capture file: token ids are the conversations.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        raise CaptureError(f"{folder} is not empty: name a new folder, so that no two exports mix")
    try:
        yield
    except BaseException:
        for path in (*folder.glob("shard-*.npz*"), *folder.glob("manifest.json*")):
            path.unlink()
        if made:
            folder.rmdir()
        raise
    _sync(folder.parent)


def _put_down(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name, and give it its own only when it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
