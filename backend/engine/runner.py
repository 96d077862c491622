"""The model under the prefix law: prompt rows in grid chunks, generated rows through the verify form, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from backend.engine.cache import PAGE, pages_for
from backend.engine.forms import GRID, PrefillForm, VerifyForm
from backend.engine.memory import Memory, Place
from backend.models.layers import prepare
from backend.models.qwen3_5 import Qwen35
from backend.ops.delta_replay import MAX_ROWS


class Runner:
    """Owns the weights, no sequence. Call under `torch.inference_mode()`."""

    def __init__(self, model: Qwen35) -> None:
        prepare(model, keep=[model.lm_head])
        self.model = model
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype

    def new_memory(self, positions: int, slots: int = 1) -> Memory:
        """Room for `slots` sequences of so many positions each."""
        return Memory(self.model.config, slots * pages_for(positions), slots, self.device, self.dtype)

    def prefill_chunk(self, memory: Memory, place: Place, chunk: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Run prompt tokens [start, start + len(chunk)), at most GRID, start on the grid; pages must be there.

        Returns tokens int64 [1, GRID] (padded) and hidden states [1, GRID, H]; rows past len(chunk) mean nothing.
        """
        valid = len(chunk)
        if start % GRID or not 0 < valid <= GRID:
            raise ValueError(f"a prefill chunk starts on the grid of {GRID} and holds 1 to {GRID} tokens")
        if place.state is None:
            place.state = memory.slots.new_prompt_state()
        tokens = torch.zeros(1, GRID, dtype=torch.int64)
        tokens[0, :valid] = torch.tensor(chunk)
        tokens = tokens.to(self.device)
        form = PrefillForm(self.model.config, memory.cache, memory.slots.index, place.state, place.pages, start, valid)
        hidden = self.model(tokens, form)
        at = place.pages[start // PAGE] * PAGE + start % PAGE
        memory.hidden[at : at + valid] = hidden[0, :valid]
        return tokens, hidden

    def verify(
        self, memory: Memory, places: Sequence[Place], tokens: Tensor, counts: Sequence[int], starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run generated tokens int64 [B, R], those of the sequence in slot i at starts[i] …, counts[i] of them real.

        Returns logits float32 [B, R, V] and hidden states [B, R, H]. How many rows were right is for the next call's
        `starts` to say.
        """
        if [place.slot for place in places] != list(range(len(places))):
            raise ValueError("the batch must be slots 0, 1, …, in order")
        form = VerifyForm(
            self.model.config,
            memory.cache,
            memory.slots,
            [place.pages for place in places],
            [place.prompt for place in places],
            starts,
            counts,
            tokens.shape[1],
        )
        hidden = self.model(tokens, form)
        return self.model.logits(hidden), hidden

    def force(
        self, prompt: Sequence[int], tokens: Sequence[int], blocks: Sequence[int] | int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Push given tokens through the regimes of serving: the prompt on the grid, `tokens` in verify blocks.

        `blocks` is one size for all, or sizes used in turn, each at most MAX_ROWS. Yields logits float32 [R, V] and
        hidden states [R, H] of the prompt's last row, then of each block, bitwise those of serving.
        """
        if not prompt:
            raise ValueError("a prompt has at least one token")
        memory = self.new_memory(len(prompt) + len(tokens) + MAX_ROWS)
        place = Place(len(prompt))
        for _ in range(memory.table.total):
            memory.take(place.pages)
        for start in range(0, len(prompt), GRID):
            chunk = prompt[start : start + GRID]
            hidden = self.prefill_chunk(memory, place, chunk, start)[1][0, len(chunk) - 1 : len(chunk)]
        yield self.model.logits(hidden), hidden
        assert place.state is not None
        memory.slots.join(0, place.state)
        place.slot = 0
        sizes = [blocks] if isinstance(blocks, int) else list(blocks)
        done = turn = 0
        while done < len(tokens):
            block = tokens[done : done + sizes[turn % len(sizes)]]
            row = torch.tensor([list(block)], device=self.device)
            logits, states = self.verify(memory, [place], row, [len(block)], [len(prompt) + done])
            yield logits[0], states[0]
            done += len(block)
            turn += 1
