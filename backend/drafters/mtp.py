"""The checkpoint's own MTP head as drafter, recursive over any number of slots.

Row p is (embedding of x_p, H_{p-1}) at position p and predicts x_{p+1}; rows start at 1. Rows of committed tokens
come from the trunk's hidden states; rows of a draft are provisional and overwritten once the verify has the true ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.drafters.protocol import Choose
from backend.engine.cache import KeyValueCache
from backend.engine.forms import AttentionForm
from backend.models.mtp import MTPBlock
from backend.models.qwen3_5 import Qwen35

_MAX_WAITING = 32  # committed rows kept for the next proposal before they are written without one


class MTPState:
    """Keys and values of rows 1 … position - 1, and the committed rows not yet run."""

    def __init__(self, cache: KeyValueCache, hidden: Tensor) -> None:
        self.cache = cache
        self.carry = hidden  # H of the last prompt row so far, [1, 1, H]
        self.position = 0  # of the first waiting row
        self.tokens: list[int] = []
        self.hidden: list[Tensor] = []


class MTPDrafter:
    """See `backend.drafters.protocol.Drafter`."""

    name = "mtp"

    def __init__(self, model: Qwen35, fingerprint: str) -> None:
        if model.mtp is None:
            raise ValueError("the model was loaded without its MTP block")
        self.model = model
        self.mtp: MTPBlock = model.mtp
        self.fingerprint = fingerprint
        self.weight = model.model.embed_tokens.weight

    def new_state(self) -> MTPState:
        config = self.model.config
        cache = KeyValueCache(config.num_key_value_heads, config.head_dim, self.weight.device, self.weight.dtype)
        return MTPState(cache, self.weight.new_zeros(1, 1, config.hidden_size))

    def prefill(self, state: MTPState, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        previous = torch.cat((state.carry, hidden[:, :-1]), dim=1)
        self._run(state, tokens, previous, start, valid)
        state.carry = hidden[:, valid - 1 : valid].clone()
        state.position = start + valid

    def observe(self, state: MTPState, tokens: Sequence[int], hidden: Tensor) -> None:
        state.tokens += tokens
        state.hidden.append(hidden)
        if len(state.tokens) > _MAX_WAITING:
            self._catch_up(state)

    def propose(self, state: MTPState, count: int, choose: Choose) -> list[int]:
        hidden = self._catch_up(state)[:, -1:]
        drafts: list[int] = []
        position = state.position  # of the token being drafted
        while True:
            logits = self.model.logits(hidden)[0, 0]
            drafts.append(choose(logits, position))
            if len(drafts) == count:
                return drafts
            tokens = torch.tensor([[drafts[-1]]], device=hidden.device)
            hidden = self._run(state, tokens, hidden, position, 1)
            position += 1

    def _catch_up(self, state: MTPState) -> Tensor:
        """Run the waiting committed rows, over whatever provisional rows stood in their places."""
        tokens = torch.tensor([state.tokens], device=self.weight.device)
        out = self._run(state, tokens, torch.cat(state.hidden, dim=1), state.position, len(state.tokens))
        state.position += len(state.tokens)
        state.tokens, state.hidden = [], []
        return out

    def _run(self, state: MTPState, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> Tensor:
        form = AttentionForm({0: state.cache}, start, tokens.shape[1], valid, first_key=1)
        out: Tensor = self.mtp(self.model.embed(tokens), hidden, form)
        return out
