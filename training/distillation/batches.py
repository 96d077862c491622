"""Whole documents, long ones in windows, as batches in an order that is a function of the seed alone.

An anchor is a base row p from which serving could draft: the first generated token to the last but one. Every anchor
stands in exactly one window, with what it may look at before it and its slots' tokens after it. Knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Forced
from training.target_files import Chain, StoredTargets

_LOOK_BACK = 4  # a window's first 1/4 is context of its anchors
_POOL = 16  # batches' worth of windows sorted by length at a time


@dataclass(frozen=True)
class Window:
    """Tokens start … stop - 1 of a document, and its anchors first … last - 1, all as positions in the document."""

    document: int
    start: int
    stop: int
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Windows side by side, padded on the right. Row r stands for base position r + 1 of its window."""

    tokens: Tensor  # int64 [B, L]
    hidden: Tensor  # [B, L, H]
    log_z: Tensor | None  # float32 [B, L]: of the trunk's logits at each position
    anchors: Tensor  # bool [B, L - 1]
    lengths: Tensor  # int64 [B]
    chain: Chain | None = None  # precomputed, of the anchors row by row
    noise: Tensor | None = None  # [B, L, H], to what the student is given of `hidden` and no teacher is

    @property
    def given(self) -> Tensor:
        """The hidden states as the student gets them, [B, L, H]."""
        return self.hidden if self.noise is None else self.hidden + self.noise

    def supervised(self, slot: int) -> Tensor:
        """bool [B, L - 1]: the anchors whose slot predicts a token that the window holds."""
        rows = torch.arange(self.anchors.shape[1], device=self.anchors.device)
        return self.anchors & (rows + 2 + slot < self.lengths[:, None])

    def ahead(self, values: Tensor, by: int) -> Tensor:
        """Of values [B, L, …] those `by` positions after each base row, [B, L - 1, …]: zeros past the end."""
        return F.pad(values[:, 1 + by :], (*(0, 0) * (values.dim() - 2), 0, by))


def windows(document: int, prompt: int, length: int, longest: int, slots: int) -> list[Window]:
    """A document's windows of at most `longest` tokens; none where it has no anchor."""
    found: list[Window] = []
    first, end = max(prompt, 1), length - 1
    while first < end:
        start = max(0, first - longest // _LOOK_BACK) if length > longest else 0
        last = end if length - start <= longest else max(start + longest - slots, first + 1)
        last = min(last, end)
        found.append(Window(document, start, min(last + slots, length), first, last))
        first = last
    return found


def epoch(lengths: Sequence[int], tokens: int, seed: int, number: int) -> list[list[int]]:
    """One pass over windows of these lengths in random order: their indices by batch, about `tokens` each, padded.

    Windows of like length stand together, so that little is padding.
    """
    rng = random.Random(f"{seed} {number}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    mean = sum(lengths) / max(len(lengths), 1)
    pool = max(1, int(_POOL * tokens / max(mean, 1)))
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        group: list[int] = []
        for index in sorted(order[start : start + pool], key=lambda i: lengths[i]):  # the order is stable
            if group and lengths[index] * (len(group) + 1) > tokens:
                batches.append(group)
                group = []
            group.append(index)
        batches.append(group)
    rng.shuffle(batches)
    return batches


def stream(lengths: Sequence[int], tokens: int, seed: int, skip: int) -> Iterator[list[int]]:
    """The batches of epoch after epoch, without end, but for the first `skip`."""
    number = 0
    while True:
        batches = epoch(lengths, tokens, seed, number)
        yield from batches[skip:]
        skip = max(0, skip - len(batches))
        number += 1


def collate(
    chosen: Sequence[Window],
    documents: Sequence[Forced],
    device: torch.device,
    dtype: torch.dtype,
    targets: Sequence[StoredTargets] | None = None,
) -> Batch:
    """Cut the windows out of their documents. The scalars are taken where every document has them.

    `targets`: those of each document, where the batch is to have its chain.
    """
    width = max(window.length for window in chosen)
    parts = [documents[window.document] for window in chosen]
    states = [part.hidden[window.start : window.stop] for window, part in zip(chosen, parts, strict=True)]
    tokens = torch.zeros(len(chosen), width, dtype=torch.int64)
    anchors = torch.zeros(len(chosen), width - 1, dtype=torch.bool)
    hidden = states[0].new_zeros(len(chosen), width, states[0].shape[1])
    scored = all(part.scalars is not None for part in parts)
    log_z = torch.zeros(len(chosen), width) if scored else None
    for row, (window, part) in enumerate(zip(chosen, parts, strict=True)):
        span, length = slice(window.start, window.stop), window.length
        tokens[row, :length] = torch.from_numpy(part.document.tokens[span].astype("int64"))
        hidden[row, :length] = states[row]
        anchors[row, window.first - window.start - 1 : window.last - window.start - 1] = True
        if log_z is not None and part.scalars is not None:
            log_z[row, :length] = part.scalars.log_z[span]
    cut = [(window, documents[window.document].document.prompt_length) for window in chosen]
    chain = targets and Chain.joined(
        [targets[window.document].rows(window.first - prompt, window.last - prompt) for window, prompt in cut]
    )
    return Batch(
        tokens.to(device),
        hidden.to(device, dtype),
        None if log_z is None else log_z.to(device),
        anchors.to(device),
        torch.tensor([window.length for window in chosen], device=device),
        chain.to(device) if chain else None,
    )


def drawn_noise(batch: Batch, amount: float, seeds: Sequence[int]) -> Tensor:
    """Gaussian, `amount` times the root mean square of each window's hidden states, [B, L, H]; zeros on padding."""
    noise = torch.zeros_like(batch.hidden)
    for row, (seed, length) in enumerate(zip(seeds, batch.lengths.tolist(), strict=True)):
        hidden = batch.hidden[row, :length]
        drawn = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed)).to(hidden)
        noise[row, :length] = drawn * (amount * hidden.float().square().mean().sqrt()).to(hidden.dtype)
    return noise
