"""The checkpoint's own MTP head as drafter, recursive over any number of slots.

Row p is (embedding of x_p, H_{p-1}) at position p and predicts x_{p+1}; rows start at 1. Rows of committed tokens
come from the trunk's hidden states; rows of a draft are provisional and overwritten once the verify has the true ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.drafters.protocol import Choose, Proposal
from backend.engine.cache import KeyValuePages
from backend.engine.forms import GRID, AttentionForm, PagedRows
from backend.engine.memory import Memory
from backend.models.mtp import MTPBlock
from backend.models.qwen3_5 import Qwen35

_MAX_WAITING = 32  # committed rows kept for the next proposal before they are written without one


@dataclass
class MTPState:
    """A sequence's rows: 1 … position - 1 are in its pages, the waiting ones are yet to be run."""

    prompt: Sequence[int]
    pages: list[int]
    position: int = 0  # of the first waiting row
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # [n, H] each


class MTPDrafter:
    """See `backend.drafters.protocol.Drafter`. `head`: hidden [B, H] → logits float32 [B, V], else the model's own."""

    def __init__(
        self,
        model: Qwen35,
        block: str,
        head: Callable[[Tensor], Tensor] | None = None,
        name: str = "mtp",
        fingerprint: str | None = None,
    ) -> None:
        if model.mtp is None:
            raise ValueError("the model was loaded without its MTP block")
        self.name, self.block, self.fingerprint = name, block, fingerprint or block
        self.model = model
        self.mtp: MTPBlock = model.mtp
        self.weight = model.model.embed_tokens.weight
        self._head = head or model.logits

    def attach(self, memory: Memory) -> None:
        self._memory = memory
        self._cache: KeyValuePages = memory.block(self.block)

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> MTPState:
        return MTPState(prompt, pages)

    def resume(self, state: MTPState, boundary: int, known: bool) -> None:
        state.position = boundary
        for start in range(0, 0 if known else boundary, GRID):
            tokens = torch.tensor([state.prompt[start : start + GRID]], device=self.weight.device)
            self._run([state], tokens, self._before(state, start, GRID), [start], [GRID])

    def prefill(self, state: MTPState, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        previous = torch.cat((self._before(state, start, 1), hidden[:, :-1]), dim=1)
        self._run([state], tokens, previous, [start], [valid])
        state.position = start + valid

    def observe(self, state: MTPState, tokens: Sequence[int], hidden: Tensor) -> None:
        if len(state.tokens) + len(tokens) > _MAX_WAITING:
            self._catch_up([state])  # but for these: the next proposal continues from the last row
        state.tokens += tokens
        state.hidden.append(hidden)

    def propose(self, states: Sequence[MTPState], counts: Sequence[int], choose: Choose) -> Proposal:
        hidden = self._catch_up(states)  # [B, H]
        drafts: list[Tensor] = []
        while True:
            drafts.append(choose(self._head(hidden)))
            if len(drafts) == max(counts):
                return Proposal(torch.stack(drafts, dim=1), counts)
            starts = [state.position + len(drafts) - 1 for state in states]
            hidden = self._run(states, drafts[-1][:, None], hidden[:, None], starts, [1] * len(states))[:, 0]

    def _before(self, state: MTPState, start: int, count: int) -> Tensor:
        """H one position before each of the prompt rows start … start + count - 1, [1, count, H].

        Zeros before row 0, which nothing reads.
        """
        skip = int(start == 0)
        known = self._memory.hidden[self._memory.places(state.pages, start - 1 + skip, count - skip)]
        return torch.nn.functional.pad(known, (0, 0, skip, 0))[None]

    def _catch_up(self, states: Sequence[MTPState]) -> Tensor:
        """Run the waiting committed rows, over whatever provisional rows stood in their places; the last of each."""
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
        self, states: Sequence[MTPState], tokens: Tensor, hidden: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """tokens int64 [B, R], hidden [B, R, H] of rows starts[i] …, of which counts[i] exist → [B, R, H]."""
        tables = [state.pages for state in states]
        rows = PagedRows(
            self.model.config, tables, starts, counts, tokens.shape[1], hidden.device, hidden.dtype, first_key=1
        )
        out: Tensor = self.mtp(self.model.embed(tokens), hidden, AttentionForm(rows, self._cache))
        return out


def _stacked(parts: Sequence[Tensor], rows: int) -> Tensor:
    """Hidden states one after the other, zero-padded: [rows, H]."""
    hidden = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    return torch.nn.functional.pad(hidden, (0, 0, 0, rows - len(hidden)))
