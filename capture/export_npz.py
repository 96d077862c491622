"""Rows as npz shards of token ids, logprobs and masks (DESIGN §7): what our own training reads.

Knows the arrays; knows neither folders nor manifests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
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
DOCUMENT_BYTES = 8 + 4 + 36 * 4 + 1 + 8 + 4 + 4 + 4
ARCHIVE_BYTES = 16_384
MOST_SAMPLINGS = 10_000  # distinct parameters in a shard, and distinct tags
# Of a row's parameters, those that belong to one exchange alone.
_OF_THE_EXCHANGE = {"response", "redacted"}


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
        self._seeds: list[int] = []
        self._samplings: dict[str, int] = {}  # JSON → place in the list of the shard
        self._sampling: list[int] = []
        self._tags: dict[str, int] = {}  # likewise
        self._tagged: list[int] = []
        self._meta_bytes = 0  # of both lists
        self._builds: dict[str, int] = {}
        self._build: list[int] = []

    def add(self, row: Generation, limit: int) -> bool:
        prompt, completion = (np.asarray(ids, dtype="<u4").tobytes() for ids in tokens_of(row))
        n, m = len(prompt) // 4, len(completion) // 4
        sampling, tags = _sampling(row), _tags(row)
        new = [
            text
            for text, known in ((sampling, self._samplings), (tags, self._tags))
            if text is not None and text not in known
        ]
        more = sum(4 * (len(text) + 2) for text in new)  # numpy's text: 4 bytes a character
        if self._ids and self._size_with(n + m, more) > limit:
            return False
        if new and MOST_SAMPLINGS in (len(self._samplings), len(self._tags)):
            return False
        self._meta_bytes += more
        self._sampling.append(-1 if sampling is None else self._samplings.setdefault(sampling, len(self._samplings)))
        self._tagged.append(-1 if tags is None else self._tags.setdefault(tags, len(self._tags)))
        self._seeds.append(row.seed if row.seed is not None and sampling is not None else 0)
        self._build.append(self._builds.setdefault(row.build, len(self._builds)))
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

    def _size_with(self, tokens: int, more: int) -> int:
        """Bytes of the file after one more document of so many tokens, and so many bytes in its lists."""
        total = self._offsets[-1] + tokens
        meta = 4 * len(json.dumps(self.contents.fingerprints())) + self._meta_bytes + more
        return ARCHIVE_BYTES + meta + TOKEN_BYTES * total + DOCUMENT_BYTES * (len(self._ids) + 1)

    def write(self, file: IO[bytes], meta: Mapping[str, Any]) -> None:
        sorted_builds = self.contents.fingerprints()["builds"]
        places = np.array([sorted_builds.index(build) for build in self._builds], dtype="<i4")
        np.savez(
            file,
            tokens=np.frombuffer(self._tokens, dtype="<i4"),
            doc_offsets=np.array(self._offsets, dtype="<i8"),
            prompt_lengths=np.array(self._prompt_lengths, dtype="<i4"),
            loss_mask=np.frombuffer(self._loss_mask, dtype=np.uint8),
            logprobs=np.frombuffer(self._logprobs, dtype="<f4"),
            doc_ids=np.array(self._ids, dtype="<U36"),
            split=np.array(self._split, dtype=np.uint8),
            seeds=np.array(self._seeds, dtype="<u8"),
            sampling=np.array(self._sampling, dtype="<i4"),
            builds=places[self._build],
            tags=np.array(self._tagged, dtype="<i4"),
            meta=np.array(json.dumps({**meta, "sampling": _listed(self._samplings), "tags": _listed(self._tags)})),
        )


def _unknown(count: int) -> bytes:
    return np.full(count, np.nan, dtype="<f4").tobytes()


def _listed(texts: Iterable[str]) -> list[Any]:
    return [json.loads(text) for text in texts]


def _tags(row: Generation) -> str | None:
    """What tells kinds of requests apart, as JSON: the tag `class` of its metadata and the client's name."""
    metadata = row.request.get("metadata")
    named = {"class": metadata.get("class") if isinstance(metadata, Mapping) else None, "client": row.client}
    found = {name: value for name, value in named.items() if isinstance(value, str)}
    return json.dumps(found) if found else None


def _sampling(row: Generation) -> str | None:
    """The effective parameters as JSON; None where they and the seed do not decide every token."""
    if row.seed is None or row.build == "upstream" or _ruled(row):
        return None
    return json.dumps({name: value for name, value in row.parameters.items() if name not in _OF_THE_EXCHANGE})


def _ruled(row: Generation) -> bool:
    """Whether a rule outside the parameters may have banned or forced tokens: a grammar, tools, a thinking budget."""
    request, text = row.request, row.request.get("text")
    formats = (request.get("response_format"), text.get("format") if isinstance(text, Mapping) else None)
    return (
        row.parameters.get("thinking_budget") is not None
        or bool(request.get("tools") or request.get("structured_outputs"))
        or any(isinstance(asked, Mapping) and asked.get("type") != "text" for asked in formats)
    )
