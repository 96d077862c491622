"""Drafters of the self-test alone: one with hidden states it should not have, one that knows the answers.

No server offers them, and nothing but `backend.selftest` needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from backend.drafters.protocol import Choose, Proposal
from backend.drafters.recursive import RecursiveDrafter, RecursiveState
from backend.engine.memory import Memory


class PreNormDrafter:
    """The MTP drafter fed with what enters the trunk's final norm instead of what leaves it; for sequences alone."""

    name = "mtp pre-norm"

    def __init__(self, drafter: RecursiveDrafter, memory: Memory) -> None:
        """`drafter` is attached to `memory`."""
        self._drafter, self._memory = drafter, memory
        self._rows: Tensor  # [1, R, H] of the trunk's last forward
        self.fingerprint, self.block = drafter.fingerprint, drafter.block
        drafter.model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rows = inputs[0]

    def attach(self, memory: Memory) -> None:
        raise RuntimeError("its drafter is attached already")

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> RecursiveState:
        return self._drafter.new_state(prompt, pages)

    def resume(self, state: RecursiveState, boundary: int, known: bool) -> None:
        raise RuntimeError("the prefix cache keeps no pre-norm rows")

    def prefill(self, state: RecursiveState, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        # The next chunk's first row reads this one's last from there.
        self._memory.hidden[self._memory.places(state.pages, start, valid)] = self._rows[0, :valid]
        self._drafter.prefill(state, tokens, self._rows, start, valid)
        self._rows = self._rows[:, valid - 1 : valid]  # the row that the first generated token follows

    def observe(self, state: RecursiveState, tokens: Sequence[int], hidden: Tensor) -> None:
        self._drafter.observe(state, tokens, self._rows[0, : len(tokens)])

    def propose(self, states: Sequence[RecursiveState], counts: Sequence[int], choose: Choose) -> Proposal:
        return self._drafter.propose(states, counts, choose)


class Rehearsal:
    """Proposes answers known beforehand, some tokens wrong on purpose, so that whatever the model every number of
    accepted drafts occurs. A sequence's state is what is still to come of its answer.
    """

    name, fingerprint, block = "known answers", "rehearsal", None

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """The tokens that follow each prompt."""
        self._answers = answers

    def attach(self, memory: Memory) -> None:
        pass

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> list[int]:
        return list(self._answers[tuple(prompt)])

    def resume(self, state: list[int], boundary: int, known: bool) -> None:
        pass

    def prefill(self, state: list[int], tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        pass

    def observe(self, state: list[int], tokens: Sequence[int], hidden: Tensor) -> None:
        del state[: len(tokens)]

    def propose(self, states: Sequence[list[int]], counts: Sequence[int], choose: Choose) -> Proposal:
        drafts = [self._draft(state, count) for state, count in zip(states, counts, strict=True)]
        rows = [[*draft, *[0] * (max(counts) - len(draft))] for draft in drafts]
        return Proposal(torch.tensor(rows), [len(draft) for draft in drafts])

    def _draft(self, state: list[int], count: int) -> list[int]:
        left = range(len(state), 0, -1)
        # Gaps of 4, 3, 2, 1 between wrong tokens: blocks meet their first one in every slot, and meet none.
        return [abs(t - 1) if n % 10 in (0, 1, 3, 6) else t for t, n in zip(state[:count], left, strict=False)]
