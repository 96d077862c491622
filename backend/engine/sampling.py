"""Coupled sampling (DESIGN §5): a token is argmax(processed logits + noise), for target and draft alike.

A choice is a function of one row of logits, the parameters, the history and the position; nothing else may enter, the
other sequences of a batch, the length of a block and the drafter least of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine import choose_on_device, choose_on_host
from backend.engine.parameters import SamplingParams
from backend.engine.processors import Processors
from backend.text.phases import UNBOUNDED, Matcher

__all__ = ["Matcher", "Sampler", "SamplerBatch", "SamplingParams", "leading"]


class Sampler:
    """Parameters and history of one sequence. `vocab`: the number of decodable ids; logits past it never win."""

    def __init__(
        self, params: SamplingParams, vocab: int, prompt: Sequence[int] = (), matcher: Matcher | None = None
    ) -> None:
        """`prompt` counts for the repetition penalty; `matcher` stands at the answer's start."""
        self.params = params
        self.vocab = vocab
        self.count = 0  # tokens accepted
        self.matcher = matcher
        self._processors = None if params.plain else Processors(params, vocab, prompt)

    @property
    def plain(self) -> bool:
        """Logits are taken as they are, whatever came before."""
        return self._processors is None and self.matcher is None

    @property
    def finished(self) -> bool:
        """The answer is complete: only ends are chosen."""
        return self.matcher is not None and self.matcher.finished

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot go on although the answer does not match it yet; only ends are chosen then."""
        return self.matcher.failure if self.matcher else None

    def accept(self, token: int) -> None:
        """Take a token of the output into the history."""
        self.count += 1
        if self._processors:
            self._processors.accept(token)
        if self.matcher:
            self.matcher.advance(token)
            if self.matcher.slack == UNBOUNDED:
                self.matcher = None

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that there is no choice about. As drafts: a wrong one costs time only."""
        return self.matcher.forced()[:limit] if self.matcher else []

    def process(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Edited copy of logits float32 [R, vocab]; row r follows drafts[: D - R + 1 + r] of int64 [D], tentatively.

        With a matcher R is 1 and it has taken the drafts, unless it has slack for them all.
        """
        edited = logits
        if self._processors:
            edited = self._processors.apply(logits, drafts, ends=not self.finished)
        allowed = self._allowed(self.matcher) if self.matcher else None
        if allowed is None:
            return edited
        barred = torch.from_numpy(~allowed).to(logits.device)
        constrained = edited.masked_fill(barred, -torch.inf)
        # Where bans leave nothing of what the grammar allows, the grammar stands.
        stuck = constrained.amax(-1, keepdim=True) == -torch.inf
        return torch.where(stuck, logits.masked_fill(barred, -torch.inf), constrained)

    def _allowed(self, matcher: Matcher) -> NDArray[np.bool_] | None:
        """None: every id."""
        text = matcher.allowed()
        if text is None:
            return None
        text, allowed = text[: self.vocab], np.zeros(self.vocab, np.bool_)
        allowed[: len(text)] = text
        if matcher.accepts or not allowed.any():
            ends = [token for token in self.params.stop_token_ids or matcher.ends if token < self.vocab]
            allowed[ends] = True
        return allowed


class SamplerBatch:
    """One step's choices: drafts a token at a time, or a block of rows at once. Leaves its samplers as they were.

    All samplers share one vocabulary. On a device, sequences without a grammar cost no host read.
    """

    def __init__(self, samplers: Sequence[Sampler], positions: Sequence[int]) -> None:
        """`positions`: absolute index of each sequence's next token, prompt length + `count`."""
        self._samplers = samplers
        self._positions = positions
        self._drafted: list[Tensor] = []
        self._chooser: choose_on_device.DeviceChooser | None = None

    def draft(self, logits: Tensor) -> Tensor:
        """The next draft of every sequence, after those already drafted here: float32 [B, ≥ V] → int64 [B]."""
        drafts = (
            torch.stack(self._drafted, -1) if self._drafted else logits.new_empty(len(logits), 0, dtype=torch.int64)
        )
        chosen = self._choose(logits[:, None], drafts)[:, 0]
        self._drafted.append(chosen)
        return chosen

    def verify(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """The target's token for every row, row r following drafts[:, :r]: float32 [B, R, ≥ V] → int64 [B, R].

        drafts int64 [B, R - 1], on any device. Rows past a sequence's first wrong draft hold any token.
        """
        return self._choose(logits, drafts)

    def _choose(self, logits: Tensor, drafts: Tensor) -> Tensor:
        if not self._samplers:
            return torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        logits = logits[..., : self._samplers[0].vocab]
        if logits.device.type == "cpu":
            return self._choose_on_host(logits, drafts)
        return self.choose_on_device(logits, drafts)

    def _choose_on_host(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Row by row, each sequence up to its first wrong draft."""
        rows = logits.shape[1]
        first = drafts.shape[1] - rows + 1
        chosen = torch.zeros(logits.shape[:2], dtype=torch.int64)
        given = drafts.tolist()
        for index, (sampler, position) in enumerate(zip(self._samplers, self._positions, strict=True)):
            with _Tentative(sampler.matcher) as history:
                history.take(given[index][:first])
                for row in range(rows):
                    x, drafted = logits[index, row], first + row
                    if not sampler.plain:
                        x = sampler.process(x[None], drafts[index, :drafted])[0]
                    token = choose_on_host.choose(x.numpy(), sampler.params, position + drafted)
                    chosen[index, row] = token
                    if row + 1 == rows or token != given[index][drafted]:
                        break
                    history.take([token])
        return chosen

    def choose_on_device(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """All rows at once. Drafts are read only for sequences whose matchers have no slack for them."""
        device, rows = logits.device, logits.shape[1]
        drafts = drafts.to(device, non_blocking=True)
        first = drafts.shape[1] - rows + 1
        if self._chooser is None:
            params = [sampler.params for sampler in self._samplers]
            self._chooser = choose_on_device.DeviceChooser(params, self._positions, logits.shape[-1], device)
        if not all(sampler.plain for sampler in self._samplers):
            logits = logits.clone()
        for index, sampler in enumerate(self._samplers):
            if sampler.matcher is not None and sampler.matcher.slack < first + rows:
                self._constrain(sampler, logits[index], drafts[index], first)
            elif not sampler.plain:
                logits[index] = sampler.process(logits[index], drafts[index])
        return self._chooser(logits, first)

    def _constrain(self, sampler: Sampler, logits: Tensor, drafts: Tensor, first: int) -> None:
        """In place: the rows of one sequence with a grammar, up to the first draft that it does not allow."""
        given = drafts.tolist()
        with _Tentative(sampler.matcher) as history:
            if not history.take(given[:first]):
                return
            for row in range(len(logits)):
                logits[row] = sampler.process(logits[row : row + 1], drafts[: first + row])[0]
                if row + 1 < len(logits) and not history.take([given[first + row]]):
                    return


class _Tentative:
    """Tokens given to a matcher for the while of a `with` block."""

    def __init__(self, matcher: Matcher | None) -> None:
        self._matcher, self._taken = matcher, 0

    def __enter__(self) -> _Tentative:
        return self

    def take(self, tokens: Sequence[int]) -> bool:
        """False at the first token that the grammar does not allow."""
        if self._matcher is not None:
            for token in tokens:
                if not self._matcher.advance(token):
                    return False
                self._taken += 1
        return True

    def __exit__(self, *raised: object) -> None:
        if self._matcher is not None:
            self._matcher.rollback(self._taken)


def leading(logits: Tensor, count: int) -> Tensor:
    """The first `count` ids in the order (logit descending, id ascending): float32 [V] → int64 [count]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(choose_on_host.leading(logits.numpy(), count))
    return choose_on_device.leading(logits, count)
