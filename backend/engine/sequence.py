"""One request inside the engine: what it asked for, what it holds, what it has emitted. State lives here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backend.drafters.prediction import PredictionState
from backend.drafters.protocol import Drafter
from backend.engine.memory import Place
from backend.engine.sampling import Sampler
from backend.interface import FinishReason, Step
from backend.text.answer import AnswerText


@dataclass(frozen=True)
class EmittedToken:
    """A token the target chose, or one of the prompt and its rank, with its raw log-softmax and the leading (id,
    logprob) alternatives."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(frozen=True)
class Emission:
    """What a step gave a sequence, or what a chunk told of its `prompt`; `finish` is set on the last one."""

    text: str
    tokens: tuple[EmittedToken, ...]
    finish: FinishReason | None = None
    error: str | None = None
    prompt: tuple[EmittedToken, ...] = ()
    step: Step | None = None  # that the tokens are of; the first token is of none
    source: str = "none"  # of its drafts


@dataclass(eq=False)
class Sequence:
    """Ids, limits and the growing answer. `on_emission` is called on the engine thread and must not block."""

    id: str
    prompt: tuple[int, ...]
    sampler: Sampler
    max_tokens: int
    eos_ids: frozenset[int]
    text: AnswerText
    alternatives: int
    on_emission: Callable[[Emission], None]

    drafter: Drafter | None = None
    prediction: PredictionState | None = None  # of the client's predicted output
    salt: str = ""  # sequences of different salts share no prefix
    last_turn: int = 0  # where the prompt's last user turn begins
    prompt_alternatives: int | None = None  # to tell of each token of the prompt; None: nothing is told of it

    place: Place | None = None  # None while it waits
    draft_state: Any = None
    prefilled: int = 0  # prompt tokens in memory
    replayed: int = 0  # generated tokens in memory
    cached: int = 0  # prompt tokens found in the prefix cache
    scored: int = 0  # prompt tokens told of
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each step's drafts
    stop_string: str | None = None
    finish: FinishReason | None = None
    cancelled: bool = False
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.tokens)

    @property
    def decoding(self) -> bool:
        return self.place is not None and self.place.slot is not None

    @property
    def scoring(self) -> bool:
        """Is something of its prompt still to be told? Then every row of it has to be run."""
        return self.prompt_alternatives is not None and self.scored < len(self.prompt)

    @property
    def held(self) -> int:
        """Positions in memory."""
        return self.prefilled + self.replayed

    def append(self, token: EmittedToken) -> str:
        """Take the token at position `length`; sets `finish` if it ends the sequence. Returns text now certain."""
        if not self.tokens:
            self.first_token_at = time.monotonic()
        self.sampler.accept(token.token_id)
        piece = self.text.push(token.token_id)
        self.tokens.append(token.token_id)
        self.logprobs.append(token.logprob)
        text = piece.text
        if piece.stop is not None:
            self.stop_string = piece.stop
            self.finish = "stop"
        elif token.token_id in self.eos_ids or self.sampler.finished:
            self.finish = "stop"
        elif not self.remaining:
            self.finish = "length"
        if self.finish and piece.stop is None:
            rest = self.text.finish()
            text += rest.text
            if rest.stop is not None:
                self.stop_string, self.finish = rest.stop, "stop"
        if self.finish:
            self.finished_at = time.monotonic()
        return text

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End it from outside (cancelled, error) and tell the owner; what was held back of the text is released."""
        self.finish = reason
        self.finished_at = time.monotonic()
        rest = self.text.finish()
        self.on_emission(Emission(rest.text, (), reason, error))
