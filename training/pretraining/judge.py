"""How a model speaks and how well its drafter foresees it: its own answers to held-out prompts, through the engine.

Acceptance alone can be fooled by a model that repeats itself, so repetition is measured beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backend.interface import ChatRequest, Result, SamplingRequest, Step
from backend.loading import LocalOptions
from backend.local import LocalBackend
from training.pretraining import sources
from training.pretraining.conversation import Conversation
from training.pretraining.corpus import conversations
from training.repetition import distinct_ratio, loops

SLOTS = 4


@dataclass(frozen=True)
class Sample:
    """One judged answer."""

    question: str
    answer: str
    tokens: int
    finish: str
    loops: bool


@dataclass(frozen=True)
class Judgement:
    """Figures of one temperature. `surv[s]`: A_s / P_s; `tau`: 1 + Σ A_s / verify steps; `distinct`: different 4-grams
    over all 4-grams, counted inside each answer; `looping`: answers in which an 8-gram stands three times;
    `surv_steady`, `tau_steady`: the same figures over the other answers."""

    temperature: float
    answers: int
    tokens: int
    surv: tuple[float, ...]
    tau: float
    surv_steady: tuple[float, ...]
    tau_steady: float
    distinct: float
    looping: int
    unfinished: int
    samples: tuple[Sample, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def survival(steps: Sequence[Step], slots: int = SLOTS) -> tuple[tuple[float, ...], float]:
    """surv per slot (0 where a slot was never proposed) and τ; steps count as the engine reports them."""
    proposed = [sum(step.drafted > s for step in steps) for s in range(slots)]
    accepted = [sum(step.accepted > s for step in steps) for s in range(slots)]
    surv = tuple(a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True))
    return surv, 1.0 + (sum(accepted) / len(steps) if steps else 0.0)


def held_out_conversations(count: int, seed: int = 7) -> list[Conversation]:
    """Different conversations about held-out modules, thinking off."""
    found: dict[str, Conversation] = {}
    for conversation in conversations(sources.collect(), seed, held_out=True):
        if not conversation.reasoning:
            found.setdefault(str(conversation.messages()), conversation)
        if len(found) == count:
            break
    return list(found.values())


def judge(
    model: str,
    conversations: Sequence[Conversation],
    temperatures: Sequence[float],
    *,
    max_tokens: int = 200,
    threads: int | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> list[Judgement]:
    """Answer every conversation at every temperature with `SLOTS` drafts a step. Raises BackendError."""
    options = LocalOptions(model=model, draft_tokens=SLOTS, threads=threads)
    return asyncio.run(_judge(options, conversations, temperatures, max_tokens, report))


async def _judge(
    options: LocalOptions,
    conversations: Sequence[Conversation],
    temperatures: Sequence[float],
    max_tokens: int,
    report: Callable[[int], None],
) -> list[Judgement]:
    backend = LocalBackend(options)
    await backend.start()
    try:
        judgements: list[Judgement] = []
        for temperature in temperatures:
            results = []
            for i, conversation in enumerate(conversations):
                sampling = SamplingRequest(temperature=temperature, seed=i, max_tokens=max_tokens)
                request = ChatRequest(f"judge-{temperature}-{i}", conversation.messages(), sampling)
                results.append(await _result(backend, request))
                report(len(judgements) * len(conversations) + i + 1)
            judgements.append(summarise(temperature, conversations, results))
        return judgements
    finally:
        await backend.close()


async def _result(backend: LocalBackend, request: ChatRequest) -> Result:
    async for event in backend.chat(request):
        if event.result is not None:
            return event.result
    raise AssertionError("the backend ended a generation without its result")


def summarise(temperature: float, conversations: Sequence[Conversation], results: Sequence[Result]) -> Judgement:
    """The figures of one temperature's results, in the conversations' order."""
    surv, tau = survival([step for result in results for step in result.steps])
    steady = [step for result in results if not loops(result.completion_ids) for step in result.steps]
    surv_steady, tau_steady = survival(steady)
    samples = tuple(
        Sample(
            conversation.turns[-1].question,
            result.content,
            len(result.completion_ids),
            result.finish_reason,
            loops(result.completion_ids),
        )
        for conversation, result in zip(conversations, results, strict=True)
    )
    return Judgement(
        temperature=temperature,
        answers=len(results),
        tokens=sum(sample.tokens for sample in samples),
        surv=surv,
        tau=tau,
        surv_steady=surv_steady,
        tau_steady=tau_steady,
        distinct=distinct_ratio([result.completion_ids for result in results]),
        looping=sum(sample.loops for sample in samples),
        unfinished=sum(sample.finish != "stop" for sample in samples),
        samples=samples,
    )
