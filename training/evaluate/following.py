"""Finished documents as running sequences of one drafter: what the engine tells a drafter, without the engine.

The trunk's hidden states come with the documents; only the drafter computes. Knows no acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backend.drafters.protocol import Choose, Drafter
from backend.engine.cache import pages_for
from backend.engine.forms import GRID
from backend.engine.memory import Memory
from backend.engine.parameters import PENALTIES
from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from backend.models.qwen3_5 import Qwen35
from backend.ops.delta_replay import MAX_ROWS
from training.data import Document, Forced
from training.errors import TrainingError

_MOST_PAGES = 256  # held by a batch, unless one document alone needs more


@dataclass(eq=False)
class Row:
    """One document in a batch. `done`: positions committed; the token at position `done` is the next one."""

    document: Document
    tokens: list[int]
    hidden: Tensor  # [T, H]
    sampler: Sampler
    state: Any
    done: int

    @property
    def left(self) -> int:
        """Tokens that have not been committed."""
        return len(self.tokens) - self.done


class Following:
    """A batch of documents that one drafter follows; each has its first generated token, where it has any.

    Attaches the drafter to a memory that holds what drafters need and nothing of the trunk's: whatever states the
    drafter had before are gone. Call under `torch.inference_mode()`.
    """

    def __init__(self, model: Qwen35, drafter: Drafter, documents: Sequence[Forced], vocab: int) -> None:
        """`vocab`: ids that may be chosen."""
        weight = model.model.embed_tokens.weight
        self._drafter, self._device, self._dtype = drafter, weight.device, weight.dtype
        pages = sum(_pages(forced) for forced in documents)
        config = replace(model.config, layer_types=())
        self._memory = Memory(config, pages, 0, self._device, self._dtype)
        drafter.attach(self._memory)
        self.rows = [self._begin(forced, vocab) for forced in documents]

    def commit(self, row: Row, count: int) -> None:
        """The document's next `count` tokens have been said."""
        end = row.done + count
        while row.done < end:  # no more at a time than a step of serving has
            start, row.done = row.done, min(row.done + MAX_ROWS, end)
            tokens = row.tokens[start : row.done]
            for token in tokens:
                row.sampler.accept(token)
            self._drafter.observe(row.state, tokens, row.hidden[start - 1 : row.done - 1])

    def propose(self, rows: Sequence[Row], counts: Sequence[int], choose: Choose | None = None) -> list[list[int]]:
        """Drafts after each row's committed tokens, counts[i] at most and none where it is not above 0.

        `choose`: instead of the rows' own samplers; it sees the rows whose count is above 0.
        """
        asked = [i for i, count in enumerate(counts) if count > 0]
        found: list[list[int]] = [[] for _ in rows]
        if not asked:
            return found
        some = [rows[i] for i in asked]
        samplers = SamplerBatch([row.sampler for row in some], [row.done for row in some])
        proposal = self._drafter.propose(
            [row.state for row in some], [counts[i] for i in asked], choose or samplers.draft
        )
        for i, count, drafts in zip(asked, proposal.counts, proposal.tokens.tolist(), strict=True):
            found[i] = drafts[:count]
        return found

    def _begin(self, forced: Forced, vocab: int) -> Row:
        document = forced.document
        tokens = document.tokens.tolist()
        hidden = torch.as_tensor(forced.hidden).to(self._device, self._dtype)
        prompt = tuple(tokens[: document.prompt_length])
        pages: list[int] = []
        for _ in range(_pages(forced)):
            self._memory.take(pages)
        state = self._drafter.new_state(prompt, pages)
        self._memory.hidden[self._memory.places(pages, 0, len(prompt))] = hidden[: len(prompt)]
        for start in range(0, len(prompt), GRID):
            valid = min(GRID, len(prompt) - start)
            chunk = torch.tensor([[*prompt[start : start + valid], *[0] * (GRID - valid)]], device=self._device)
            rows = torch.nn.functional.pad(hidden[start : start + valid], (0, 0, 0, GRID - valid))[None]
            self._drafter.prefill(state, chunk, rows, start, valid)
        row = Row(document, tokens, hidden, Sampler(sampling_of(document), vocab, prompt), state, len(prompt))
        if row.left:
            self.commit(row, 1)
        return row


def batches(documents: Sequence[Forced], together: int) -> Iterator[list[int]]:
    """Indices of documents to follow at once, those of like length together."""
    batch: list[int] = []
    pages = 0
    for i in sorted(range(len(documents)), key=lambda i: len(documents[i].document.tokens)):
        needed = _pages(documents[i])
        if batch and (len(batch) == together or pages + needed > _MOST_PAGES):
            yield batch
            batch, pages = [], 0
        batch.append(i)
        pages += needed
    if batch:
        yield batch


def sampling_of(document: Document) -> SamplingParams:
    """How a document was sampled, what it does not state left out; greedily where it states nothing.

    Raises TrainingError where it states what no request can have asked for.
    """
    if document.sampling is None:
        return SamplingParams(temperature=0.0)
    stated = document.sampling
    plain = ("temperature", "top_p", "top_k", "min_p", "choice", "min_tokens", *PENALTIES)
    try:
        for name in (*plain, "max_tokens"):
            if not isinstance(stated.get(name, 0), int | float | None):
                raise ValueError(f"{name} is no number")
        return SamplingParams(
            **{name: stated[name] for name in plain if name in stated},
            seed=document.seed or 0,
            logit_bias=tuple(sorted((int(token), float(bias)) for token, bias in stated.get("logit_bias", {}).items())),
            bad_words=tuple(tuple(ids) for ids in stated.get("bad_words", ())),
            stop_token_ids=frozenset(stated.get("stop_token_ids", ())),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"document {document.id} cannot have been sampled as it states: {error}") from error


def _pages(forced: Forced) -> int:
    return pages_for(len(forced.document.tokens) + MAX_ROWS)
