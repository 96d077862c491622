"""A draft block as drafter, recursive over any number of slots: the checkpoint's MTP head, cut or whole, or a student.

Row p is (embedding of x_p, H_{p-1}) at position p and predicts x_{p+1}; rows start at 1. Rows of committed tokens
come from the trunk's hidden states; rows of a draft are provisional and overwritten once the verify has the true ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backend.drafters.protocol import Choose, Proposal
from backend.engine.cache import KeyValuePages
from backend.engine.forms import GRID, AttentionForm, PagedRows
from backend.engine.memory import Memory
from backend.models.draft_block import DraftBlock
from backend.models.layers import prepare
from backend.models.qwen3_5 import Qwen35

_MAX_WAITING = 32  # committed rows kept for the next proposal before they are written without one


@dataclass
class RecursiveState:
    """A sequence's rows: 1 … position - 1 are in its pages, the waiting ones are yet to be run."""

    prompt: Sequence[int]
    pages: list[int]
    position: int = 0  # of the first waiting row
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # [n, H] each


class RecursiveDrafter:
    """See `backend.drafters.protocol.Drafter`."""

    def __init__(
        self,
        model: Qwen35,
        draft_block: DraftBlock,
        name: str,
        fingerprint: str,
        rows: str,
        evaluation: Mapping[str, Any] | None = None,
    ) -> None:
        """`rows`: the fingerprint of what the block keeps in the sequences' pages, which several drafters may share.
        `evaluation`: what its maker has found it to be worth, JSON-ready."""
        for module in draft_block.own:
            prepare(module)
        self.name, self.fingerprint, self.block = name, fingerprint, rows
        self.model, self.draft_block, self.evaluation = model, draft_block, evaluation
        self.weight = model.model.embed_tokens.weight
        self._vocab = model.config.vocab_size
        self._ids = None if draft_block.ids is None else draft_block.ids.to(self.weight.device, torch.int64)

    def attach(self, memory: Memory) -> None:
        self._memory = memory
        self._cache: KeyValuePages = memory.block(self.block, self.draft_block.kv_heads, self.draft_block.head_dim)

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> RecursiveState:
        return RecursiveState(prompt, pages)

    def resume(self, state: RecursiveState, boundary: int, known: bool) -> None:
        state.position = boundary
        for start in range(0, 0 if known else boundary, GRID):
            tokens = torch.tensor([state.prompt[start : start + GRID]], device=self.weight.device)
            self._run([state], tokens, self._before(state, start, GRID), [start], [GRID])

    def prefill(self, state: RecursiveState, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        previous = torch.cat((self._before(state, start, 1), hidden[:, :-1]), dim=1)
        self._run([state], tokens, previous, [start], [valid])
        state.position = start + valid

    def observe(self, state: RecursiveState, tokens: Sequence[int], hidden: Tensor) -> None:
        if len(state.tokens) + len(tokens) > _MAX_WAITING:
            self._catch_up([state])  # but for these: the next proposal continues from the last row
        state.tokens += tokens
        state.hidden.append(hidden)

    def propose(self, states: Sequence[RecursiveState], counts: Sequence[int], choose: Choose) -> Proposal:
        rows = self._catch_up(states)  # [B, w]
        drafts: list[Tensor] = []
        while True:
            scored, carried = self.draft_block.readout(rows)
            drafts.append(choose(self._logits(scored)))
            if len(drafts) == max(counts):
                return Proposal(torch.stack(drafts, dim=1), counts)
            starts = [state.position + len(drafts) - 1 for state in states]
            rows = self._run(states, drafts[-1][:, None], carried[:, None], starts, [1] * len(states))[:, 0]

    def _logits(self, rows: Tensor) -> Tensor:
        """[B, w] → float32 [B, V], so that one sampler, with noise by full-vocabulary id, serves target and drafter."""
        logits = self.draft_block.logits(rows)
        return logits if self._ids is None else spread(logits, self._ids, self._vocab)

    def _before(self, state: RecursiveState, start: int, count: int) -> Tensor:
        """H one position before each of the prompt rows start … start + count - 1, [1, count, H].

        Zeros before row 0, which nothing reads.
        """
        skip = int(start == 0)
        known = self._memory.hidden[self._memory.places(state.pages, start - 1 + skip, count - skip)]
        return torch.nn.functional.pad(known, (0, 0, skip, 0))[None]

    def _catch_up(self, states: Sequence[RecursiveState]) -> Tensor:
        """Run the waiting committed rows, over whatever provisional rows stood in their places.

        Returns the last row of each sequence, [B, w].
        """
        counts = [len(state.tokens) for state in states]
        rows = max(counts)
        tokens = torch.tensor([[*state.tokens, *[0] * (rows - len(state.tokens))] for state in states])
        hidden = torch.stack([_stacked(state.hidden, rows) for state in states])  # [B, R, H]
        starts = [state.position for state in states]
        out = self._run(states, tokens.to(self.weight.device), hidden, starts, counts)
        for state, count in zip(states, counts, strict=True):
            state.position += count
            state.tokens, state.hidden = [], []
        if rows == 1:
            return out[:, 0]
        last = torch.tensor(counts, device=out.device) - 1
        return out[torch.arange(len(states), device=out.device), last]

    def _run(
        self,
        states: Sequence[RecursiveState],
        tokens: Tensor,
        hidden: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Tensor:
        """tokens int64 [B, R], hidden [B, R, H] of rows starts[i] …, of which counts[i] exist → [B, R, w]."""
        tables, block = [state.pages for state in states], self.draft_block
        groups = block.heads // block.kv_heads
        rows = PagedRows(groups, tables, starts, counts, tokens.shape[1], hidden.device, hidden.dtype, first_key=1)
        return block(self.model.embed(tokens), hidden, AttentionForm(rows, self._cache))


def spread(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits of the listed ids at their places in the full vocabulary, -inf elsewhere: [B, S], int64 [S] → [B, V]."""
    full = logits.new_full((logits.shape[0], vocab_size), -torch.inf)
    return full.index_copy_(1, ids, logits)


def _stacked(parts: Sequence[Tensor], rows: int) -> Tensor:
    """Hidden states one after the other, zero-padded: [rows, H]."""
    hidden = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    return torch.nn.functional.pad(hidden, (0, 0, 0, rows - len(hidden)))
