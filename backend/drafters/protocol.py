"""What the engine asks of a drafter: remember committed rows, propose tokens. A bad one costs time, never text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from backend.engine.memory import Memory

Choose = Callable[[Tensor], Tensor]
"""logits float32 [B, V] of the next slot → draft tokens int64 [B]: by the sequences' own samplers, so that draft and
target share their noise."""


@dataclass(frozen=True)
class Proposal:
    """Draft tokens int64 [B, K] on any device; of sequence i the first counts[i] are meant."""

    tokens: Tensor
    counts: Sequence[int]


class Drafter(Protocol):
    """Named and fingerprinted; per-sequence state is opaque to the engine and owned by the sequence."""

    name: str
    fingerprint: str

    @property
    def block(self) -> str | None:
        """The fingerprint of what it writes to the sequences' pages, None where it writes nothing."""

    def attach(self, memory: Memory) -> None:
        """Where the sequences' pages are; called once, before any other."""

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> Any:
        """State of a sequence that has no rows yet; `pages` is its own list, which grows."""

    def resume(self, state: Any, boundary: int, known: bool) -> None:
        """Prompt rows before `boundary` were found in the prefix cache; `known`: with this block's rows."""

    def prefill(self, state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        """A prompt chunk: tokens int64 [1, R] at start …, their hidden states [1, R, H].

        Rows past `valid` are padding.
        """

    def observe(self, state: Any, tokens: Sequence[int], hidden: Tensor) -> None:
        """Newly committed tokens, each with the trunk's hidden state [len(tokens), H] one position before it."""

    def propose(self, states: Sequence[Any], counts: Sequence[int], choose: Choose) -> Proposal:
        """At most counts[i] ≥ 1 draft tokens that continue each sequence's committed ones."""
