"""From captured answers to a folder of hidden states: every document through the trunk again, shard by shard.

A killed run is continued by running it again. Knows options, folders and the order of things; what is in a shard is
`training.forced`'s to know, how a document is forced `training.force`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from backend.drafters.hot_vocab import HotVocab
from backend.loading import Loaded, LocalOptions, load
from backend.models.config import ModelConfig
from backend.models.hub import resolve_model
from backend.text.tokenizer import ChatTokenizer
from capture.export_folder import put_down
from training.agreement import REASONS, Agreement, compare
from training.data import Document, Forced, documents_of, find_shards, read_shard, reason
from training.errors import TrainingError
from training.force import Readings, Report, force_documents, force_each
from training.forced import (
    FORMAT,
    FORMAT_VERSION,
    SHARD_BYTES,
    digest,
    read_forced,
    read_manifest,
    shards_of,
    write_shard,
)
from training.shards import Shards, must_fit, told

__all__ = ["ExtractOptions", "Plan", "extract", "force_documents", "plan", "read_forced", "read_manifest"]

NORM = "post"  # hidden states are those after the trunk's final norm


@dataclass(frozen=True)
class ExtractOptions:
    """What to force through which model, and where to. `threads` None leaves it to the model's size, as serving does:
    logprobs are bitwise those of the server only under the server's own build."""

    inputs: tuple[Path, ...]  # folders that `capture export` made, or npz shards
    model: str
    out: Path
    hot_vocab: Path | None = None
    max_gb: float | None = None  # 10⁹ bytes
    shard_bytes: int = SHARD_BYTES
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Plan:
    """What an extraction will write. `shards`: the documents of each, in order; `bytes`: at most, of all of them."""

    shards: tuple[tuple[Document, ...], ...]
    bytes: int
    sources: tuple[str, ...]  # sha256 of the files read
    d2t_sha256: str | None
    hot: HotVocab | None

    @property
    def documents(self) -> int:
        return sum(map(len, self.shards))

    @property
    def tokens(self) -> int:
        return sum(len(document.tokens) for shard in self.shards for document in shard)


def plan(options: ExtractOptions) -> Plan:
    """Read and check the documents, and reckon what they take, without loading the model.

    Raises TrainingError where there is nothing to force, or it is more than `max_gb` or the disk allow.
    """
    directory = resolve_model(options.model)
    tokenizer, config = ChatTokenizer.load(directory), ModelConfig.from_directory(directory)
    hot = options.hot_vocab and HotVocab.load(options.hot_vocab, tokenizer.fingerprint, config.vocab_size)
    documents: dict[str, Document] = {}
    sources = []
    for shard in find_shards(options.inputs):
        contents = read_shard(shard, tokenizer.fingerprint, config.vocab_size)
        sources.append(contents.sha256)
        for document in documents_of(contents):
            documents.setdefault(document.id, document)
    if not documents:
        raise TrainingError("nothing to force: the exports hold no document")
    for document in documents.values():
        if not document.prompt_length:
            raise TrainingError(f"document {document.id} has no prompt: nothing comes before its answer")
    dtype = "float32" if options.dtype == "float32" else "bfloat16"
    shards = shards_of(list(documents.values()), config.hidden_size, dtype, options.shard_bytes)
    found = Plan(
        shards=tuple(tuple(members) for members, _ in shards),
        bytes=sum(size for _, size in shards),
        sources=tuple(sources),
        d2t_sha256=hot.fingerprint if hot else None,
        hot=hot or None,
    )
    there = sum(path.stat().st_size for path in options.out.glob("forced-*")) if options.out.is_dir() else 0
    what = f"{found.documents} documents of {found.tokens} tokens"
    must_fit(what, found.bytes, options.out, options.max_gb, reused=there)
    return found


