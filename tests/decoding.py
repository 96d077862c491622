"""Drive the speculative step by hand over random checkpoints: one call decodes a list of requests to the end."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backend.drafters.prediction import PredictionState
from backend.drafters.protocol import Choose, Drafter, Proposal
from backend.engine.cache import pages_for
from backend.engine.draft_length import DraftLength, FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.memory import Memory
from backend.engine.prefix import PrefixCache
from backend.engine.runner import Runner
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Emission, Sequence
from backend.engine.speculation import Speculation
from backend.interface import Step
from backend.ops.delta_replay import MAX_ROWS
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


def make_loop(
    runner: Runner,
    draft_tokens: int | DraftLength,
    drafters: Ids[Drafter] = (),
    *,
    positions: int = 512,
    sequences: int = 1,
    prefix: bool = False,
    snapshots: int = 2**30,
    pages: int | None = None,
) -> Loop:
    """An engine's loop with room for so many sequences of so many positions; `snapshots` bytes of the prefix cache."""
    pages = sequences * pages_for(positions + MAX_ROWS) if pages is None else pages
    memory = Memory(runner.model.config, pages, sequences, runner.device, runner.dtype)
    for drafter in drafters:
        drafter.attach(memory)
    lengths = FixedDraftLength(draft_tokens) if isinstance(draft_tokens, int) else draft_tokens
    cache = PrefixCache(memory, snapshots) if prefix else None
    return Loop(Speculation(runner, memory, lengths), Scheduler(memory, sequences, cache))


def decode(
    runner: Runner, drafter: Drafter | None, draft_tokens: int, requests: Ids[Request], *, together: int = 1
) -> list[Outcome]:
    """The requests through the engine's own loop, so many of them at a time."""
    positions = max(len(request.prompt) + request.max_tokens for request in requests)
    loop = make_loop(runner, draft_tokens, [drafter] if drafter else [], positions=positions, sequences=together)
    return run(loop, [(request, drafter) for request in requests])


@torch.inference_mode()
def run(loop: Loop, requests: Ids[tuple[Request, Drafter | None]]) -> list[Outcome]:
    """All of them from the start, each with its drafter, as the loop lets them in."""
    jobs = [Job(loop, request, drafter) for request, drafter in requests]
    for job in jobs:
        loop.add(job.sequence)
    loop.finish()
    return [job.outcome for job in jobs]


class Job:
    """A request made into a sequence, and what its owner was told."""

    def __init__(
        self,
        loop: Loop,
        request: Request,
        drafter: Drafter | None,
        salt: str = "",
        predicted: Ids[int] = (),
        last_turn: int = 0,
    ) -> None:
        self._texts: list[str] = []
        self._errors: list[str] = []
        vocab = loop.speculation.runner.model.config.vocab_size
        params = replace(request.params, stop_token_ids=request.eos)
        self.sequence = Sequence(
            id="x",
            prompt=request.prompt,
            sampler=Sampler(params, vocab, request.prompt),
            max_tokens=request.max_tokens,
            eos_ids=request.eos,
            text=AnswerText(lambda token: chr(0x100 + token).encode("utf-8", "surrogatepass"), request.stops),
            alternatives=0,
            on_emission=self._hear,
            drafter=drafter,
            prediction=PredictionState(request.prompt, predicted) if predicted else None,
            salt=salt,
            last_turn=last_turn,
        )

    def _hear(self, emission: Emission) -> None:
        self._texts.append(emission.text)
        if emission.error:
            self._errors.append(emission.error)

    @property
    def outcome(self) -> Outcome:
        assert not self._errors, self._errors
        sequence = self.sequence
        return Outcome(
            tuple(sequence.tokens),
            tuple(sequence.logprobs),
            "".join(self._texts),
            sequence.finish,
            tuple(sequence.steps),
        )


class ScriptedDrafter:
    """Knows each prompt's continuation and errs at a given rate, so that every acceptance length occurs."""

    name, fingerprint = "scripted", "scripted"

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], hit_rate: float, vocab: int) -> None:
        self._answers, self._hit_rate, self._vocab = answers, hit_rate, vocab
        self._random = random.Random(0)

    block = None

    def attach(self, memory: Memory) -> None:
        pass

    def new_state(self, prompt: Ids[int], pages: list[int]) -> dict[str, Any]:
        return {"prompt": tuple(prompt), "done": 0}

    def resume(self, state: Any, boundary: int, known: bool) -> None:
        pass

    def prefill(self, state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        assert tuple(tokens[0, :valid].tolist()) == state["prompt"][start : start + valid]

    def observe(self, state: Any, tokens: Ids[int], hidden: Tensor) -> None:
        assert len(hidden) == len(tokens)
        state["done"] += len(tokens)

    def propose(self, states: Ids[Any], counts: Ids[int], choose: Choose) -> Proposal:
        drafts = [self._guess(state, max(counts)) for state in states]
        return Proposal(torch.tensor(drafts), counts)

    def _guess(self, state: Any, count: int) -> list[int]:
        known = self._answers[state["prompt"]][state["done"] : state["done"] + count]
        drafts = [*known, *[0] * (count - len(known))]
        return [d if self._random.random() < self._hit_rate else (d + 1) % self._vocab for d in drafts]
