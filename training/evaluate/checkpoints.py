"""Draft blocks against their teacher's distributions, all on one fixed set of documents (TRAINING §1.7).

What training optimises, beside the walk's acceptance, which is what it is for. Teacher-forced: every slot is fed the
document's tokens. Knows no drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.drafters.recursive import RecursiveDrafter
from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.fingerprint import hash_ids
from backend.models.qwen3_5 import Qwen35
from training.data import Document, Forced
from training.errors import TrainingError
from training.evaluate.figures import Bootstrap, Figure, Ratio
from training.evaluate.opening import Contestant, open_all
from training.forced import read_forced, read_manifest
from training.recursion import recursive_outputs

Report = Callable[[str, int, int], None]
FIGURES = ("teacher_kl", "covered_mass", "top1", "top5", "gold_top1")
_ROWS = 256  # of logits at once


@dataclass(frozen=True)
class CheckpointsOptions:
    """`checkpoints`: students' directories, and mtp and hot_vocab:FILE beside them, differences being to the first.
    `data`: what `training extract` made. `held_out`: of that the held-out documents alone."""

    checkpoints: tuple[str, ...]
    data: Path
    model: str = "tiny"
    teacher: Literal["trunk", "mtp"] = "trunk"
    slots: int = 4
    window: int = 512
    held_out: bool = True
    resamples: int = 1000
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A block under its name. `d2t`: the hash of its ids, None for the whole vocabulary."""

    name: str
    block: DraftBlock
    parameters_read: int
    d2t: str | None = None


@dataclass(frozen=True)
class SlotFigures:
    """Of one slot, means over `positions`.

    `teacher_kl`: KL(t|S ‖ s), both over the block's ids S alone, in nats; to be read with `covered_mass`, t(S), for it
    knows nothing of what lies outside. `top1`: the block's first choice is the teacher's. `top5`: the teacher's is
    among its first five. `gold_top1`: its first choice is the document's token. A teacher's choice outside S is a miss.
    """

    positions: int
    teacher_kl: Figure
    covered_mass: Figure
    top1: Figure
    top5: Figure
    gold_top1: Figure


@dataclass(frozen=True)
class Judged:
    """A checkpoint's figures by slot, and those minus the first checkpoint's, over the same redrawn documents."""

    checkpoint: str
    parameters_read: int
    d2t: str | None
    slots: list[SlotFigures]
    differences: list[dict[str, Figure]] | None


@dataclass(frozen=True)
class Provenance:
    """The table, and the set it is of: `tokens` are the model's own, in `windows` seen at a time.

    `data`: the sha256 of each of its shards, where it came from files.
    """

    teacher: str
    documents: int
    tokens: int
    windows: int
    checkpoints: list[Judged]
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    data: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_checkpoints(options: CheckpointsOptions, report: Report = lambda doing, done, total: None) -> Provenance:
    """The table over an extraction. Raises TrainingError for one of another model, or without an anchor, and
    BackendError where the model or a checkpoint cannot be loaded."""
    manifest = read_manifest(options.data)
    teachers = [options.teacher] if options.teacher == "mtp" else []
    opened = open_all(options.model, [*options.checkpoints, *teachers], options.device, options.dtype, options.threads)
    loaded = opened.model
    for name in ("weights", "tokenizer"):
        theirs, ours = manifest["fingerprints"][name], getattr(loaded.fingerprints, name)
        if theirs != ours:
            raise TrainingError(
                f"{options.data} was extracted from another model: {name} {theirs[:12]}, here {ours[:12]}"
            )
    found = provenance(
        loaded.runner.model,
        [_checkpoint(one) for one in opened.contestants[: len(options.checkpoints)]],
        list(read_forced(options.data, True if options.held_out else None)),
        vocab=loaded.vocab,
        teacher=options.teacher,
        slots=options.slots,
        window=options.window,
        resamples=options.resamples,
        seed=options.seed,
        report=report,
    )
    return replace(
        found,
        fingerprints={name: getattr(loaded.fingerprints, name) for name in ("weights", "tokenizer", "build")},
        data=tuple(shard["sha256"] for shard in manifest["shards"]),
    )


