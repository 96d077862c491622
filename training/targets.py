"""What the native head's chain says of captured answers, computed once and kept beside their hidden states.

For every base row that serving could draft from and every slot: the distribution over the hot vocabulary S, of its
likeliest ids or of all. Drafted along the document's own tokens (`training.recursion`). Knows no student.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.drafters.hot_vocab import HotVocab
from backend.engine.runner import Runner
from backend.loading import Loaded, LocalOptions, load
from backend.models.draft_block import NativeBlock
from backend.models.hub import resolve_model
from backend.text.tokenizer import ChatTokenizer
from capture.export_folder import put_down
from training.data import Forced, reason
from training.distillation.batches import collate, windows
from training.errors import TrainingError
from training.force import Report
from training.forced import SHARD_BYTES, digest, read_manifest, read_shard
from training.recursion import recursive_outputs
from training.shards import Shards, must_fit, told
from training.target_files import FORMAT, FORMAT_VERSION, MANIFEST, Targets, read_targets, sources, write_targets

__all__ = ["Targets", "TargetsOptions", "chain_targets", "make_targets", "read_targets", "write_targets"]

_ROWS = 256  # of logits at once
_MOST_IDS = 2**16  # in a hot vocabulary whose places are uint16
_DOCUMENT_BYTES, _ARCHIVE_BYTES = 8 + 36 * 4 + 1, 16_384


@dataclass(frozen=True)
class TargetsOptions:
    """`top`: how many of the likeliest ids of S are kept of each distribution; None: all of S."""

    data: Path  # a folder that `training extract` made
    model: str
    hot_vocab: Path
    slots: int = 4
    top: int | None = 64
    window: int = 4096  # tokens; longer documents are cut, each base row in one piece with what comes before it
    max_gb: float | None = None  # 10⁹ bytes
    shard_bytes: int = SHARD_BYTES
    device: str = "auto"
    threads: int | None = None


def make_targets(options: TargetsOptions, report: Report = lambda doing, done, total: None) -> Path:
    """Write `.tt.npz` files beside the shards of `options.data`, last the manifest `targets.json`: its path.

    A killed run goes on when it is run again. Raises TrainingError for an extraction of another model or hot
    vocabulary, for targets of other options in the folder, and for more than `max_gb` or the disk allow.
    """
    extraction = read_manifest(options.data)
    directory = resolve_model(options.model)
    tokenizer = ChatTokenizer.load(directory)
    loaded = _load(options, extraction)
    hot = HotVocab.load(options.hot_vocab, tokenizer.fingerprint, loaded.config.vocab_size)
    _check(options, extraction, loaded, hot)
    counts = extraction["counts"]
    rows = (counts["answer_tokens"] - counts["documents"]) * options.slots
    size = rows * _row_bytes(options, hot.size) + counts["documents"] * _DOCUMENT_BYTES
    size += _ARCHIVE_BYTES * (len(extraction["shards"]) + 2 * size // options.shard_bytes)
    there = sum(path.stat().st_size for path in options.data.glob("*.tt.npz"))
    must_fit(f"targets of {rows} rows", size, options.data, options.max_gb, reused=there)
    shards = Shards(options.data, _identity(options, extraction, loaded, hot), MANIFEST, guest=True)
    finished, done = shards.finished(), 0
    ids = hot.d2t.to(loaded.runner.device, torch.int64)
    try:
        for entry in extraction["shards"]:
            documents = read_shard(options.data / entry["file"], entry["sha256"])
            for part, members in enumerate(_parts(documents, options, hot.size)):
                path = options.data / f"{Path(entry['file']).stem}.{part:03d}.tt.npz"
                if not shards.is_whole(finished.get(path.name)):
                    made = []
                    for forced in members:
                        report(f"{told(size)} to write: drafting", done, counts["documents"])
                        made.append(chain_targets(loaded.runner, forced, ids, options))
                        done += 1
                    finished[path.name] = _put_down(path, made, shards.identity)
                    shards.note(finished)
                else:
                    done += len(members)
        totals = {name: sum(one[name] for one in finished.values()) for name in ("documents", "rows", "bytes")}
        shards.complete(finished, counts=totals)
    except OSError as error:
        raise TrainingError(f"cannot write to {options.data}: {reason(error)}") from error
    report("drafted", counts["documents"], counts["documents"])
    return options.data / MANIFEST


@torch.inference_mode()
def chain_targets(runner: Runner, forced: Forced, ids: Tensor, options: TargetsOptions) -> Targets:
    """One document's targets, on the CPU. `ids` int64 [S] of the hot vocabulary."""
    model, document = runner.model, forced.document
    block = NativeBlock(model)
    first, length, slots = document.prompt_length, len(document.tokens), options.slots
    shape = max(length - 1 - first, 0), slots
    k = len(ids) if options.top is None else min(options.top, len(ids))
    logprobs = torch.full((*shape, k), torch.nan)
    indices = torch.zeros((*shape, k), dtype=torch.int64)
    log_z_hot, log_z, tail = (torch.full(shape, torch.nan) for _ in range(3))
    for window in windows(0, first, length, options.window, slots):
        batch = collate([window], [forced], runner.device, runner.dtype)
        outputs = recursive_outputs(block, model.embed, batch.tokens, batch.hidden, slots)
        for slot, output in enumerate(outputs):
            supervised = batch.supervised(slot)[0].nonzero()[:, 0]  # rows of the window
            for some in supervised.split(_ROWS) if len(supervised) else ():
                logits = block.logits(output[0, some])  # [n, V]
                hot = logits[:, ids]
                over = hot.logsumexp(-1)
                found, places = (hot - over[:, None]).topk(k, dim=-1) if options.top else (hot - over[:, None], None)
                at = some.cpu() + 1 + window.start - first  # row r stands for base position r + 1 of the window
                log_z_hot[at, slot], log_z[at, slot] = over.cpu(), logits.logsumexp(-1).cpu()
                logprobs[at, slot] = found.cpu()
                tail[at, slot] = (1 - found.exp().sum(-1)).clamp(min=0).cpu()
                if places is not None:
                    indices[at, slot] = places.cpu()
    return Targets(
        id=document.id,
        held_out=document.held_out,
        logprobs=logprobs,
        indices=indices if options.top else None,
        log_z_hot=log_z_hot,
        log_z=log_z,
        tail=tail,
    )


