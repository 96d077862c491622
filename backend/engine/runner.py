"""The model under the prefix law: prompt rows in grid chunks, generated rows through the verify form, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.cache import SequenceCache
from backend.engine.forms import GRID, PrefillForm, VerifyForm
from backend.models.qwen3_5 import Qwen35


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one sequence: `logits` [R, V] float32 predict positions start + 1 …, `hidden` [1, R, H]."""

    start: int
    logits: Tensor
    hidden: Tensor


class Runner:
    """Owns the weights, no sequence. Call under `torch.inference_mode()`."""

    def __init__(self, model: Qwen35) -> None:
        self.model = model
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.model.config, self.device, self.dtype)

    def prefill_chunk(self, cache: SequenceCache, chunk: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Run prompt tokens [start, start + len(chunk)), at most GRID, start on the grid.

        Returns tokens int64 [1, GRID] (padded) and hidden states [1, GRID, H]; rows past len(chunk) mean nothing.
        """
        if start % GRID or not 0 < len(chunk) <= GRID:
            raise ValueError(f"a prefill chunk starts on the grid of {GRID} and holds 1 to {GRID} tokens")
        tokens = torch.zeros(1, GRID, dtype=torch.int64)
        tokens[0, : len(chunk)] = torch.tensor(chunk)
        tokens = tokens.to(self.device)
        return tokens, self.model(tokens, PrefillForm(cache, start, len(chunk)))

    def verify(self, cache: SequenceCache, tokens: Sequence[int], start: int) -> Rows:
        """Run generated tokens at start …; the caller then says how many were accepted (`cache.accept`)."""
        rows = torch.tensor([list(tokens)], device=self.device)
        hidden = self.model(rows, VerifyForm(cache, start, len(tokens)))
        return Rows(start, self.model.logits(hidden[0]), hidden)

    def force(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        blocks: Sequence[int] | int,
        cache: SequenceCache | None = None,
    ) -> Iterator[Rows]:
        """Push given tokens through the regimes of serving: the prompt on the grid, `tokens` in verify blocks.

        `blocks` is one size for all, or sizes used in turn. Yields the prompt's last row, then each block; the logits
        are bitwise those of serving. Afterwards `cache` (a fresh one unless given) stands after the last token.
        """
        cache = cache or self.new_cache()
        hidden = None
        for start in range(0, len(prompt), GRID):
            chunk = prompt[start : start + GRID]
            _, hidden = self.prefill_chunk(cache, chunk, start)
            hidden = hidden[:, len(chunk) - 1 : len(chunk)]
        if hidden is None:
            raise ValueError("a prompt has at least one token")
        yield Rows(len(prompt) - 1, self.model.logits(hidden[0]), hidden)
        sizes = [blocks] if isinstance(blocks, int) else list(blocks)
        done = turn = 0
        while done < len(tokens):
            block = tokens[done : done + sizes[turn % len(sizes)]]
            rows = self.verify(cache, block, len(prompt) + done)
            cache.accept(len(block))
            yield rows
            done += len(block)
            turn += 1