def _checkpoint(contestant: Contestant) -> Checkpoint:
    drafter = contestant.drafter
    if not isinstance(drafter, RecursiveDrafter):
        raise TrainingError(f"{contestant.given!r} has no weights to judge: a student, mtp or hot_vocab:FILE has")
    ids = drafter.draft_block.ids
    d2t = None if ids is None else hash_ids(ids)
    return Checkpoint(contestant.name, drafter.draft_block, contestant.parameters_read, d2t)


@torch.inference_mode()
def provenance(
    model: Qwen35,
    checkpoints: Sequence[Checkpoint],
    documents: Sequence[Forced],
    *,
    vocab: int | None = None,
    teacher: Literal["trunk", "mtp"] = "trunk",
    slots: int = 4,
    window: int = 512,
    resamples: int = 2000,
    seed: int = 0,
    report: Report = lambda doing, done, total: None,
) -> Provenance:
    """Every checkpoint over the anchors of every document, from the first generated token to the last but one.

    `teacher`: the trunk, whose distribution for slot j of anchor p is its own at p + j, or slot j of its MTP block,
    teacher-forced likewise. `vocab`: ids that may be chosen. A block sees at most `window` tokens back. Intervals are
    paired bootstraps over documents. Slots that no anchor has are left out. Raises TrainingError where no document has
    an anchor.
    """
    vocab = vocab or model.config.vocab_size
    windows = sum(len(_bases(forced.document, window)) for forced in documents)
    if not windows:
        raise TrainingError(
            f"nothing to judge by: none of {len(documents)} documents has two tokens of the model's own"
        )
    sums = np.zeros((len(checkpoints), slots, len(documents), len(FIGURES) + 1))  # the last is the count of positions
    native = NativeBlock(model) if teacher == "mtp" else None
    parts = (part for i, forced in enumerate(documents) for part in _parts(i, forced, window, slots))
    for done, part in enumerate(parts):
        report("checkpoints", done, windows)
        outputs = zip(*(_outputs(model, checkpoint.block, part) for checkpoint in checkpoints), strict=True)
        for j, (taught, drafted) in enumerate(zip(_teacher(model, native, part, vocab), outputs, strict=True)):
            for c, (checkpoint, rows) in enumerate(zip(checkpoints, drafted, strict=True)):
                sums[c, j, part.document] += _sums(checkpoint.block, rows, taught, part.gold[j], vocab)
    report("checkpoints", windows, windows)
    reached = int((sums[0, :, :, -1].sum(-1) > 0).sum())  # slots that some anchor has
    judged = _judged(checkpoints, sums[:, :reached], Bootstrap(len(documents), resamples, seed))
    tokens = sum(len(forced.document.tokens) - forced.document.prompt_length for forced in documents)
    return Provenance(teacher, len(documents), tokens, windows, judged)


@dataclass(frozen=True, eq=False)
class _Part:
    """A window of a document. Bases are those of its rows that are anchors, `rows` of them from row `first`."""

    document: int
    tokens: Tensor  # int64 [1, L], a few more than the window's own, for the later slots to be fed
    hidden: Tensor  # [1, L, H]
    first: int  # row of recursive_outputs, row r being base r + 1 of the window
    gold: list[Tensor]  # by slot that any base has, int64 [bases that have it]: what the draft is to be
    taught: list[Tensor]  # likewise [bases that have it, H]: the trunk's hidden state that predicts it


def _parts(index: int, forced: Forced, window: int, slots: int) -> Iterator[_Part]:
    document, hidden = forced.document, forced.hidden
    tokens = torch.from_numpy(document.tokens.astype(np.int64))
    T = len(tokens)
    for start, bases in _bases(document, window):
        end = min(T, bases[-1] + slots)
        counts = [min(bases[-1], T - 2 - j) - bases[0] + 1 for j in range(slots)]  # where x_{p+1+j} exists
        counts = [count for count in counts if count > 0]
        yield _Part(
            document=index,
            tokens=tokens[None, start:end],
            hidden=hidden[None, start:end],
            first=bases[0] - start - 1,
            gold=[tokens[bases[0] + 1 + j : bases[0] + 1 + j + count] for j, count in enumerate(counts)],
            taught=[hidden[bases[0] + j : bases[0] + j + count] for j, count in enumerate(counts)],
        )


