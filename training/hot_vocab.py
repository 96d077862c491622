"""From exported shards to a hot vocabulary: count the model's own tokens, keep the most frequent; later, grow the list.

Knows shards through `training.data`; the file it makes is backend's, and so is its format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.text.tokenizer import ChatTokenizer
from training.coverage import Answer, by_kind
from training.data import Shard, documents_of, read_shard
from training.errors import TrainingError


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

    def as_json(self) -> dict[str, Any]:
        """What a ledger keeps of it."""
        counts = {name: getattr(self, name) for name in ("documents", "repeated", "distinct", "filled")}
        return counts | _as_json(self.hot)


@dataclass(frozen=True)
class Grown:
    """A list that grew. `added`: the ids that are new to it and how often the answers hold each; `kept`: spare ids that
    the answers turned out to use, and which are spare no longer; `before`: what the old list covers of the same."""

    hot: HotVocab
    added: dict[int, int]
    kept: dict[int, int]
    before: Coverage

    def as_json(self) -> dict[str, Any]:
        """What a ledger keeps of it."""
        grown = {"added": len(self.added), "kept": len(self.kept), "before": self.before.model_dump()}
        return grown | _as_json(self.hot)


def build(
    shards: Sequence[Shard],
    tokenizer: ChatTokenizer,
    size: int,
    report: Callable[[int], None] = lambda done: None,
    *,
    spare: int = 0,
) -> Built:
    """Choose `size` ids: all special tokens, then the model's own tokens of the train split by count (ties to the
    lowest id), then the lowest ids not yet in. A function of the documents and the tokenizer: order changes nothing.

    The last `spare` ids chosen are marked as the ones that growth replaces first. Documents that several shards hold
    count once. `report` follows each shard read. Raises TrainingError for a size that cannot be, for a damaged shard,
    for one of another tokenizer, and where there is nothing to count.
    """
    special, unknown = _special(tokenizer), _unknown(tokenizer)
    vocabulary = tokenizer.vocab_size - len(unknown)
    if not len(special) <= size <= vocabulary:
        raise TrainingError(
            f"a hot vocabulary of {size} ids cannot be: this tokenizer has {len(special)} special tokens, "
            f"which are always in, and {vocabulary} tokens in all"
        )
    if spare > size - len(special):
        raise TrainingError(f"{spare} of {size} ids cannot be spare: {len(special)} are special tokens, which stay")
    counted = _count(shards, tokenizer, report)
    rank = counted.train.copy()
    rank[special] = counted.train.max() + 1
    rank[unknown] = -1
    chosen = np.argsort(-rank, kind="stable")[:size]
    hot = _listed(np.sort(chosen), np.sort(chosen[size - spare :]), counted, tokenizer)
    filled = int((rank[chosen] == 0).sum())
    distinct = int(np.count_nonzero(counted.train))
    return Built(hot, counted.documents, counted.repeated, distinct, filled)


def grow(
    hot: HotVocab,
    shards: Sequence[Shard],
    tokenizer: ChatTokenizer,
    report: Callable[[int], None] = lambda done: None,
    *,
    most: int | None = None,
) -> Grown:
    """Take in what the list was wrong about: the ids outside it that the model's own tokens of the train split hold,
    most frequent first (ties to the lowest id), at most `most` of them or as many as there are spare ids.

    They take the places of spare ids, least used first (ties to the highest id); once those are gone the list gets
    longer. A spare id that is used more than what would replace it stays, as one that is spare no longer. Counts and
    coverage of the new list are over these shards alone. Raises as `build` does.
    """
    counted = _count(shards, tokenizer, report)
    old, spare = _ids(hot), np.array(hot.header.spare, dtype=np.int64)
    firm = np.setdiff1d(old, spare)
    seen = counted.train.copy()
    seen[firm] = 0  # what is left are corrections: a drafter with these rows alone could propose none of them
    seen[_unknown(tokenizer)] = 0
    wanted = np.argsort(-seen, kind="stable")[: len(spare) if most is None else most]
    wanted = wanted[seen[wanted] > 0]
    unused = np.setdiff1d(spare, wanted)
    unused = unused[np.lexsort((unused, -counted.train[unused]))]  # most used first, then the lowest id
    left = np.sort(unused[: max(len(spare) - len(wanted), 0)])
    ids = np.sort(np.concatenate((firm, wanted, left)))
    new = _listed(ids, left, counted, tokenizer, grown_from=hot)
    kept = np.intersect1d(wanted, spare)
    return Grown(
        hot=new,
        added={int(i): int(counted.train[i]) for i in wanted if i not in kept},
        kept={int(i): int(counted.train[i]) for i in kept},
        before=_coverage(counted.train, old),
    )


@dataclass(frozen=True)
class _Counted:
    """int64 [V] of each split, and what the shards say besides."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    answers: list[Answer]  # held out
    sources: list[dict[str, object]]
    documents: int
    repeated: int


