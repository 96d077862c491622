"""Drafts from text the host already holds: the client's predicted output, else n-grams of prompt and answer.

Works on token ids alone; knows no model and no sampler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from backend.drafters.protocol import Choose, Proposal

if TYPE_CHECKING:
    from backend.engine.memory import Memory

Source = Literal["prediction", "ngrams"]
"""Where the tokens of a proposal come from."""

_LENGTHS = (4, 3, 2)  # of the n-grams looked up, the longest first


class PredictionState:
    """What one sequence's answer is likely to continue with, judged by text alone.

    The prediction is followed from its start. Where the answer leaves it, it is taken up again at the place its last
    4, 3 or 2 tokens stand in: the first such place after the last token followed, else the last one before. While it
    is not followed (or used up, or empty), a proposal is what came after the most recent earlier occurrence of the last
    4, 3 or 2 tokens in prompt and answer. A step costs its new tokens, whatever the length of the text.

    `accepted` and `rejected` are OpenAI's "tokens in the prediction that appeared (did not appear) in the completion":
    `accepted` counts the prediction's tokens that the answer wrote while following it, each at most once; `rejected`
    counts all others. They follow from prediction and answer alone, whatever was drafted and however the answer was cut
    into steps, so an answer's usage is the same with any draft length. Unlike OpenAI's, rejected tokens are no
    completion tokens: nobody pays for them.
    """

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] = ()) -> None:
        self._text = list(prompt)
        self._answer_start = len(self._text)
        self._prediction = tuple(prediction)
        self._followed = bytearray(len(self._prediction))  # 1 where the answer wrote this token
        self._reached = 0  # one past the last token followed
        self._at: int | None = 0  # the prediction's token expected next; None while the answer is elsewhere
        # Both maps lead from an n-gram to the index of what follows it, so none ends with its text.
        self._latest: dict[tuple[int, ...], int] = {}  # in prompt and answer, the most recent
        self._places: dict[tuple[int, ...], list[int]] = {}  # in the prediction, all, ascending
        for n in _LENGTHS:
            ngrams = zip(*(self._text[i:] for i in range(n)), strict=False)
            self._latest.update(zip(ngrams, range(n, len(self._text)), strict=False))
            for end in range(n, len(self._prediction)):
                self._places.setdefault(self._prediction[end - n : end], []).append(end)

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that appeared in the answer."""
        return sum(self._followed)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that did not; `accepted + rejected` is its length."""
        return len(self._prediction) - self.accepted

    @property
    def source(self) -> Source | None:
        """Where `propose` takes its tokens from now; None where it has none to offer."""
        if self._expected is not None:
            return "prediction"
        return None if self._earlier is None else "ngrams"

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the answer: those of one step, or of several."""
        for token in tokens:
            if self._expected is not None and self._prediction[self._expected] == token:
                self._followed[self._expected] = 1
                self._at = self._reached = self._expected + 1
            else:
                self._at = None
            for n in _LENGTHS:
                if n <= len(self._text):
                    self._latest[tuple(self._text[-n:])] = len(self._text)
            self._text.append(token)
            if self._at is None:
                self._at = self._taken_up_again()

    def propose(self, count: int) -> list[int]:
        """At most `count` ≥ 1 tokens, all from `source`: fewer where the prediction ends, none where nothing is known.

        An n-gram's continuation that runs into the end of the text goes on with itself, as a loop would.
        """
        if (expected := self._expected) is not None:
            return list(self._prediction[expected : expected + count])
        if (earlier := self._earlier) is None:
            return []
        draft = self._text[earlier : earlier + count]
        period = len(self._text) - earlier
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    @property
    def _expected(self) -> int | None:
        return None if self._at == len(self._prediction) else self._at

    @property
    def _earlier(self) -> int | None:
        """The index of what followed the last tokens when they stood here before."""
        return next((at for n in _LENGTHS if (at := self._latest.get(tuple(self._text[-n:]))) is not None), None)

    def _taken_up_again(self) -> int | None:
        for n in _LENGTHS:
            places = self._places.get(tuple(self._text[max(self._answer_start, len(self._text) - n) :]))
            if places:
                after = bisect_right(places, self._reached)
                return places[after] if after < len(places) else places[after - 1]
        return None


class PredictionDrafter:
    """The n-grams of prompt and answer as `backend.drafters.protocol.Drafter`; costs no computation to speak of."""

    name = fingerprint = "prediction"
    block = None

    def attach(self, memory: Memory) -> None:
        pass

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> PredictionState:
        return PredictionState(prompt)

    def resume(self, state: PredictionState, boundary: int, known: bool) -> None:
        pass

    def prefill(self, state: PredictionState, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        pass

    def observe(self, state: PredictionState, tokens: Sequence[int], hidden: Tensor) -> None:
        state.extend(tokens)

    def propose(self, states: Sequence[PredictionState], counts: Sequence[int], choose: Choose) -> Proposal:
        drafts = [state.propose(count) for state, count in zip(states, counts, strict=True)]
        width = max(map(len, drafts))
        padded = torch.tensor([[*draft, *[0] * (width - len(draft))] for draft in drafts], dtype=torch.int64)
        return Proposal(padded.view(len(drafts), width), [len(draft) for draft in drafts])