def extract(options: ExtractOptions, report: Report = lambda doing, done, total: None) -> Path:
    """Write `options.out`: shards of forced documents, and last the manifest that makes the folder whole.

    In a folder that an earlier run of the same inputs, model and build left, its finished shards are kept (a damaged
    one is made anew). Raises TrainingError for a folder of anything else, for documents of other weights, and where a
    captured logprob differs in a bit from the forced one under the same build; BackendError as loading does.
    """
    planned = plan(options)
    report(f"{told(planned.bytes)} to write: loading", 0, planned.tokens)
    loaded = _load(options)
    for shard in planned.shards:
        for document in shard:
            if document.weights != loaded.fingerprints.weights:
                raise TrainingError(
                    f"document {document.id} was generated by other weights ({document.weights[:12]}) than the "
                    f"model's ({loaded.fingerprints.weights[:12]})"
                )
    shards = Shards(options.out, _identity(planned, options, loaded))
    finished = shards.finished()
    try:
        for index, members in enumerate(planned.shards):
            name = f"forced-{index:05d}.npz"
            done = sum(len(one.tokens) for shard in planned.shards[:index] for one in shard)
            if not shards.is_whole(finished.get(name)):
                finished[name] = _force(options.out / name, members, loaded, planned, shards.identity, report, done)
                shards.note(finished)
        shards.complete(finished, **_summed(list(finished.values())))
    except OSError as error:
        raise TrainingError(f"cannot write to {options.out}: {reason(error)}") from error
    report("extracted", planned.tokens, planned.tokens)
    return options.out


def _force(
    path: Path,
    documents: Sequence[Document],
    loaded: Loaded,
    planned: Plan,
    identity: Mapping[str, Any],
    report: Report,
    done: int,
) -> dict[str, Any]:
    """Make one shard; what the manifest says of it."""
    runner, build = loaded.runner, loaded.fingerprints.build
    hot = None if planned.hot is None else planned.hot.d2t.to(runner.device, torch.int64)
    gate = {why: Agreement() for why in REASONS}
    members: list[Forced] = []
    for forced in force_each(runner, documents, Readings(loaded.vocab, hot)):
        why, agreement = compare(forced, build)
        gate[why] += agreement
        members.append(forced.cpu())
        done += len(forced.document.tokens)
        report(f"{told(planned.bytes)} to write: forcing", done, planned.tokens)
    put_down(path, lambda file: write_shard(file, members, identity))
    return {
        "file": path.name,
        "sha256": digest(path),
        "bytes": path.stat().st_size,
        "documents": len(documents),
        "held_out_documents": sum(document.held_out for document in documents),
        "tokens": sum(len(document.tokens) for document in documents),
        "answer_tokens": sum(len(document.answer) for document in documents),
        "gate": {why: asdict(agreement) for why, agreement in gate.items()},
    }


def _load(options: ExtractOptions) -> Loaded:
    # The runner makes what memory it needs; the engine's own stays small.
    return load(
        LocalOptions(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            drafter="none",
            threads=options.threads,
            max_model_len=1,
            max_num_seqs=1,
            prefix_cache=False,
        )
    )


def _identity(planned: Plan, options: ExtractOptions, loaded: Loaded) -> dict[str, Any]:
    """All that the shards are a function of, and so what a folder has to be of for a run to go on in it."""
    prints = loaded.fingerprints
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprints": {name: getattr(prints, name) for name in ("weights", "tokenizer", "chat_template", "build")},
        "norm": NORM,
        "dtype": str(loaded.runner.dtype).removeprefix("torch."),
        "hidden_size": loaded.config.hidden_size,
        "d2t_sha256": planned.d2t_sha256,
        "sources": list(planned.sources),
        "shard_bytes": options.shard_bytes,
    }


def _summed(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("documents", "held_out_documents", "tokens", "answer_tokens", "bytes")
    gate = {why: sum((Agreement(**shard["gate"][why]) for shard in shards), Agreement()) for why in REASONS}
    return {
        "counts": {name: sum(shard[name] for shard in shards) for name in names},
        "gate": {why: {**asdict(agreement), "mean": agreement.mean} for why, agreement in gate.items()},
    }
