"""Drafts from every s-th position of a document, all slots judged at the document's context: where walks begin anew
after each miss, these figures have anchors that no drafter moves.

Sums by document, depth and slot; `figures` makes ratios of them. TRAINING §1.1 and §1.5 define them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.drafters.protocol import Drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from backend.models.qwen3_5 import Qwen35
from training.data import Forced
from training.evaluate.choices import choices
from training.evaluate.following import Following, Row, batches

DEPTHS = (512, 2048, 8192, 32768)  # upper ends of the buckets of an anchor's position; beyond the last is one more

Sums = Mapping[str, NDArray[np.float64]]
"""Of one document, float64 [depths, slots] each: `n` anchors whose slot lies in the document, `hit`, `surv` and
`reached` (all before it right); of anchors with every slot, `full` and `full_surv`. With a hot vocabulary `covered`,
`run` (this target and all before it in the list) and `mass`, the target's distribution on it. For a temperature T
`beta@T`, `beta_surv@T` (the product of betas so far), `coupled@T`, `coupled_surv@T`, over `sampled` anchors."""


@dataclass(frozen=True)
class StrideOptions:
    """`seed`: of the noise of coupled sampling, together with each document's id."""

    slots: int = 4
    every: int = 4
    temperatures: tuple[float, ...] = (0.7, 1.0)
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Judged:
    """A document, the target's token at every position of its answer, and by temperature what coupled sampling would
    say there. `targets` of own answers are the answers."""

    forced: Forced
    targets: Sequence[int]
    coupled: Mapping[float, Sequence[int]]


def judged(model: Qwen35, forced: Forced, targets: Sequence[int], options: StrideOptions, vocab: int) -> Judged:
    """What no drafter changes, worked out once for all of them."""
    coupled = {t: choices(model, forced, noisy(forced, t, options), vocab) for t in options.temperatures}
    return Judged(forced, targets, coupled)


@torch.inference_mode()
def stride(
    model: Qwen35,
    drafter: Drafter,
    documents: Sequence[Judged],
    options: StrideOptions,
    vocab: int,
    *,
    together: int = 32,
    report: Callable[[int], None] = lambda done: None,
) -> list[Sums]:
    """The sums of each document, in order. Anchors are the positions N, N + s, … up to T - 2.

    Once with the drafter's own drafts, chosen as the document was; where there are temperatures once more with the
    document's tokens as drafts, so that its distributions are of the same contexts as the target's. `report` hears how
    many documents are done.
    """
    passes = [_own_drafts, _distributions] if options.temperatures else [_own_drafts]
    found: dict[int, dict[str, NDArray[np.float64]]] = {i: {} for i in range(len(documents))}
    done = 0
    for batch in batches([document.forced for document in documents], together):
        for once in passes:
            following = Following(model, drafter, [documents[i].forced for i in batch], vocab)
            some = [_Anchored(row, documents[i], found[i]) for row, i in zip(following.rows, batch, strict=True)]
            judge = once(model, drafter, options, vocab)
            while active := [one for one in some if one.row.left]:
                judge(following, active)
                for one in active:
                    following.commit(one.row, min(options.every, one.row.left))
        done += len(batch)
        report(done)
    names = {"full", "full_surv"}  # of documents that are all shorter than the slots none has them
    names |= {name for sums in found.values() for name in sums}
    empty = np.zeros((len(DEPTHS) + 1, options.slots))
    return [{name: found[i].get(name, empty) for name in sorted(names)} for i in range(len(documents))]


class _Anchored:
    """A document at an anchor: its last committed position p, whose slot j is to be the token at p + 1 + j."""

    def __init__(self, row: Row, judged: Judged, sums: dict[str, NDArray[np.float64]]) -> None:
        self.row, self.judged, self._sums = row, judged, sums

    def ahead(self, tokens: Sequence[int], slots: int) -> list[int]:
        """Of an answer's tokens, those that the slots are to be: fewer than `slots` at its end."""
        first = self.row.done - self.row.document.prompt_length
        return list(tokens[first : first + slots])

    def at(self, tokens: Sequence[int], position: int) -> int:
        """Of an answer's tokens, the one at a position of the document."""
        return tokens[position - self.row.document.prompt_length]

    def add(self, slots: int, **values: NDArray[np.float64]) -> None:
        """Add to the sums named, at this anchor's depth, the values of slots 0 …"""
        depth = int(np.searchsorted(DEPTHS, self.row.done - 1))
        for name, each in values.items():
            sums = self._sums.setdefault(name, np.zeros((len(DEPTHS) + 1, slots)))
            sums[depth, : len(each)] += each


_Judge = Callable[[Following, Sequence[_Anchored]], None]


