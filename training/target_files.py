"""Precomputed targets on disk: `.tt.npz` files beside the shards they are of, and a manifest that makes them whole.

Knows arrays and files; knows no model.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from training.data import Forced, reason
from training.errors import TrainingError
from training.forced import digest, read_manifest
from training.mapped import Stored, find

FORMAT, FORMAT_VERSION = "draftloop-targets", 1
MANIFEST = "targets.json"
T = TypeVar("T")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, struct.error, zipfile.BadZipFile)


@dataclass(frozen=True, eq=False)
class Targets:
    """One document's: row a is of base position N + a, for the A = T - 1 - N base rows of the answer.

    Slot j's distribution is of x_{N+a+1+j}; slots past the document hold NaN. k is `top`, or S.
    """

    id: str
    held_out: bool
    logprobs: Tensor  # float32 [A, slots, k], over S: logits less log_z_hot, in float16's precision
    indices: Tensor | None  # int64 [A, slots, k], places in S, likeliest first; None: all of S in order
    log_z_hot: Tensor  # float32 [A, slots], log of the sum of exp(logits) over S
    log_z: Tensor  # float32 [A, slots], the same over the whole vocabulary
    tail: Tensor  # float32 [A, slots], the probability within S that is not among the k


@dataclass(frozen=True, eq=False)
class Chain:
    """Of n base rows: the native head's distributions over the hot vocabulary S, NaN in slots past the document."""

    logprobs: Tensor  # float16 [n, slots, k]
    indices: Tensor | None  # int64 [n, slots, k], places in S; None: all of S in order
    tail: Tensor  # float32 [n, slots], the probability within S that is not among the k

    def to(self, device: torch.device) -> Chain:
        return Chain(
            self.logprobs.to(device),
            None if self.indices is None else self.indices.to(device),
            self.tail.to(device),
        )

    def at(self, slot: int, rows: Tensor) -> Chain:
        """One slot of some rows, bool [n] with m of them: tensors [m, k] and [m]."""
        return Chain(
            self.logprobs[rows, slot],
            None if self.indices is None else self.indices[rows, slot],
            self.tail[rows, slot],
        )

    @staticmethod
    def joined(parts: Sequence[Chain]) -> Chain:
        """One after the other."""
        indices = [part.indices for part in parts if part.indices is not None]
        return Chain(
            torch.cat([part.logprobs for part in parts]),
            torch.cat(indices) if indices else None,
            torch.cat([part.tail for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class StoredTargets:
    """One document's targets on disk: `start`, `stop` are its rows in the file's arrays."""

    id: str
    start: int
    stop: int
    arrays: Mapping[str, Stored]

    def rows(self, first: int, last: int) -> Chain:
        """Rows first … last - 1 of the document, mapped where they lie."""
        span = self.start + first, self.start + last
        indices = self.arrays["indices"].rows(*span).to(torch.int64) if "indices" in self.arrays else None
        return Chain(self.arrays["logprobs"].rows(*span), indices, self.arrays["tail"].rows(*span))


def read_targets(folder: Path, held_out: bool | None = None) -> Iterator[Targets]:
    """Targets of the documents of an extraction, in `read_forced`'s order, a file in memory at a time.

    Raises TrainingError where they are not complete, or not of the extraction's shards.
    """
    for targets in _each(folder, _read):
        if held_out is None or targets.held_out == held_out:
            yield targets


def targets_of(
    folder: Path, documents: Sequence[Forced], fingerprints: Mapping[str, str], slots: int
) -> list[StoredTargets]:
    """The targets of these documents of the extraction in `folder`, in their order, left on disk.

    `fingerprints`: the weights, tokenizer and drafter that they have to be of, and d2t_sha256, the hash of S; `slots`:
    how many they have at least. Hashes are checked here, and not again. Raises TrainingError as `read_targets` does,
    and for targets of anything else.
    """
    manifest = _manifest(folder)
    theirs = {**manifest.get("fingerprints", {}), "d2t_sha256": manifest.get("d2t_sha256")}
    if other := [name for name, ours in fingerprints.items() if theirs.get(name) != ours]:
        raise TrainingError(f"the targets in {folder} are of another {', '.join(other)}: make them anew")
    if (kept := manifest.get("slots", 0)) < slots:
        raise TrainingError(f"the targets in {folder} have {kept} slots, {slots} are asked for")
    found = {stored.id: stored for stored in _each(folder, _found)}
    for forced in documents:
        rows = max(len(forced.document.tokens) - 1 - forced.document.prompt_length, 0)
        stored = found.get(forced.document.id)
        if stored is None or stored.stop - stored.start != rows:
            raise TrainingError(f"the targets in {folder} have not the rows of document {forced.document.id}")
    return [found[forced.document.id] for forced in documents]


def write_targets(file: IO[bytes], made: Sequence[Targets], meta: Mapping[str, Any]) -> None:
    """One file of targets of the same k."""
    arrays = {
        "doc_ids": np.array([one.id for one in made], dtype="<U36"),
        "split": np.array([one.held_out for one in made], dtype=np.uint8),
        "anchor_offsets": np.cumsum([0, *(len(one.log_z) for one in made)], dtype="<i8"),
        "logprobs": torch.cat([one.logprobs for one in made]).numpy().astype("<f2"),
        "log_z_hot": torch.cat([one.log_z_hot for one in made]).numpy().astype("<f4"),
        "log_z": torch.cat([one.log_z for one in made]).numpy().astype("<f4"),
        "tail": torch.cat([one.tail for one in made]).numpy().astype("<f4"),
        "meta": np.array(json.dumps(meta)),
    }
    if indices := [one.indices for one in made if one.indices is not None]:
        arrays["indices"] = torch.cat(indices).numpy().astype("<u2")
    np.savez(file, allow_pickle=False, **arrays)


def sources(extraction: Mapping[str, Any]) -> list[str]:
    """What targets of an extraction are of: the hashes of its shards."""
    return [entry["sha256"] for entry in extraction["shards"]]


def _each(folder: Path, read: Callable[[Path], Iterator[T]]) -> Iterator[T]:
    """What `read` finds in one file after the other, each if it is the file that the manifest names."""
    extraction, manifest = read_manifest(folder), _manifest(folder)
    try:
        if manifest["sources"] != sources(extraction):
            raise TrainingError(f"{folder / MANIFEST} is of other shards than are in {folder}: make the targets anew")
        for entry in manifest["shards"]:
            file = folder / entry["file"]
            if digest(file) != entry["sha256"]:
                raise TrainingError(f"{file} is not the file that {folder / MANIFEST} names: make the targets anew")
            yield from read(file)
    except FileNotFoundError as error:
        raise TrainingError(f"{folder} has no complete targets: `training targets` makes them") from error
    except _UNREADABLE as error:
        raise TrainingError(f"cannot read the targets in {folder}: {reason(error)}") from error


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (manifest["format"], manifest["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise TrainingError(f"{path} is not of format {FORMAT} {FORMAT_VERSION}")
    except FileNotFoundError as error:
        raise TrainingError(f"{folder} has no complete targets: `training targets` makes them") from error
    except _UNREADABLE as error:
        raise TrainingError(f"cannot read the targets in {folder}: {reason(error)}") from error
    return manifest


def _read(path: Path) -> Iterator[Targets]:
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    logprobs = torch.from_numpy(arrays["logprobs"]).float()
    indices = torch.from_numpy(arrays["indices"].astype(np.int64)) if "indices" in arrays else None
    log_z_hot, log_z, tail = (torch.from_numpy(arrays[name]) for name in ("log_z_hot", "log_z", "tail"))
    for i, name in enumerate(arrays["doc_ids"].tolist()):
        span = slice(arrays["anchor_offsets"][i], arrays["anchor_offsets"][i + 1])
        yield Targets(
            id=name,
            held_out=bool(arrays["split"][i]),
            logprobs=logprobs[span],
            indices=None if indices is None else indices[span],
            log_z_hot=log_z_hot[span],
            log_z=log_z[span],
            tail=tail[span],
        )


def _found(path: Path) -> Iterator[StoredTargets]:
    arrays = find(path, "logprobs", "indices", "tail")
    with np.load(path, allow_pickle=False) as archive:
        ids, offsets = archive["doc_ids"].tolist(), archive["anchor_offsets"].tolist()
    for name, start, stop in zip(ids, offsets[:-1], offsets[1:], strict=True):
        yield StoredTargets(name, start, stop, arrays)
