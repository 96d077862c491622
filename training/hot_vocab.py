"""From exported shards to a hot vocabulary: count the model's own tokens, keep the most frequent.

Reads npz as `capture export` writes it (DESIGN §7); the file it makes is backend's, and so is its format.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.text.tokenizer import ChatTokenizer
from capture.export_npz import FORMAT, FORMAT_VERSION
from training.errors import TrainingError

_TYPES = {"tokens": "int32", "doc_offsets": "int64", "loss_mask": "uint8", "doc_ids": "<U36", "split": "uint8"}
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Shard:
    """One npz file. `sha256`: what its manifest says of it, None where it was named without one."""

    path: Path
    sha256: str | None = None


@dataclass(frozen=True)
class Built:
    """A hot vocabulary and how it came about.

    `documents` were counted, `repeated` left out because another shard holds them too; `distinct` ids occur in the
    train split; `filled` ids of the list neither occur there nor are special.
    """

    hot: HotVocab
    documents: int
    repeated: int
    distinct: int
    filled: int


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


def build(
    shards: Sequence[Shard],
    tokenizer: ChatTokenizer,
    size: int,
    report: Callable[[int], None] = lambda done: None,
) -> Built:
    """Choose `size` ids: all special tokens, then the model's own tokens of the train split by count (ties to the
    lowest id), then the lowest ids not yet in. A function of the documents and the tokenizer: order changes nothing.

    Documents that several shards hold count once. `report` follows each shard read. Raises TrainingError for a size
    that cannot be, for a damaged shard, for one of another tokenizer, and where there is nothing to count.
    """
    unknown = np.array(tokenizer.undecodable_ids(tokenizer.vocab_size), dtype=np.int64)
    special = np.array(sorted(i for i in tokenizer.added_ids | tokenizer.eos_ids if i < tokenizer.vocab_size))
    vocabulary = tokenizer.vocab_size - len(unknown)
    if not len(special) <= size <= vocabulary:
        raise TrainingError(
            f"a hot vocabulary of {size} ids cannot be: this tokenizer has {len(special)} special tokens, "
            f"which are always in, and {vocabulary} tokens in all"
        )
    counts = np.zeros((2, tokenizer.vocab_size), dtype=np.int64)  # [train, held out]
    seen: set[str] = set()
    sources: set[str] = set()
    repeated = 0
    for done, shard in enumerate(shards, start=1):
        arrays, fingerprints = _read(shard, tokenizer)
        sources.add(json.dumps(fingerprints, sort_keys=True))
        fresh = np.zeros(len(arrays["doc_ids"]), dtype=np.bool_)
        for i, name in enumerate(arrays["doc_ids"].tolist()):
            fresh[i] = name not in seen
            seen.add(name)
        repeated += len(fresh) - int(fresh.sum())
        lengths = np.diff(arrays["doc_offsets"])
        own = (arrays["loss_mask"] == 1) & np.repeat(fresh, lengths)
        held_out = np.repeat(arrays["split"] == 1, lengths)
        for split, chosen in enumerate((own & ~held_out, own & held_out)):
            counts[split] += np.bincount(arrays["tokens"][chosen], minlength=tokenizer.vocab_size)
        report(done)
    train, _ = counts
    if not train.any():
        raise TrainingError(f"nothing to count: no own token in the train split of {len(seen)} documents")
    rank = train.copy()
    rank[special] = train.max() + 1
    rank[unknown] = -1
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])
    coverage = [Coverage(covered=int(split[ids].sum()), tokens=int(split.sum())) for split in counts]
    header = Header(
        tokenizer=tokenizer.fingerprint,
        train=coverage[0],
        held_out=coverage[1],
        sources=[json.loads(source) for source in sorted(sources)],
    )
    hot = HotVocab(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(train[ids]), header)
    filled = int((rank[ids] == 0).sum())
    return Built(hot, len(seen), repeated, int(np.count_nonzero(train)), filled)


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
        raise TrainingError(f"cannot read {path}: {_reason(error)}") from error
    for file, digest in listed:
        yield Shard(folder / file, digest)


def _read(shard: Shard, tokenizer: ChatTokenizer) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays named in `_TYPES` and the shard's fingerprints, checked against each other and the tokenizer."""
    path = shard.path
    try:
        with path.open("rb") as file:
            if shard.sha256 and hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise TrainingError(f"{path} is not the file that its manifest names: export again")
        with np.load(path, allow_pickle=False) as archive:
            meta = json.loads(str(archive["meta"]))
            if (meta["format"], meta["format_version"]) != (FORMAT, FORMAT_VERSION):
                raise TrainingError(f"{path} is not of format {FORMAT} {FORMAT_VERSION}")
            fingerprints: dict[str, Any] = meta["fingerprints"]
            theirs: str = fingerprints["tokenizer"]
            if theirs != tokenizer.fingerprint:
                raise TrainingError(
                    f"{path} is of another tokenizer ({theirs[:12]}) than the model ({tokenizer.fingerprint[:12]}): "
                    f"count each model's own output alone"
                )
            arrays = {name: archive[name] for name in _TYPES}
    except (*_UNREADABLE, TypeError) as error:
        raise TrainingError(f"cannot read the shard {path}: {_reason(error)}") from error
    _check(path, arrays, tokenizer.vocab_size)
    return arrays, fingerprints


def _check(path: Path, arrays: dict[str, NDArray[Any]], vocab_size: int) -> None:
    for name, dtype in _TYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise TrainingError(f"{name} of {path} is {arrays[name].dtype} {list(arrays[name].shape)}, not {dtype} [n]")
    tokens, offsets = arrays["tokens"], arrays["doc_offsets"]
    documents = len(arrays["split"])
    if not (
        len(arrays["loss_mask"]) == len(tokens)
        and len(arrays["doc_ids"]) == documents
        and len(offsets) == documents + 1
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and (np.diff(offsets) >= 0).all()
    ):
        raise TrainingError(f"{path} is damaged: its documents do not add up to its tokens")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise TrainingError(f"{path} holds token ids that its tokenizer, of {vocab_size}, does not have")


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