def _put_down(path: Path, made: Sequence[Targets], identity: Mapping[str, Any]) -> dict[str, Any]:
    put_down(path, lambda file: write_targets(file, made, identity))
    return {
        "file": path.name,
        "sha256": digest(path),
        "bytes": path.stat().st_size,
        "documents": len(made),
        "rows": sum(len(one.log_z) for one in made),
    }


def _parts(documents: Sequence[Forced], options: TargetsOptions, hot: int) -> list[list[Forced]]:
    """Whole documents by file, at most `shard_bytes` together where one alone is no more."""
    found: list[list[Forced]] = []
    size = 0
    for forced in documents:
        rows = max(len(forced.document.answer) - 1, 0) * options.slots
        more = rows * _row_bytes(options, hot) + _DOCUMENT_BYTES
        if not found or size + more > options.shard_bytes:
            found.append([])
            size = _ARCHIVE_BYTES
        found[-1].append(forced)
        size += more
    return found


def _row_bytes(options: TargetsOptions, hot: int) -> int:
    """Of one slot of one base row."""
    return 12 + (2 * hot if options.top is None else 4 * min(options.top, hot))


def _load(options: TargetsOptions, extraction: Mapping[str, Any]) -> Loaded:
    return load(
        LocalOptions(
            model=options.model,
            device=options.device,
            dtype=extraction["dtype"],
            drafter="mtp",
            threads=options.threads,
            max_model_len=1,
            max_num_seqs=1,
            prefix_cache=False,
        )
    )


def _check(options: TargetsOptions, extraction: Mapping[str, Any], loaded: Loaded, hot: HotVocab) -> None:
    for name in ("weights", "tokenizer"):
        theirs, ours = extraction["fingerprints"][name], getattr(loaded.fingerprints, name)
        if theirs != ours:
            raise TrainingError(f"{options.data} is of another model: {name} {theirs[:12]}, here {ours[:12]}")
    if extraction["d2t_sha256"] not in (None, hot.fingerprint):
        raise TrainingError(f"{options.data} was extracted with another hot vocabulary than {options.hot_vocab}")
    if hot.size > _MOST_IDS:
        raise TrainingError(f"a hot vocabulary of {hot.size} ids: targets name at most {_MOST_IDS}")
    if options.slots < 1 or options.window < 4 * options.slots:
        raise TrainingError(f"a window of {options.window} tokens is too short for {options.slots} slots")


def _identity(options: TargetsOptions, extraction: Mapping[str, Any], loaded: Loaded, hot: HotVocab) -> dict[str, Any]:
    prints = loaded.fingerprints
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprints": {name: getattr(prints, name) for name in ("weights", "tokenizer", "drafter", "build")},
        "d2t_sha256": hot.fingerprint,
        "slots": options.slots,
        "top": options.top,
        "window": options.window,
        "shard_bytes": options.shard_bytes,
        "sources": sources(extraction),
    }
