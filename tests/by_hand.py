"""Sequences driven through the runner by hand, without sampler or scheduler: blocks of given tokens, some kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backend.drafters.protocol import Drafter
from backend.engine.cache import pages_for
from backend.engine.forms import GRID
from backend.engine.memory import Place
from backend.engine.runner import Runner

ROOM = 400  # positions after a prompt


class ByHand:
    """Sequences in slots 0, 1, …, their prompts run; `lasts[i]` [1, H] is the hidden state of prompt i's last row."""

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None) -> None:
        self.runner = runner
        self.memory = runner.new_memory(max(map(len, prompts)) + ROOM, len(prompts))
        self.places: list[Place] = []
        self.states: list[Any] = []  # the drafter's
        self.lasts: list[Tensor] = []
        self.starts = [len(prompt) for prompt in prompts]  # of each sequence's next row
        if drafter:
            drafter.attach(self.memory)
        for prompt in prompts:
            self._join(prompt, drafter)

    def _join(self, prompt: Sequence[int], drafter: Drafter | None) -> None:
        place = Place(len(prompt))
        for _ in range(pages_for(len(prompt) + ROOM)):
            self.memory.take(place.pages)
        if drafter:
            self.states.append(drafter.new_state(prompt, place.pages))
        for start in range(0, len(prompt), GRID):
            chunk = prompt[start : start + GRID]
            tokens, hidden = self.runner.prefill_chunk(self.memory, place, chunk, start)
            if drafter:
                drafter.prefill(self.states[-1], tokens, hidden, start, len(chunk))
        assert place.state is not None
        place.slot = len(self.places)
        self.memory.slots.join(place.slot, place.state)
        self.places.append(place)
        self.lasts.append(hidden[0, len(chunk) - 1 : len(chunk)])

    def verify(self, blocks: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Logits [R, V] and hidden states [R, H] of each sequence's block, all blocks in one forward."""
        rows, counts = max(map(len, blocks)), [len(block) for block in blocks]
        tokens = torch.tensor([[*block, *[0] * (rows - len(block))] for block in blocks])
        logits, hidden = self.runner.verify(self.memory, self.places, tokens, counts, self.starts)
        return [(logits[i, :count], hidden[i, :count]) for i, count in enumerate(counts)]

    def keep(self, counts: Sequence[int]) -> None:
        """So many rows of each sequence's last block were right."""
        self.starts = [start + count for start, count in zip(self.starts, counts, strict=True)]
