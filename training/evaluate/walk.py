"""Drafts along finished documents exactly as a server makes them at a fixed K, counted as it counts them (DESIGN §6).

Draft K, accept L, go on L + 1 tokens later. The target's tokens are the document's: the trunk is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from backend.drafters.protocol import Drafter
from backend.models.qwen3_5 import Qwen35
from training.data import Document, Forced
from training.evaluate.following import Following, Row, batches


@dataclass(frozen=True)
class DocumentCounts:
    """Verify steps of one document; per slot, in how many it was proposed, in how many of these all slots before it
    were right, and in how many it was accepted.

    `steps` counts those without drafts too (the last token of a budget); the server's `num_drafts` is `proposed[0]`.
    """

    id: str
    steps: int
    proposed: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]


@torch.inference_mode()
def walk(
    model: Qwen35,
    drafter: Drafter,
    documents: Sequence[Forced],
    slots: int,
    *,
    vocab: int | None = None,
    together: int = 32,
    report: Callable[[int], None] = lambda done: None,
) -> list[DocumentCounts]:
    """The counts of each document, in order. Attaches the drafter to a memory of its own.

    `vocab`: ids that may be chosen, all rows of the head where it is None; `together`: documents drafted for at once,
    which changes no count. A document that does not say how many tokens it was allowed was allowed those it has.
    `report` hears how many documents are done.
    """
    found: dict[int, DocumentCounts] = {}
    for batch in batches(documents, together):
        following = Following(model, drafter, [documents[i] for i in batch], vocab or model.config.vocab_size)
        tallies = [_Tally(row, slots) for row in following.rows]
        while active := [tally for tally in tallies if tally.row.left]:
            limits = [min(slots, tally.remaining - 1) for tally in active]
            drafts = following.propose([tally.row for tally in active], limits)
            for tally, drafted in zip(active, drafts, strict=True):
                following.commit(tally.row, tally.step(drafted))
        found |= {i: tally.counts for i, tally in zip(batch, tallies, strict=True)}
        report(len(found))
    return [found[i] for i in range(len(documents))]


class _Tally:
    """The counts of one document while it is walked."""

    def __init__(self, row: Row, slots: int) -> None:
        self.row = row
        self._end = row.document.prompt_length + allowed(row.document)
        self._steps = 0
        self._proposed, self._reached, self._accepted = [0] * slots, [0] * slots, [0] * slots

    @property
    def remaining(self) -> int:
        return self._end - self.row.done

    def step(self, drafts: Sequence[int]) -> int:
        """Count a verify step of these drafts; how many tokens it emits."""
        row = self.row
        accepted = 0
        while accepted < min(len(drafts), row.left) and drafts[accepted] == row.tokens[row.done + accepted]:
            accepted += 1
        emitted = min(accepted + 1, row.left)
        # Slots past the token that ended the document were neither proposed nor accepted; rejected ones were.
        proposed = min(len(drafts), emitted) if emitted == row.left else len(drafts)
        self._steps += 1
        for slot in range(proposed):
            self._proposed[slot] += 1
            self._reached[slot] += slot <= accepted
            self._accepted[slot] += slot < accepted
        return emitted

    @property
    def counts(self) -> DocumentCounts:
        counts = (tuple(each) for each in (self._proposed, self._reached, self._accepted))
        return DocumentCounts(self.row.document.id, self._steps, *counts)


def allowed(document: Document) -> int:
    """The most tokens its answer could have had: its max_tokens, or as many as it has where none is known."""
    generated = len(document.tokens) - document.prompt_length
    limit = (document.sampling or {}).get("max_tokens")
    return generated if limit is None else max(int(limit), generated)
