"""A student before it may serve: read and checked, and tried on a few answers beside those that are running.

Runs on a thread of its own with a memory of its own; touches nothing that the engine's sequences hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backend.drafters.protocol import Drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.drafters.student import Student, check_name, load_student, student_drafter
from backend.engine.cache import KeyValuePages
from backend.engine.draft_length import FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.memory import Memory
from backend.engine.probe import settle
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Emission, Sequence
from backend.engine.speculation import Speculation
from backend.engine.statistics import SpeculationCounts
from backend.free_memory import free_bytes
from backend.interface import BackendError, BackendUnavailable, DrafterStats, GenerationFailed, InvalidRequest
from backend.loading import GIB, Loaded
from backend.models.student import StudentBlock
from backend.ops.delta_replay import MAX_ROWS
from backend.ops.linear import RowTile
from backend.text.answer import AnswerText

SLOTS = 3  # K of the trial
TOKENS = 64  # an answer's most

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that returns the n-th Fibonacci number.",
    'Return a JSON object with the keys "name", "age" and "city" for an invented person.',
    "Write a short paragraph about the sea at night.",
)


@dataclass(frozen=True)
class Tried:
    """The prompts' greedy answers as one drafter drafted them."""

    stats: DrafterStats
    steps: int  # verify steps
    answers: tuple[tuple[int, ...], ...]

    @property
    def acceptance(self) -> float:
        """surv_0 = A_0 / P_0; 0 where it drafted nothing."""
        proposed = self.stats.draft_tokens_per_pos[0]
        return self.stats.accepted_tokens_per_pos[0] / proposed if proposed else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "drafter": self.stats.drafter,
            "steps": self.steps,
            "drafts": self.stats.drafts,
            "draft_tokens_per_pos": self.stats.draft_tokens_per_pos,
            "accepted_tokens_per_pos": self.stats.accepted_tokens_per_pos,
            "acceptance": self.acceptance,
            "acceptance_length": 1 + self.stats.accepted_tokens / max(self.steps, 1),
        }


@dataclass(frozen=True)
class Candidate:
    """A drafter that may be attached. `pool`: room for its block, None where the memory has that block already."""

    drafter: RecursiveDrafter
    pool: KeyValuePages | None
    tiles: Mapping[str, RowTile]  # of its products
    trial: Mapping[str, Any]  # JSON-ready


