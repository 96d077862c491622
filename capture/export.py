"""Rows out as shards for training, in a folder with a manifest beside them: which rows, which of them share a shard.

Knows no format of its own: what is in a shard is a `Batch`'s to know. Knows no model and no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from capture.conversation import opening, said
from capture.export_folder import fresh, put_down
from capture.filters import EVERY_ROW, Filters
from capture.records import CaptureError, Generation, TokenIds, storable, utc_now
from capture.selection import NearDuplicates, Sample, loops
from capture.store import Store

SHARD_BYTES = 256_000_000
PRIVATE = 0o600  # as the capture file: token ids are the conversations
GROUP = ("weights_fingerprint", "tokenizer_fingerprint", "template_fingerprint")
FINISHED_ONLY = "status = 'finished'"


class NothingToExportError(CaptureError):
    """No row of the file makes a document."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which rows become documents. Rows that failed or were cancelled do where they, or their status, are asked for."""

    rows: Filters = EVERY_ROW
    include_unfinished: bool = False
    sample: Sample | None = None
    near_duplicates: bool = True
    loops: bool = True  # answers that say the same over and over

    def sql(self, store: Store) -> tuple[str, list[Any]]:
        """A condition over the table's columns, and its arguments."""
        where, arguments = self.rows.sql()
        if not (self.include_unfinished or self.rows.status):
            where = f"({where}) AND {FINISHED_ONLY}"
        if self.sample is None:
            return where, arguments
        condition, more = store.sampled(self.sample, where=where, arguments=arguments)
        return f"({where}) AND {condition}", [*arguments, *more]


EVERYTHING = Wanted()


@dataclass(frozen=True)
class Skipped:
    """Rows that became no document, by reason."""

    unfinished: int = 0  # failed or cancelled, and not asked for
    redacted: int = 0
    no_tokens_kept: int = 0  # the row's token ids are not in the file
    no_completion: int = 0  # nothing was generated
    no_chat: int = 0  # a raw prompt, in a format of conversations
    not_text: int = 0  # images and the like, in a format of text
    broken_calls: int = 0  # a tool call that was cut off, in a format that needs whole ones
    not_sampled: int = 0
    loops: int = 0
    near_duplicates: int = 0

    def __str__(self) -> str:
        told = {
            "failed or cancelled (--include-unfinished exports them)": self.unfinished,
            "that were redacted": self.redacted,
            "without token ids": self.no_tokens_kept,
            "without generated tokens": self.no_completion,
            "of raw prompts, which are no conversations": self.no_chat,
            "with more than text in them": self.not_text,
            "with tool calls that were cut off": self.broken_calls,
            "not in the sample": self.not_sampled,
            "that loop": self.loops,
            "nearly the same as another": self.near_duplicates,
        }
        found = [f"{count} {'row' if count == 1 else 'rows'} {reason}" for reason, count in told.items() if count]
        return ", ".join(found)


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


