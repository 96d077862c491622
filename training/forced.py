"""Forced documents on disk: npz shards of hidden states and scalars, their sizes, and a manifest that makes them whole.

Knows arrays and files; knows no model. bfloat16, which numpy lacks, stands as the uint16 of the same bits.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data import Document, Forced, Scalars, reason
from training.errors import TrainingError
from training.mapped import Stored, find

FORMAT, FORMAT_VERSION = "draftloop-forced", 1
SHARD_BYTES = 256_000_000
MANIFEST = "manifest.json"
# What a token beside its hidden state and a document add to a shard, and the archive's own headers at most.
_TOKEN_BYTES = 4 + 4 + 4 + 4 + 2
_DOCUMENT_BYTES = 8 + 4 + 36 * 4 + 1 + 8 + 4 + 4
_ARCHIVE_BYTES = 32_768
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_FINGERPRINTS = ("weights", "tokenizer", "chat_template", "build")


def shards_of(
    documents: Sequence[Document], hidden_size: int, dtype: str, shard_bytes: int = SHARD_BYTES
) -> list[tuple[list[Document], int]]:
    """Which documents share a shard, in order, and the bytes that each shard takes at most.

    A shard exceeds `shard_bytes` only where one document alone does.
    """
    token_bytes = _TOKEN_BYTES + hidden_size * _ITEM_BYTES[dtype]
    found: list[tuple[list[Document], int]] = []
    for document in documents:
        told = 4 * sum(len(json.dumps(value)) for value in (document.sampling, document.tags))  # numpy's characters
        more = token_bytes * len(document.tokens) + _DOCUMENT_BYTES + told
        if found and found[-1][1] + more <= shard_bytes:
            members, size = found[-1]
            members.append(document)
            found[-1] = members, size + more
        else:
            found.append(([document], _ARCHIVE_BYTES + more))
    return found


def write_shard(file: IO[bytes], documents: Sequence[Forced], meta: Mapping[str, Any]) -> None:
    """One shard of documents that have scalars, uncompressed. `meta` says of the whole folder what a shard is of."""
    own = [forced.document for forced in documents]
    scalars = [_scalars_of(forced) for forced in documents]
    sampling, samplings = _listed([document.sampling for document in own])
    tags, tagged = _listed([document.tags or None for document in own])
    np.savez(
        file,
        hidden=np.concatenate([_bits(forced.hidden) for forced in documents]),  # first: begins at a multiple of 4 bytes
        tokens=np.concatenate([document.tokens for document in own]).astype("<i4"),
        doc_offsets=np.cumsum([0, *(len(document.tokens) for document in own)], dtype="<i8"),
        prompt_lengths=np.array([document.prompt_length for document in own], dtype="<i4"),
        doc_ids=np.array([document.id for document in own], dtype="<U36"),
        split=np.array([document.held_out for document in own], dtype=np.uint8),
        seeds=np.array([document.seed or 0 for document in own], dtype="<u8"),
        sampling=sampling,
        tags=tags,
        log_z=_joined([one.log_z for one in scalars], "<f4"),
        argmax=_joined([one.argmax for one in scalars], "<u4"),
        chosen_logprob=_joined([one.chosen_logprob for one in scalars], "<f4"),
        hot_mass=_joined([one.hot_mass for one in scalars], "<f2"),
        meta=np.array(json.dumps({**meta, "sampling": samplings, "tags": tagged})),
    )


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """What a complete folder says of itself: fingerprints, dtype, norm, d2t_sha256, sources, counts, gate, shards.

    Raises TrainingError where it is not complete, or nothing of the kind.
    """
    path = folder / MANIFEST
    try:
        manifest: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (manifest["format"], manifest["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise TrainingError(f"{path} is not of format {FORMAT} {FORMAT_VERSION}")
        known = [manifest["fingerprints"][name] for name in _FINGERPRINTS]
        known += [entry[name] for entry in manifest["shards"] for name in ("file", "sha256")]
        if not all(isinstance(one, str) for one in known) or not isinstance(manifest["d2t_sha256"], str | None):
            raise ValueError("a name or a hash in it is no text")
        if manifest["dtype"] not in _ITEM_BYTES:
            raise ValueError(f"its dtype is {manifest['dtype']!r}")
        if not all(isinstance(manifest["counts"][name], int) for name in ("documents", "answer_tokens")):
            raise ValueError("a count in it is no number")
    except FileNotFoundError:
        raise TrainingError(f"{folder} is no complete extraction: `training extract` makes or continues one") from None
    except KeyError as error:
        raise TrainingError(f"cannot read {path}: it does not say {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(f"cannot read {path}: {reason(error)}") from error
    return manifest


def read_forced(folder: Path, held_out: bool | None = None) -> Iterator[Forced]:
    """The documents of a complete folder in order, of one split or (None) of both. Hidden states stay on disk.

    Tensors are on the CPU, hidden states in the dtype they had: views of the shard, mapped whenever they are read. A
    shard's hash is checked when this comes to it and not again; a file that is put in its place later is noticed, one
    that is written over in place is not. `logprobs` of a document are the forced ones. Raises TrainingError for a shard
    that is not what the manifest names.
    """
    for entry in read_manifest(folder)["shards"]:
        for forced in read_shard(folder / entry["file"], entry["sha256"]):
            if held_out is None or forced.document.held_out == held_out:
                yield forced


def read_shard(path: Path, sha256: str) -> list[Forced]:
    """One shard's documents as `read_forced` gives them, if it is the file of that hash."""
    try:
        if digest(path) != sha256:
            raise TrainingError(f"{path} is not the file that its manifest names: extract again")
        hidden = find(path, "hidden")["hidden"]
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name != "hidden"}
        return list(_documents(arrays, hidden))
    except (OSError, ValueError, KeyError, IndexError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise TrainingError(f"cannot read the shard {path}: {reason(error)}") from error


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _documents(arrays: Mapping[str, NDArray[Any]], hidden: Stored) -> Iterator[Forced]:
    meta = json.loads(str(arrays["meta"]))
    if meta["dtype"] == "bfloat16":
        hidden = replace(hidden, dtype=torch.bfloat16)
    tensors = {name: torch.from_numpy(arrays[name]) for name in ("log_z", "chosen_logprob")}
    argmax = torch.from_numpy(arrays["argmax"].astype(np.int64))
    hot_mass = torch.from_numpy(arrays["hot_mass"].astype(np.float32))
    for i, name in enumerate(arrays["doc_ids"].tolist()):
        span = slice(arrays["doc_offsets"][i], arrays["doc_offsets"][i + 1])
        prompt, place, tag = (int(arrays[name][i]) for name in ("prompt_lengths", "sampling", "tags"))
        logprobs = np.full(span.stop - span.start, np.nan, dtype=np.float32)
        logprobs[prompt:] = arrays["chosen_logprob"][span][prompt - 1 : -1]
        document = Document(
            id=name,
            tokens=arrays["tokens"][span],
            prompt_length=prompt,
            logprobs=logprobs,
            held_out=bool(arrays["split"][i]),
            seed=int(arrays["seeds"][i]) if place >= 0 else None,
            sampling=meta["sampling"][place] if place >= 0 else None,
            weights=meta["fingerprints"]["weights"],
            build=meta["fingerprints"]["build"],
            tags=meta["tags"][tag] if tag >= 0 else {},
        )
        scalars = Scalars(tensors["log_z"][span], argmax[span], tensors["chosen_logprob"][span], hot_mass[span])
        yield Forced(document, partial(hidden.rows, int(span.start), int(span.stop)), scalars)


def _scalars_of(forced: Forced) -> Scalars:
    if forced.scalars is None:
        raise ValueError(f"document {forced.document.id} was forced without scalars")
    return forced.scalars


def _listed(values: Sequence[Mapping[str, Any] | None]) -> tuple[NDArray[np.int32], list[Mapping[str, Any]]]:
    """The distinct values, and of each its place among them, -1 of None."""
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    places = [
        -1 if value is None else found.setdefault(json.dumps(value, sort_keys=True), (len(found), value))[0]
        for value in values
    ]
    return np.array(places, dtype="<i4"), [value for _, value in found.values()]


def _bits(hidden: Tensor) -> NDArray[Any]:
    """[T, H] as uint16 of the same bits, or float32."""
    hidden = hidden.cpu()
    bits: NDArray[Any] = (hidden.view(torch.uint16) if hidden.dtype == torch.bfloat16 else hidden).numpy()
    return bits


def _joined(parts: Sequence[Tensor], dtype: str) -> NDArray[Any]:
    return np.concatenate([part.cpu().numpy() for part in parts]).astype(dtype)
