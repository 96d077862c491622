"""What the engine asks of a drafter: remember committed rows, propose tokens. A bad one costs time, never text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Choose = Callable[[Tensor, int], int]
"""(logits float32 [V], position) → token id: the sequence's own sampler, so that draft and target share their noise."""


class Drafter(Protocol):
    """Named and fingerprinted; per-sequence state is opaque to the engine and owned by the sequence."""

    name: str
    fingerprint: str

    def new_state(self) -> Any:
        """State of a sequence that has no rows yet."""

    def prefill(self, state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        """A prompt chunk: tokens int64 [1, R] at start …, their hidden states [1, R, H].

        Rows past `valid` are padding.
        """

    def observe(self, state: Any, tokens: Sequence[int], hidden: Tensor) -> None:
        """Newly committed tokens, each with the trunk's hidden state [1, len(tokens), H] one position before it."""

    def propose(self, state: Any, count: int, choose: Choose) -> list[int]:
        """`count` ≥ 1 draft tokens that continue the committed ones."""