class SkipError(Exception):
    """A format has no document for a row; `reason` is the field of `Skipped` that counts it."""

    def __init__(self, reason: Literal["no_chat", "not_text", "broken_calls"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Contents:
    """What a shard holds, as it grows. Tokens are counted where their ids are kept."""

    documents: int = 0
    held_out_documents: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    weights: str = ""
    tokenizer: str = ""
    template: str = ""
    drafters: set[tuple[str, str]] = field(default_factory=set)
    builds: set[str] = field(default_factory=set)

    def add(self, row: Generation) -> bool:
        """Count a row in; whether it is held out."""
        is_held_out = split_of(row) == "held_out"
        self.documents += 1
        self.held_out_documents += is_held_out
        self.prompt_tokens += 0 if row.prompt_tokens is None else len(row.prompt_tokens)
        self.completion_tokens += 0 if row.completion_tokens is None else len(row.completion_tokens)
        self.weights, self.tokenizer = row.weights_fingerprint, row.tokenizer_fingerprint
        self.template = row.template_fingerprint
        self.drafters.add((row.drafter, row.drafter_fingerprint))
        self.builds.add(row.build)
        return is_held_out

    def fingerprints(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "chat_template": self.template,
            "drafters": [{"name": name, "fingerprint": fingerprint} for name, fingerprint in sorted(self.drafters)],
            "builds": sorted(self.builds),
        }


class Batch(Protocol):
    """The documents of one shard while it grows, in memory."""

    contents: Contents

    def add(self, row: Generation, limit: int) -> bool:
        """Take a row in; False where the file would pass `limit` bytes and has documents. Raises SkipError."""

    def write(self, file: IO[bytes], meta: Mapping[str, Any]) -> None:
        """The whole file. `meta`: what the manifest says of it, for formats that have a place for that."""


@dataclass(frozen=True)
class Format:
    """`name` and `version` go into every manifest; `needs_ids`: rows without token ids make no documents."""

    name: str
    version: int
    suffix: str
    batch: Callable[[], Batch]
    needs_ids: bool = True

    def header(self, created: str) -> dict[str, Any]:
        try:
            tool = version("draftloop")
        except PackageNotFoundError:  # run from a source tree that is not installed
            tool = "unknown"
        return {
            "format": self.name,
            "format_version": self.version,
            "created": created,
            "tool": f"draftloop {tool}",
        }


def held_out(prompt: TokenIds, key_length: int) -> bool:
    """Whether a document is in the held-out tenth: by its token ids up to the end of the first user turn alone.

    So retries of a question, and later turns of its conversation, stay on one side. `key_length` 0: the whole prompt.
    """
    return _in_a_tenth(np.asarray(prompt, dtype="<u4")[: key_length or None].tobytes())


def split_of(row: Generation) -> Literal["train", "held_out"]:
    """The side of a row; where its token ids are not kept, by the text up to the end of the first user turn."""
    if row.prompt_tokens is not None:
        is_held_out = held_out(row.prompt_tokens, row.split_key_length)
    else:
        is_held_out = _in_a_tenth(storable(opening(row)).encode())
    return "held_out" if is_held_out else "train"


def _in_a_tenth(key: bytes) -> bool:
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 10 == 0


def tokens_of(row: Generation) -> tuple[TokenIds, TokenIds]:
    """Prompt and completion of a row that keeps them."""
    assert row.prompt_tokens is not None
    assert row.completion_tokens is not None
    return row.prompt_tokens, row.completion_tokens


def export_as(
    form: Format,
    store: Store,
    folder: Path,
    wanted: Wanted = EVERYTHING,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_row: Callable[[], None] | None = None,
) -> Export:
    """Write every wanted row of `store` into `folder`, as it stands at one moment.

    Documents of different weights, tokenizer or template fingerprints never share a shard. A shard exceeds
    `shard_bytes` only where one document alone does. `folder` may exist if it is empty. manifest.json is written last:
    without it an export is not complete. On failure what was written is removed again. `on_row` follows each row read.
    Raises NothingToExportError, or CaptureError where the folder cannot be written.
    """
    try:
        with fresh(folder), store.snapshot():
            return _export(form, store, folder, wanted, shard_bytes, on_row or (lambda: None))
    except OSError as error:
        raise CaptureError(f"cannot export to {folder}: {error.strerror or error}") from error


def _export(
    form: Format, store: Store, folder: Path, wanted: Wanted, shard_bytes: int, on_row: Callable[[], None]
) -> Export:
    created = utc_now()
    header = form.header(created)
    shards: list[Shard] = []
    skipped: Counter[str] = Counter()
    where, arguments = wanted.sql(store)
    in_question = store.count(wanted.rows)
    if not (wanted.include_unfinished or wanted.rows.status):
        every, of_every = wanted.rows.sql()
        groups = store.groups(["status"], where=every, arguments=of_every)
        skipped["unfinished"] = sum(n for (status,), n in groups if status != "finished")
    chosen = store.groups(GROUP, where=where, arguments=arguments)
    skipped["not_sampled"] = in_question - skipped["unfinished"] - sum(count for _, count in chosen)
    for fingerprints, _ in chosen:
        same = " AND ".join(f"{name} = ?" for name in GROUP)
        rows = store.iterate(where=f"({where}) AND {same}", arguments=[*arguments, *fingerprints])
        documents = _documents(rows, wanted, form.needs_ids, skipped, on_row)
        for batch in _batches(form, documents, shard_bytes, skipped):
            shards.append(_write(batch, folder / f"shard-{len(shards):05d}{form.suffix}", header))
    reasons = Skipped(**skipped)
    if not shards:
        raise NothingToExportError(f"nothing to export from {store.path}: {str(reasons) or 'it holds no such rows'}")
    put_down(folder / "manifest.json", lambda file: file.write(_manifest(header, wanted, shards, reasons)), PRIVATE)
    return Export(folder, tuple(shards), reasons)


def _documents(
    rows: Iterator[Generation], wanted: Wanted, needs_ids: bool, skipped: Counter[str], on_row: Callable[[], None]
) -> Iterator[Generation]:
    """Those of the rows that are documents; count the others."""
    seen = None if wanted.near_duplicates else NearDuplicates()
    for row in rows:
        on_row()
        if row.redacted:
            skipped["redacted"] += 1
            continue
        if row.prompt_tokens is not None and row.completion_tokens is not None:
            prompt, completion = np.asarray(row.prompt_tokens), np.asarray(row.completion_tokens)
        elif needs_ids:
            skipped["no_tokens_kept"] += 1
            continue
        else:
            prompt, completion = (_words(text) for text in (json.dumps(row.request), said(row)))
        if not len(completion):
            skipped["no_completion"] += 1
        elif not wanted.loops and loops(completion):
            skipped["loops"] += 1
        elif seen is not None and seen.seen(prompt, completion):
            skipped["near_duplicates"] += 1
        else:
            yield row


def _words(text: str) -> NDArray[np.uint32]:
    """Words as numbers, for who compares tokens."""
    return np.array([zlib.crc32(word.encode()) for word in storable(text).split()], dtype=np.uint32)


def _batches(form: Format, rows: Iterator[Generation], limit: int, skipped: Counter[str]) -> Iterator[Batch]:
    """Gather rows into batches of at most `limit` bytes; count those that make no document of this format."""
    batch = form.batch()
    for row in rows:
        try:
            if not batch.add(row, limit):
                yield batch
                batch = form.batch()
                batch.add(row, limit)
        except SkipError as error:
            skipped[error.reason] += 1
    if batch.contents.documents:
        yield batch


def _write(batch: Batch, path: Path, header: Mapping[str, Any]) -> Shard:
    contents = batch.contents
    fingerprints = contents.fingerprints()
    put_down(path, lambda file: batch.write(file, {**header, "fingerprints": fingerprints}), PRIVATE)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=digest,
        documents=contents.documents,
        held_out_documents=contents.held_out_documents,
        prompt_tokens=contents.prompt_tokens,
        completion_tokens=contents.completion_tokens,
        fingerprints=fingerprints,
    )


def _manifest(header: Mapping[str, Any], wanted: Wanted, shards: list[Shard], skipped: Skipped) -> bytes:
    summed = ("documents", "held_out_documents", "prompt_tokens", "completion_tokens")
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in summed}
    manifest = {
        **header,
        "wanted": asdict(wanted),
        "counts": {**counts, "skipped_rows": asdict(skipped)},
        "shards": [asdict(shard) for shard in shards],
    }
    return (json.dumps(manifest, indent=2) + "\n").encode()
