"""Drive the speculative step by hand over random checkpoints: one call decodes a list of requests to the end."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backend.drafters.protocol import Choose, Drafter
from backend.engine.runner import Runner
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.sequence import Sequence
from backend.engine.speculation import Speculation
from backend.interface import Step
from backend.text.answer import AnswerText


@dataclass(frozen=True)
class Request:
    """Ids in, how to sample, and what ends it. A token's text is the character U+0100 + id."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int = 64
    eos: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a client would see, and the steps it took."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str | None
    steps: tuple[Step, ...] = ()

    @property
    def seen(self) -> tuple[Any, ...]:
        return self.tokens, self.logprobs, self.text, self.finish


def decode(runner: Runner, drafter: Drafter | None, draft_tokens: int, requests: Ids[Request]) -> list[Outcome]:
    """Each request alone, start to end, through the engine's own step."""
    speculation = Speculation(runner, drafter, draft_tokens)
    return [_decode_one(speculation, request) for request in requests]


@torch.inference_mode()
def _decode_one(speculation: Speculation, request: Request) -> Outcome:
    texts: list[str] = []
    sequence = Sequence(
        id="x",
        prompt=request.prompt,
        sampler=Sampler(request.params, speculation.runner.model.config.vocab_size),
        max_tokens=request.max_tokens,
        eos_ids=request.eos,
        text=AnswerText(lambda token: chr(0x100 + token).encode(), request.stops),
        alternatives=0,
        on_emission=lambda emission: texts.append(emission.text),
    )
    while sequence.in_prefill:
        speculation.prefill(sequence)
    while not sequence.finish:
        speculation.decode(sequence)
    return Outcome(
        tuple(sequence.tokens), tuple(sequence.logprobs), "".join(texts), sequence.finish, tuple(sequence.steps)
    )


class ScriptedDrafter:
    """Knows each prompt's continuation and errs at a given rate, so that every acceptance length occurs."""

    name, fingerprint = "scripted", "scripted"

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], hit_rate: float, vocab: int) -> None:
        self._answers, self._hit_rate, self._vocab = answers, hit_rate, vocab
        self._random = random.Random(0)

    def new_state(self) -> dict[str, Any]:
        return {"prompt": [], "done": 0}

    def prefill(self, state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        state["prompt"] += tokens[0, :valid].tolist()

    def observe(self, state: Any, tokens: Ids[int], hidden: Tensor) -> None:
        assert hidden.shape[1] == len(tokens)
        state["done"] += len(tokens)

    def propose(self, state: Any, count: int, choose: Choose) -> list[int]:
        known = self._answers[tuple(state["prompt"])][state["done"] : state["done"] + count]
        drafts = [*known, *[0] * (count - len(known))]
        return [d if self._random.random() < self._hit_rate else (d + 1) % self._vocab for d in drafts]
