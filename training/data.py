"""Captured documents as training reads them: the shards of an export, checked, and each document with its arrays.

Reads npz as `capture export` writes it (DESIGN §7), older ones without seeds too; knows no model and no text.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from capture.export_npz import FORMAT, FORMAT_VERSION
from training.errors import TrainingError

_TYPES = {
    "tokens": "int32",
    "doc_offsets": "int64",
    "prompt_lengths": "int32",
    "loss_mask": "uint8",
    "logprobs": "float32",
    "doc_ids": "<U36",
    "split": "uint8",
}
# By document; exports made before these were written have none of them.
_NEWER = {"seeds": "uint64", "sampling": "int32", "builds": "int32", "tags": "int32"}
# RuntimeError: an encrypted member, an unknown compression, JSON of no end; MemoryError: a header that lies.
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile)
_LONGEST_REASON = 300  # characters


@dataclass(frozen=True)
class Shard:
    """One npz file. `sha256`: what its manifest says of it, None where it was named without one."""

    path: Path
    sha256: str | None = None


@dataclass(frozen=True)
class Contents:
    """One shard: its arrays by name, what it says of itself, and the sha256 of the file."""

    arrays: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]
    sha256: str

    @property
    def fingerprints(self) -> Mapping[str, Any]:
        """weights, tokenizer, chat_template, drafters and builds of every document in it."""
        found: Mapping[str, Any] = self.meta["fingerprints"]
        return found


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt and the model's own answer to it.

    `logprobs` are the captured ones, NaN on the prompt and where none were kept. With `seed` and `sampling`, the
    effective parameters, every token can be chosen anew; both are None where the capture cannot say how it was chosen.
    """

    id: str
    tokens: NDArray[np.int32]  # [T]
    prompt_length: int
    logprobs: NDArray[np.float32]  # [T]
    held_out: bool
    seed: int | None = None  # uint64
    sampling: Mapping[str, Any] | None = None
    weights: str = ""  # fingerprint of what generated it
    build: str | None = None  # of the same; None where the shard holds several and does not say which
    tags: Mapping[str, str] = field(default_factory=dict)  # `class` and `client` of its request, where it had them

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.tokens[: self.prompt_length].tolist()
        return ids

    @property
    def answer(self) -> list[int]:
        ids: list[int] = self.tokens[self.prompt_length :].tolist()
        return ids


@dataclass(frozen=True, eq=False)
class Scalars:
    """By row t, of the logits that predict x_{t+1}; NaN and 0 before the prompt's last row and on the last."""

    log_z: Tensor  # float32 [T], log of the sum of exp(logits)
    argmax: Tensor  # int64 [T]
    chosen_logprob: Tensor  # float32 [T], of x_{t+1}
    hot_mass: Tensor  # float32 [T], probability of the hot vocabulary's ids; NaN without one


