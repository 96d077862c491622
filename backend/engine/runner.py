"""The model under the prefix law: prompt rows in grid chunks, generated rows through the verify form, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.cache import PAGE, pages_for
from backend.engine.forms import GRID, PrefillForm, VerifyForm
from backend.engine.memory import Memory, Place
from backend.models.layers import prepare
from backend.models.qwen3_5 import Qwen35
from backend.ops.delta_replay import MAX_ROWS


@dataclass(frozen=True)
class ForcedRows:
    """Of one of the documents forced together: hidden states [R, H] of the positions from `start` on, and logits
    float32 [r, V] of the last r of them, which are those that answer rows have and the prompt's last one."""

    document: int
    start: int
    hidden: Tensor
    logits: Tensor


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
        for rows in self.force_together([(prompt, tokens)], blocks):
            if len(rows.logits):
                yield rows.logits, rows.hidden[-len(rows.logits) :]

    def force_together(
        self, documents: Sequence[tuple[Sequence[int], Sequence[int]]], blocks: Sequence[int] | int = MAX_ROWS
    ) -> Iterator[ForcedRows]:
        """`force` of several documents (prompt, tokens) in one batch, every position told once, each document's in
        order: the same bits as of each alone.
        """
        if not all(prompt for prompt, _ in documents):
            raise ValueError("a prompt has at least one token")
        # Those with most to come first, so that the ones at work are always slots 0, 1, …
        order = sorted(range(len(documents)), key=lambda index: -len(documents[index][1]))
        memory = self.new_memory(max(map(_positions, documents)) + MAX_ROWS, len(documents))
        places = []
        for slot, index in enumerate(order):
            place = Place(len(documents[index][0]))
            for _ in range(pages_for(_positions(documents[index]) + MAX_ROWS)):
                memory.take(place.pages)
            yield from self._force_prompt(memory, place, index, documents[index][0])
            assert place.state is not None
            memory.slots.join(slot, place.state)
            place.slot, place.state = slot, None
            places.append(place)
        sizes = [blocks] if isinstance(blocks, int) else list(blocks)
        done = turn = 0
        while left := [index for index in order if len(documents[index][1]) > done]:
            size = sizes[turn % len(sizes)]
            given = [documents[index][1][done : done + size] for index in left]
            counts = [len(block) for block in given]
            starts = [len(documents[index][0]) + done for index in left]
            tokens = torch.tensor([[*block, *[0] * (max(counts) - len(block))] for block in given], device=self.device)
            logits, hidden = self.verify(memory, places[: len(left)], tokens, counts, starts)
            for row, (index, start, count) in enumerate(zip(left, starts, counts, strict=True)):
                yield ForcedRows(index, start, hidden[row, :count], logits[row, :count])
            done += size
            turn += 1

    def _force_prompt(self, memory: Memory, place: Place, index: int, prompt: Sequence[int]) -> Iterator[ForcedRows]:
        for start in range(0, len(prompt), GRID):
            chunk = prompt[start : start + GRID]
            hidden = self.prefill_chunk(memory, place, chunk, start)[1][0, : len(chunk)]
            is_last = start + len(chunk) == len(prompt)
            logits = self.model.logits(hidden[-1:]) if is_last else hidden.new_empty(0, self.model.config.vocab_size)
            yield ForcedRows(index, start, hidden, logits)


def _positions(document: tuple[Sequence[int], Sequence[int]]) -> int:
    prompt, tokens = document
    return len(prompt) + len(tokens)
