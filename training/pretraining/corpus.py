"""The endless, seeded stream of training conversations, and whole documents packed into fixed rows of token ids.

Joins sources, questions and lessons. The same seed gives the same stream; held-out modules never enter training.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.pretraining.conversation import Conversation, render
from training.pretraining.lessons import lesson
from training.pretraining.questions import ask
from training.pretraining.sources import Fact, is_held_out

LESSON_SHARE = 0.35
PROMPT_WEIGHT = 0.25  # of a token the user wrote, in the loss; the model's own tokens weigh 1

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Rows:
    """Packed documents: `tokens` uint16 [R, L] (padded), `weights` float32 [R, L] (loss weight of each token as a
    target: 0 on padding and on the first token of a document)."""

    tokens: NDArray[np.uint16]
    weights: NDArray[np.float32]


def conversations(facts: Iterable[Fact], seed: int, *, held_out: bool = False) -> Iterator[Conversation]:
    """Endless. With `held_out`, only facts of held-out modules and no lessons."""
    pool = [fact for fact in facts if is_held_out(fact.module) == held_out]
    rng = random.Random(f"corpus {seed} {held_out}")
    while True:
        if not held_out and rng.random() < LESSON_SHARE:
            yield lesson(rng)
        elif (conversation := ask(rng.choice(pool), rng)) is not None:
            yield conversation


def tokenizer_texts(facts: Iterable[Fact], seed: int, count: int) -> Iterator[str]:
    """What the tokenizer learns from: the text of `count` training conversations without their markers."""
    for conversation in itertools.islice(conversations(facts, seed), count):
        yield from ("user", "assistant", "system", conversation.system, conversation.reasoning)
        for turn in conversation.turns:
            yield from (turn.question, turn.answer)


def encode_document(conversation: Conversation, encode: Encode) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of one rendered conversation."""
    ids: list[int] = []
    weights: list[float] = []
    for text, own in render(conversation):
        piece = encode(text)
        ids += piece
        weights += [1.0 if own else PROMPT_WEIGHT] * len(piece)
    weights[0] = 0.0
    return ids, weights


def pack(
    documents: Iterable[tuple[list[int], list[float]]], length: int, rows: int, pad: int, open_rows: int = 16
) -> Rows:
    """Place whole documents into `rows` rows of `length` tokens, each into the fullest open row that still has room.

    Documents longer than a row are skipped. Stops when `rows` rows are closed; raises ValueError when the documents
    run out first.
    """
    tokens = np.full((rows, length), pad, np.uint16)
    weights = np.zeros((rows, length), np.float32)
    bins: list[tuple[list[int], list[float]]] = []
    closed = 0
    for ids, marks in documents:
        if len(ids) > length:
            continue
        fitting = [b for b in bins if len(b[0]) + len(ids) <= length]
        if fitting:
            chosen = max(fitting, key=lambda b: len(b[0]))
            chosen[0].extend(ids)
            chosen[1].extend(marks)
        else:
            bins.append((list(ids), list(marks)))
        if len(bins) > open_rows:
            fullest = max(range(len(bins)), key=lambda i: len(bins[i][0]))
            row_ids, row_marks = bins.pop(fullest)
            tokens[closed, : len(row_ids)], weights[closed, : len(row_marks)] = row_ids, row_marks
            closed += 1
            if closed == rows:
                return Rows(tokens, weights)
    raise ValueError(f"the documents fill only {closed} of {rows} rows")
