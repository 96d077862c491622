"""What a request does to its logits before a token is drawn: bias, penalties, bans. One sequence's rows at a time.

Every edit is a scatter of tensors: nothing here reads a tensor's values, so drafts may still be on a device. Order as
vLLM's: logit_bias, repetition, frequency, presence; a banned token stays banned whatever the others add.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.parameters import SamplingParams


class TokenCounts:
    """How often each token stands in an output, for the tokens of prompt and output; a stack of one token at a time.

    `ids` int64 [U] distinct, `counts` int64 [U] in the output, `prompt` bool [U].
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        known = np.unique(np.fromiter(prompt, np.int64))
        self._slots = {int(token): slot for slot, token in enumerate(known)}
        self._used = self._from_prompt = len(known)
        self._ids = np.concatenate((known, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.int64)

    def push(self, token: int) -> None:
        slot = self._slots.setdefault(token, self._used)
        if slot == self._used:
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
            self._used += 1
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._used]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._used]

    @property
    def prompt(self) -> NDArray[np.bool_]:
        return np.arange(self._used) < self._from_prompt


class Processors:
    """The edits of one sequence. Holds its history, as far as the edits need it."""

    def __init__(self, params: SamplingParams, vocab: int, prompt: Sequence[int]) -> None:
        """`prompt` counts for the repetition penalty alone; a bad word begins in the output, as vLLM's."""
        self._params = params
        self._stops = [token for token in sorted(params.stop_token_ids) if token < vocab]
        self._bias = [(token, value) for token, value in params.logit_bias if token < vocab]
        words = [word for word in params.bad_words if all(token < vocab for token in word)]
        self._banned = [word[0] for word in words if len(word) == 1]
        self._phrases = {
            length: torch.tensor([word for word in words if len(word) == length])  # [W, length]
            for length in sorted({len(word) for word in words} - {0, 1})
        }
        self._tail: list[int] = []  # of the output, as much as the longest phrase needs
        self._counts = TokenCounts(prompt if params.repetition_penalty != 1 else ())
        self._count = 0

    def accept(self, token: int) -> None:
        self._count += 1
        if self._params.penalised:
            self._counts.push(token)
        if self._phrases:
            self._tail = [*self._tail, token][-max(self._phrases) :]

    def apply(self, logits: Tensor, drafts: Tensor, *, ends: bool = True) -> Tensor:
        """Edited copy of logits float32 [R, V], the rows whose histories end with drafts[:D-R+1], …, drafts[:D].

        drafts int64 [D] follow the accepted tokens; D ≥ R - 1. `ends` false leaves min_tokens aside.
        """
        x, first = logits.clone(), len(drafts) - len(logits) + 1
        drafts = drafts.clamp(0, x.shape[1] - 1)  # an id that is none is wrong anyhow: rows after it are nobody's
        device = x.device
        if self._bias:
            ids = torch.tensor([token for token, _ in self._bias], device=device)
            x.index_add_(1, ids, x.new_tensor([value for _, value in self._bias]).expand(len(x), -1))
        if self._params.penalised:
            self._penalise(x, drafts, first)
        if self._banned:
            x.index_fill_(1, torch.tensor(self._banned, device=device), -torch.inf)
        early = min(max(self._params.min_tokens - self._count - first, 0), len(x)) if ends else 0
        if early and self._stops:
            x[:early].index_fill_(1, torch.tensor(self._stops, device=device), -torch.inf)
        for length, phrases in self._phrases.items():
            self._ban_phrases(x, drafts, first, length, phrases.to(device))
        return x

    def _penalise(self, x: Tensor, drafts: Tensor, first: int) -> None:
        device, p = x.device, self._params
        ids = torch.from_numpy(self._counts.ids.copy()).to(device)  # [U]
        counts = torch.from_numpy(self._counts.counts.copy()).to(device)
        prompt = torch.from_numpy(self._counts.prompt).to(device)
        same = drafts[:, None] == ids  # [D, U]
        touched = torch.cat((ids, drafts)).expand(len(x), -1)  # [R, N], N = U + D; repeated ids get equal values
        committed = torch.cat((counts, (same * counts).sum(-1)))  # [N]
        in_prompt = torch.cat((prompt, (same & prompt).any(-1)))
        rows = torch.arange(first, first + len(x), device=device)[:, None]  # drafts before each row
        before = torch.arange(len(drafts), device=device) < rows  # [R, D]
        drafted = ((touched[0][:, None] == drafts) & before[:, None]).sum(-1)  # [R, N]
        count = committed + drafted
        value = x.gather(1, touched)
        repeated = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
        value = torch.where((count > 0) | in_prompt, repeated, value)
        value = value - count * p.frequency_penalty
        value = torch.where(count > 0, value - p.presence_penalty, value)
        x.scatter_(1, touched, value)

    def _ban_phrases(self, x: Tensor, drafts: Tensor, first: int, length: int, phrases: Tensor) -> None:
        before = length - 1
        tail = [-1] * before + self._tail
        stream = torch.cat((torch.tensor(tail[-before:], device=x.device), drafts))
        windows = stream.unfold(0, before, 1)[first:]  # [R, before]: what each row's history ends with
        ended = (windows[:, None] == phrases[:, :-1]).all(-1)  # [R, W]
        x.index_add_(1, phrases[:, -1], x.new_zeros(()).where(~ended, -torch.inf))
