"""How far a list of token ids carries a drafter over given answers: of all own tokens, and of the tokens ahead of it.

Knows documents as token ids and what kind each is of; knows no file, no model and not how a list is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend.drafters.hot_vocab import Coverage, Reach

SLOTS = 4
_LENGTHS = (256, 1024, 4096, 16384)  # upper ends of the buckets


@dataclass(frozen=True)
class Answer:
    """`own` int32 [n], the model's own tokens of a document of `length` tokens; `tags` as its request's, if known."""

    own: NDArray[np.int32]
    length: int
    tags: Mapping[str, str]


def reach(kind: str, answers: Iterable[NDArray[np.int32]], listed: NDArray[np.bool_]) -> Reach:
    """Over own tokens int32 [n] of each answer; `listed` bool [V] is True at the list's ids.

    Anchors are the own tokens that another one follows, as drafting sees them: the first token is the prefill's to
    choose, so a run of j + 1 begins at the second one at the earliest (TRAINING §3.5's P(first j + 1 tokens ∈ S)).
    """
    own = np.zeros(2, np.int64)  # in the list, of how many
    runs = np.zeros((SLOTS, 2), np.int64)
    documents = 0
    for answer in answers:
        inside = listed[answer]
        documents += 1
        own += inside.sum(), len(inside)
        run = inside[1:]  # run[i]: the j + 1 tokens after own token i are all in the list
        for j in range(SLOTS):
            runs[j] += run.sum(), len(run)
            run = run[:-1] & inside[2 + j :]
    return Reach(
        kind=kind,
        documents=documents,
        own=Coverage(covered=int(own[0]), tokens=int(own[1])),
        runs=[Coverage(covered=int(covered), tokens=int(anchors)) for covered, anchors in runs],
    )


def by_kind(answers: Sequence[Answer], listed: NDArray[np.bool_]) -> tuple[list[Reach], str]:
    """All answers together, then each kind of them by name; and what tells the kinds apart.

    That is the requests' tag `class` where any has one, else the client's name, else the length of the document.
    """
    told_apart, kinds = _kinds(answers)
    found = [reach("all", (answer.own for answer in answers), listed)]
    for kind in dict.fromkeys(sorted(kinds, key=_in_order)):
        of_kind = (answer.own for answer, its in zip(answers, kinds, strict=True) if its == kind)
        found.append(reach(kind, of_kind, listed))
    return found, told_apart


def _kinds(answers: Sequence[Answer]) -> tuple[str, list[str]]:
    for name, told_apart in (("class", "the request's tag `class`"), ("client", "the client's name")):
        if any(name in answer.tags for answer in answers):
            return told_apart, [answer.tags.get(name, "(none)") for answer in answers]
    return "the document's length in tokens", [_bucket(answer.length) for answer in answers]


def _bucket(length: int) -> str:
    return next((f"to {end}" for end in _LENGTHS if length <= end), f"over {_LENGTHS[-1]}")


def _in_order(kind: str) -> tuple[int, str]:
    buckets = [*(f"to {end}" for end in _LENGTHS), f"over {_LENGTHS[-1]}"]
    return (buckets.index(kind) if kind in buckets else -1, kind)