class _Lazy:
    """A field that is a tensor, or a function which is called for it each time it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Never: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Tensor: ...
    def __get__(self, instance: object | None, owner: type) -> Tensor:
        if instance is None:
            raise AttributeError(self._name)  # which tells the dataclass that the field has no default
        held: Tensor | Callable[[], Tensor] = instance.__dict__[self._name]
        return held if isinstance(held, Tensor) else held()

    def __set__(self, instance: object, value: Tensor | Callable[[], Tensor]) -> None:
        instance.__dict__[self._name] = value


@dataclass(frozen=True, eq=False)
class Forced:
    """A document and the trunk's hidden states over it, after the final norm: row t, [T, H], at position t.

    Those of a document on disk are mapped anew each time `hidden` is read: hold the tensor as long as it is of use.
    """

    document: Document
    hidden: _Lazy = _Lazy()
    scalars: Scalars | None = None

    def cpu(self) -> Forced:
        """The same with its tensors on the CPU."""
        one = self.scalars
        told = one and Scalars(one.log_z.cpu(), one.argmax.cpu(), one.chosen_logprob.cpu(), one.hot_mass.cpu())
        return Forced(self.document, self.hidden.cpu(), told)


def find_shards(inputs: Sequence[Path]) -> list[Shard]:
    """The shards of exported directories (all their manifest names) and single npz files, each once, in given order.

    Raises TrainingError where one is missing, or a directory is no complete export.
    """
    found: dict[Path, Shard] = {}
    for given in inputs:
        for shard in _listed(given) if given.is_dir() else [Shard(given)]:
            if not shard.path.is_file():
                raise TrainingError(f"no shard at {shard.path}")
            found[shard.path.resolve()] = shard
    return list(found.values())


def read_documents(shards: Sequence[Shard], tokenizer_fingerprint: str, vocab_size: int) -> list[Document]:
    """All documents of the shards in order, one that several shards hold once. Raises as `read_shard` does."""
    found: dict[str, Document] = {}
    for shard in shards:
        for document in documents_of(read_shard(shard, tokenizer_fingerprint, vocab_size)):
            found.setdefault(document.id, document)
    return list(found.values())


def read_shard(shard: Shard, tokenizer_fingerprint: str, vocab_size: int) -> Contents:
    """One file, its arrays checked against each other and the tokenizer.

    Raises TrainingError where it is damaged, not the file its manifest names, or of another tokenizer.
    """
    path = shard.path
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if shard.sha256 and digest != shard.sha256:
            raise TrainingError(f"{path} is not the file that its manifest names: export again")
        with np.load(path, allow_pickle=False) as archive:
            meta = json.loads(str(archive["meta"]))
            if (meta["format"], meta["format_version"]) != (FORMAT, FORMAT_VERSION):
                raise TrainingError(f"{path} is not of format {FORMAT} {FORMAT_VERSION}")
            theirs = str(meta["fingerprints"]["tokenizer"])
            if theirs != tokenizer_fingerprint:
                raise TrainingError(
                    f"{path} is of another tokenizer ({theirs[:12]}) than the model ({tokenizer_fingerprint[:12]}): "
                    f"use each model's own output alone"
                )
            arrays = {name: archive[name] for name in _TYPES}
            if all(name in archive for name in _NEWER):
                arrays |= {name: archive[name] for name in _NEWER}
    except (*_UNREADABLE, TypeError) as error:
        raise TrainingError(f"cannot read the shard {path}: {reason(error)}") from error
    _check(path, arrays, meta, vocab_size)
    return Contents(arrays, meta, digest)


def documents_of(contents: Contents) -> Iterator[Document]:
    """The documents of one shard, in order; their arrays are views of the shard's."""
    arrays, fingerprints = contents.arrays, contents.fingerprints
    builds = fingerprints["builds"]
    for i, name in enumerate(arrays["doc_ids"].tolist()):
        span = slice(arrays["doc_offsets"][i], arrays["doc_offsets"][i + 1])
        index = int(arrays["sampling"][i]) if "sampling" in arrays else -1
        build = int(arrays["builds"][i]) if "builds" in arrays else -1
        tags = int(arrays["tags"][i]) if "tags" in arrays else -1
        if len(builds) == 1:
            build = 0
        yield Document(
            id=name,
            tokens=arrays["tokens"][span],
            prompt_length=int(arrays["prompt_lengths"][i]),
            logprobs=arrays["logprobs"][span],
            held_out=bool(arrays["split"][i]),
            seed=int(arrays["seeds"][i]) if index >= 0 else None,
            sampling=contents.meta["sampling"][index] if index >= 0 else None,
            weights=fingerprints["weights"],
            build=builds[build] if build >= 0 else None,
            tags=contents.meta["tags"][tags] if tags >= 0 else {},
        )


def reason(error: Exception) -> str:
    """Why a file could not be read or written, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:_LONGEST_REASON] or type(error).__name__


def _listed(folder: Path) -> Iterator[Shard]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if (manifest["format"], manifest["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise TrainingError(f"{path} is not of format {FORMAT} {FORMAT_VERSION}")
        listed = [(entry["file"], entry["sha256"]) for entry in manifest["shards"]]
    except FileNotFoundError:
        raise TrainingError(f"{folder} is no complete export: it has no manifest.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"cannot read {path}: {reason(error)}") from error
    for file, digest in listed:
        yield Shard(folder / file, digest)


def _check(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], vocab_size: int) -> None:
    for name, array in arrays.items():
        dtype = (_TYPES | _NEWER)[name]
        if array.dtype != dtype or array.ndim != 1:
            raise TrainingError(f"{name} of {path} is {array.dtype} {list(array.shape)}, not {dtype} [n]")
    tokens, offsets, prompts = arrays["tokens"], arrays["doc_offsets"], arrays["prompt_lengths"]
    documents = len(arrays["split"])
    lengths = np.diff(offsets)
    by_document = ("doc_ids", "prompt_lengths", *(name for name in _NEWER if name in arrays))
    if not (
        all(len(arrays[name]) == len(tokens) for name in ("loss_mask", "logprobs"))
        and all(len(arrays[name]) == documents for name in by_document)
        and len(offsets) == documents + 1
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and (lengths >= 0).all()
        and (prompts >= 0).all()
        and (prompts <= lengths).all()
    ):
        raise TrainingError(f"{path} is damaged: its documents do not add up to its tokens")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise TrainingError(f"{path} holds token ids that its tokenizer, of {vocab_size}, does not have")
    prints = meta["fingerprints"]
    if not isinstance(prints.get("weights"), str) or not _is_list_of(str, prints.get("builds")):
        raise TrainingError(f"{path} is damaged: its meta does not say which weights and builds it is of")
    if not all(_is_list_of(dict, meta[name]) for name in ("sampling", "tags") if name in meta):
        raise TrainingError(f"{path} is damaged: a list in its meta is none")
    if not all(_is_list_of(str, list(tags.values())) for tags in meta.get("tags", ())):
        raise TrainingError(f"{path} is damaged: a tag in its meta is no text")
    known = {"sampling": meta.get("sampling"), "tags": meta.get("tags"), "builds": meta["fingerprints"]["builds"]}
    for name, listed in known.items():
        if name not in arrays or not documents:
            continue
        if not isinstance(listed, list) or not -1 <= arrays[name].min() <= arrays[name].max() < len(listed):
            raise TrainingError(f"{path} is damaged: {name} does not fit the list in its meta")


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)