def _bases(document: Document, window: int) -> list[tuple[int, range]]:
    """The first token of each window that has anchors, and these."""
    T = len(document.tokens)
    found = [
        (start, range(max(document.prompt_length, start + 1), min(start + window, T - 2) + 1))
        for start in range(0, T - 1, window)
    ]
    return [(start, bases) for start, bases in found if bases]


def _outputs(model: Qwen35, block: DraftBlock, part: _Part) -> Iterator[Tensor]:
    """By slot, what `block.logits` reads of the bases that have it: [rows, w']."""
    weight = model.model.embed_tokens.weight
    tokens, hidden = part.tokens.to(weight.device), part.hidden.to(weight.device, weight.dtype)
    slots = recursive_outputs(block, model.embed, tokens, hidden, len(part.gold))
    for rows, gold in zip(slots, part.gold, strict=True):
        yield rows[0, part.first : part.first + len(gold)]


def _teacher(model: Qwen35, native: NativeBlock | None, part: _Part, vocab: int) -> Iterator[Tensor]:
    """By slot, the teacher's logits [rows, V]."""
    if native is None:
        weight = model.model.embed_tokens.weight
        for hidden in part.taught:
            yield model.logits(hidden.to(weight.device, weight.dtype))[:, :vocab]
    else:
        for rows in _outputs(model, native, part):
            yield native.logits(rows)[:, :vocab]


def _sums(block: DraftBlock, rows: Tensor, taught: Tensor, gold: Tensor, vocab: int) -> NDArray[np.float64]:
    """rows [R, w'], teacher's logits [R, V], gold int64 [R] → each of FIGURES summed over the rows, and R."""
    total = np.zeros(len(FIGURES) + 1)
    ids = torch.arange(vocab) if block.ids is None else block.ids.to(torch.int64)
    ids = ids[ids < vocab].to(rows.device)
    for at in range(0, len(rows), _ROWS):
        t = taught[at : at + _ROWS].double()
        s = block.logits(rows[at : at + _ROWS])[:, : len(ids)].double().log_softmax(-1)  # [R, S]
        t_S = t.index_select(1, ids)
        kl = (t_S.softmax(-1) * (t_S.log_softmax(-1) - s)).sum(-1)
        mass = (t_S.logsumexp(-1) - t.logsumexp(-1)).exp()
        best = ids[s.topk(min(5, len(ids)), dim=-1).indices]  # [R, 5]
        right = t.argmax(-1, keepdim=True) == best
        hits = best[:, 0] == gold[at : at + _ROWS].to(rows.device)
        figures = (kl, mass, right[:, 0], right.any(-1), hits)
        total += [*(float(figure.double().sum()) for figure in figures), len(t)]
    return total


def _judged(checkpoints: Sequence[Checkpoint], sums: NDArray[np.float64], bootstrap: Bootstrap) -> list[Judged]:
    """sums [C, K, D, F + 1] → each checkpoint's figures, and the differences to the first one's."""

    def ratio(c: int, j: int, f: int) -> Ratio:
        return sums[c, j, :, f], sums[c, j, :, -1]

    found = []
    slots, figures = range(sums.shape[1]), range(len(FIGURES))
    for c, checkpoint in enumerate(checkpoints):
        mine = [
            SlotFigures(round(sums[c, j, :, -1].sum()), *(bootstrap.figure(ratio(c, j, f)) for f in figures))
            for j in slots
        ]
        over = [{FIGURES[f]: bootstrap.difference(ratio(c, j, f), ratio(0, j, f)) for f in figures} for j in slots if c]
        found.append(Judged(checkpoint.name, checkpoint.parameters_read, checkpoint.d2t, mine, over or None))
    return found