def _count(shards: Sequence[Shard], tokenizer: ChatTokenizer, report: Callable[[int], None]) -> _Counted:
    counts = np.zeros((2, tokenizer.vocab_size), dtype=np.int64)  # [train, held out]
    answers: dict[str, Answer] = {}
    seen: set[str] = set()
    sources: set[str] = set()
    repeated = 0
    for done, shard in enumerate(shards, start=1):
        contents = read_shard(shard, tokenizer.fingerprint, tokenizer.vocab_size)
        sources.add(json.dumps(contents.fingerprints, sort_keys=True))
        fresh: tuple[list[NDArray[np.int32]], ...] = ([], [])
        for document in documents_of(contents):
            if document.id in seen:
                repeated += 1
                continue
            seen.add(document.id)
            own = document.tokens[document.prompt_length :]
            fresh[int(document.held_out)].append(own)
            if document.held_out:
                answers[document.id] = Answer(own.copy(), len(document.tokens), document.tags)
        for split, found in enumerate(fresh):
            if found:
                counts[split] += np.bincount(np.concatenate(found), minlength=tokenizer.vocab_size)
        report(done)
    train, held_out = counts
    if not train.any():
        raise TrainingError(f"nothing to count: no own token in the train split of {len(seen)} documents")
    said = [json.loads(source) for source in sorted(sources)]
    return _Counted(train, held_out, [answers[name] for name in sorted(answers)], said, len(seen), repeated)


def _listed(
    ids: NDArray[np.int64],
    spare: NDArray[np.int64],
    counted: _Counted,
    tokenizer: ChatTokenizer,
    grown_from: HotVocab | None = None,
) -> HotVocab:
    listed = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    listed[ids] = True
    reach, kinds = by_kind(counted.answers, listed)
    header = Header(
        tokenizer=tokenizer.fingerprint,
        train=_coverage(counted.train, ids),
        held_out=_coverage(counted.held_out, ids),
        sources=counted.sources,
        reach=reach,
        kinds=kinds,
        spare=spare.tolist(),
        parent=grown_from.fingerprint if grown_from else None,
        generation=grown_from.header.generation + 1 if grown_from else 0,
    )
    return HotVocab(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(counted.train[ids]), header)


def _as_json(hot: HotVocab) -> dict[str, Any]:
    header = hot.header
    told = header.model_dump(include={"train", "held_out", "reach", "parent", "generation"})
    return {"size": hot.size, "fingerprint": hot.fingerprint, "spare": len(header.spare), **told}


def _coverage(counts: NDArray[np.int64], ids: NDArray[np.int64]) -> Coverage:
    return Coverage(covered=int(counts[ids].sum()), tokens=int(counts.sum()))


def _ids(hot: HotVocab) -> NDArray[np.int64]:
    return hot.d2t.numpy().astype(np.int64)


def _special(tokenizer: ChatTokenizer) -> NDArray[np.int64]:
    return np.array(sorted(i for i in tokenizer.added_ids | tokenizer.eos_ids if i < tokenizer.vocab_size))


def _unknown(tokenizer: ChatTokenizer) -> NDArray[np.int64]:
    return np.array(tokenizer.undecodable_ids(tokenizer.vocab_size), dtype=np.int64)
