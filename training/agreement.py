"""Captured logprobs against those of the forced pass: equal bit for bit under one build, else a counted difference.

What the gate of extraction is. Knows documents and their scalars; knows no model and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from training.data import Forced
from training.errors import TrainingError

Reason = Literal["same_build", "other_build", "unknown_build", "no_logprobs"]
REASONS: tuple[Reason, ...] = ("same_build", "other_build", "unknown_build", "no_logprobs")


@dataclass(frozen=True)
class Agreement:
    """Over the answers of some documents: how far captured and forced logprobs are apart, in nats.

    `greedy_tokens` of them were chosen at temperature 0, `greedy_agreeing` of those are the forced pass's argmax too.
    """

    documents: int = 0
    tokens: int = 0
    differing: int = 0
    largest: float = 0.0
    summed: float = 0.0
    greedy_tokens: int = 0
    greedy_agreeing: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.differing + other.differing,
            max(self.largest, other.largest),
            self.summed + other.summed,
            self.greedy_tokens + other.greedy_tokens,
            self.greedy_agreeing + other.greedy_agreeing,
        )

    @property
    def mean(self) -> float | None:
        """None where nothing was compared."""
        return self.summed / self.tokens if self.tokens else None


def compare(forced: Forced, build: str) -> tuple[Reason, Agreement]:
    """A document forced by the weights that generated it, with scalars, under `build`.

    Raises TrainingError where it was generated under the same build and a logprob differs in a bit.
    """
    document, scalars = forced.document, forced.scalars
    if scalars is None:
        raise ValueError(f"document {document.id} was forced without scalars")
    captured = document.logprobs[document.prompt_length :]
    answer = slice(document.prompt_length - 1, len(document.tokens) - 1)
    found = scalars.chosen_logprob[answer].cpu().numpy()
    if np.isnan(captured).any():
        return "no_logprobs", Agreement(documents=1)
    unlike = np.flatnonzero(captured.view(np.uint32) != found.view(np.uint32))
    if document.build == build and len(unlike):
        at = int(unlike[0])
        raise TrainingError(
            f"document {document.id} cannot be what this model said under this build: its token {at} of "
            f"{len(captured)} was captured with logprob {captured[at]!s} and is forced with {found[at]!s}, and "
            f"{len(unlike)} differ in all"
        )
    apart = np.abs(captured.astype(np.float64) - found)
    agreement = Agreement(
        documents=1,
        tokens=len(captured),
        differing=len(unlike),
        largest=float(apart.max(initial=0.0)),
        summed=float(apart.sum()),
    )
    if document.sampling is not None and document.sampling.get("temperature") == 0:
        said = document.tokens[document.prompt_length :]
        agreeing = int((scalars.argmax[answer].cpu().numpy() == said).sum())
        agreement = replace(agreement, greedy_tokens=len(said), greedy_agreeing=agreeing)
    if document.build is None:
        return "unknown_build", agreement
    return ("same_build" if document.build == build else "other_build"), agreement