@dataclass(frozen=True)
class Examination:
    """What a candidate is examined by. `going_on`: False once nobody wants the result any more."""

    loaded: Loaded
    active: Drafter | None
    taken: Collection[str]  # names of other drafters
    min_acceptance: float
    going_on: Callable[[], bool]

    def of(self, directory: Path, name: str | None) -> Candidate:
        """Raises InvalidRequest for what is wrong with the candidate, BackendUnavailable where it is not `going_on`."""
        try:
            return self._examined(directory, name)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise InvalidRequest(
                f"Memory ran out while {directory.name} was tried: a smaller --kv-memory would leave more.",
                param="path",
                code="not_enough_memory",
            ) from error

    def _examined(self, directory: Path, name: str | None) -> Candidate:
        loaded = self.loaded
        torch.set_num_threads(int(str(loaded.build["threads"])))  # rows agree by the engine's thread count
        try:
            if name is not None:
                check_name(name)
        except BackendError as error:
            raise InvalidRequest(str(error), param="name", code="invalid_value") from error
        try:
            student = load_student(
                directory, loaded.runner.model, loaded.fingerprints.weights, loaded.fingerprints.tokenizer
            )
            student = student if name is None else replace(student, name=name)
            if student.name in self.taken:
                raise InvalidRequest(f"There is a drafter {student.name!r} already.", param="name", code="name_taken")
            pool = _room(loaded.loop.speculation.memory, student)
        except InvalidRequest:
            raise
        except BackendError as error:
            raise InvalidRequest(str(error), param="path", code="invalid_drafter") from error
        drafter, tiles = student_drafter(loaded.runner.model, student), dict(loaded.probe.tiles)
        with torch.inference_mode():
            for module in drafter.draft_block.own:
                settle(module, tiles)
            candidate, active = self._tried(drafter), self._tried(self.active)
        self._judge(candidate, active)
        trial = {
            "prompts": len(PROMPTS),
            "min_acceptance": self.min_acceptance,
            "candidate": candidate.as_json(),
            "active": active.as_json(),
        }
        return Candidate(drafter, pool, tiles, trial)

    def _judge(self, candidate: Tried, active: Tried) -> None:
        name, counts = candidate.stats.drafter, candidate.stats
        if candidate.answers != active.answers:
            raise InvalidRequest(
                f"{name} changes answers, which no drafter may: please report this.", param="path", code="wrong_answers"
            )
        if candidate.acceptance < self.min_acceptance:
            raise InvalidRequest(
                f"{name} drafts too badly: of its first draft tokens on the built-in prompts "
                f"{counts.accepted_tokens_per_pos[0]} of {counts.draft_tokens_per_pos[0]} were accepted, less than "
                f"min_acceptance {self.min_acceptance:g} ({active.stats.drafter}: {active.acceptance:.3f}).",
                param="path",
                code="low_acceptance",
            )

    def _tried(self, drafter: Drafter | None) -> Tried:
        loaded, prompts = self.loaded, _prompts(self.loaded)
        name = drafter.name if drafter else "none"
        memory = loaded.runner.new_memory(max(map(len, prompts)) + TOKENS + MAX_ROWS, slots=len(prompts))
        if drafter:
            drafter = copy.copy(drafter)  # the same weights over another memory
            drafter.attach(memory)
        lengths = FixedDraftLength(SLOTS if drafter else 0)
        loop = Loop(Speculation(loaded.runner, memory, lengths), Scheduler(memory, len(prompts), None))
        ends: list[Emission] = []
        sequences = [_sequence(loaded, prompt, drafter, ends) for prompt in prompts]
        for sequence in sequences:
            loop.add(sequence)
        while loop.busy:
            if not self.going_on():
                raise BackendUnavailable("the engine is shutting down")
            loop.turn()
        if error := next((end.error for end in ends if end.error), None):
            raise GenerationFailed(error)
        if any(sequence.drafter is not drafter for sequence in sequences):
            raise InvalidRequest(f"{name} cannot draft: the server's log says why.", "path", "invalid_drafter")
        counts = SpeculationCounts([name], SLOTS)
        steps = [step for sequence in sequences for step in sequence.steps]
        for step in steps:
            counts.add(name, step)
        return Tried(counts.snapshot()[0], len(steps), tuple(tuple(sequence.tokens) for sequence in sequences))


def _prompts(loaded: Loaded) -> list[tuple[int, ...]]:
    encode, plain = loaded.tokenizer.encode_chat, {"enable_thinking": False}
    return [encode([{"role": "user", "content": content}], plain).ids for content in PROMPTS]


def _sequence(loaded: Loaded, prompt: Ids[int], drafter: Drafter | None, ends: list[Emission]) -> Sequence:
    return Sequence(
        id="trial",
        prompt=tuple(prompt),
        sampler=Sampler(SamplingParams(temperature=0.0, seed=0), loaded.vocab, tuple(prompt)),
        max_tokens=TOKENS,
        eos_ids=loaded.tokenizer.eos_ids,
        text=AnswerText(loaded.tokenizer.text_bytes, ()),
        alternatives=0,
        on_emission=lambda emission: ends.append(emission) if emission.finish else None,
        drafter=drafter,
    )


def _room(memory: Memory, student: Student) -> KeyValuePages | None:
    """Raises InvalidRequest where there is none."""
    if memory.has_block(student.fingerprint):
        return None
    block: StudentBlock = student.block
    needed, free = memory.block_bytes(block.kv_heads, block.head_dim), free_bytes(block.d2t.device)
    if free is not None and needed > free:  # else it is tried
        raise InvalidRequest(
            f"{student.name} needs {needed / GIB:.3f} GiB for its keys and values, {free / GIB:.3f} GiB are free: "
            "a smaller --kv-memory would leave more.",
            param="path",
            code="not_enough_memory",
        )
    return memory.new_block(block.kv_heads, block.head_dim)