def _own_drafts(model: Qwen35, drafter: Drafter, options: StrideOptions, vocab: int) -> _Judge:
    listed = _listed(drafter, vocab)
    K = options.slots

    def judge(following: Following, active: Sequence[_Anchored]) -> None:
        counts = [min(K, one.row.left) for one in active]
        drafts = following.propose([one.row for one in active], counts)
        for one, drafted in zip(active, drafts, strict=True):
            targets = one.ahead(one.judged.targets, K)
            hit = np.zeros(len(targets))
            for slot, (draft, target) in enumerate(zip(drafted, targets, strict=False)):
                hit[slot] = draft == target
            surv = _so_far(hit)
            one.add(K, n=np.ones(len(targets)), hit=hit, surv=surv, reached=np.r_[1, surv[:-1]])
            if len(targets) == K:
                one.add(K, full=np.ones(K), full_surv=surv)
            if listed is not None:
                covered = listed[targets].astype(np.float64)
                one.add(K, covered=covered, run=_so_far(covered))

    return judge


def _distributions(model: Qwen35, drafter: Drafter, options: StrideOptions, vocab: int) -> _Judge:
    listed = _listed(drafter, vocab)
    K, device = options.slots, model.model.embed_tokens.weight.device
    hot = None if listed is None else torch.from_numpy(listed).to(device)

    def judge(following: Following, active: Sequence[_Anchored]) -> None:
        counts = [min(K, one.row.left) for one in active]
        told = [one.row.tokens[one.row.done : one.row.done + K] for one in active]
        slots: list[dict[str, NDArray[np.float64]]] = []  # of each slot its values [B]

        def choose(logits: Tensor) -> Tensor:
            slot = len(slots)
            slots.append(_compare(model, active, slot, logits[:, :vocab], options, vocab, hot))
            return torch.tensor([row[slot] if slot < len(row) else 0 for row in told], device=device)

        following.propose([one.row for one in active], counts, choose)
        for i, (one, count) in enumerate(zip(active, counts, strict=True)):
            values = {name: np.array([slot[name][i] for slot in slots[:count]]) for name in (slots[0] if slots else ())}
            runs = {
                f"{kind}_surv@{t}": _so_far(values[f"{kind}@{t}"])
                for t in options.temperatures
                for kind in ("beta", "coupled")
                if values
            }
            one.add(K, **values, **runs)

    return judge


def _compare(
    model: Qwen35,
    active: Sequence[_Anchored],
    slot: int,
    drafted: Tensor,
    options: StrideOptions,
    vocab: int,
    hot: Tensor | None,
) -> dict[str, NDArray[np.float64]]:
    """The drafter's distribution, logits float32 [B, vocab], against the target's at the same place; each [B].

    Rows of documents that end before the slot hold values of no meaning.
    """
    at = [min(one.row.done - 1 + slot, len(one.row.tokens) - 2) for one in active]
    rows = torch.stack([one.row.hidden[position] for one, position in zip(active, at, strict=True)])
    target = model.logits(rows)[:, :vocab]  # [B, vocab]
    found = {"sampled": np.ones(len(active))}
    if hot is not None:
        found["mass"] = _numbers(target.softmax(-1)[:, hot].sum(-1))
    for t in options.temperatures:
        both = torch.minimum((target / t).softmax(-1), (drafted / t).softmax(-1))
        found[f"beta@{t}"] = _numbers(both.sum(-1))
        samplers = [Sampler(noisy(one.judged.forced, t, options), vocab) for one in active]
        none = torch.empty(len(active), 0, dtype=torch.int64)
        tokens = SamplerBatch(samplers, [position + 1 for position in at]).verify(drafted[:, None], none)[:, 0]
        said = [one.at(one.judged.coupled[t], position + 1) for one, position in zip(active, at, strict=True)]
        found[f"coupled@{t}"] = _numbers(tokens.cpu() == torch.tensor(said))
    return found


def noisy(forced: Forced, temperature: float, options: StrideOptions) -> SamplingParams:
    """How coupled sampling chooses along a document: nothing but temperature and noise."""
    digest = hashlib.sha256(f"{options.seed} {forced.document.id}".encode()).digest()
    return SamplingParams(temperature=temperature, seed=int.from_bytes(digest[:8], "little"))


def _listed(drafter: Drafter, vocab: int) -> NDArray[np.bool_] | None:
    """bool [vocab], True at the ids that the drafter can propose; None where it can all."""
    ids = drafter.draft_block.ids if isinstance(drafter, RecursiveDrafter) else None
    if ids is None:
        return None
    listed = np.zeros(vocab, np.bool_)
    inside = ids.cpu().numpy()
    listed[inside[inside < vocab]] = True
    return listed


def _so_far(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Products of the first 1, 2, … values."""
    return np.multiply.accumulate(values, dtype=np.float64)


def _numbers(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.double().cpu().numpy()
    return found
