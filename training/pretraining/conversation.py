"""A conversation and its exact text in Qwen3.5's chat format, with the parts the model itself has to write marked.

Rendering equals what the bundled chat template gives (a test holds it); knows no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

_SYSTEM = (
    "You are a helpful assistant.",
    "Be brief.",
    "You answer questions about Python.",
    "You are a Python expert. Answer in one or two sentences.",
)


@dataclass(frozen=True)
class Turn:
    """One user message and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Turns in order; `reasoning` belongs to the last answer, empty = thinking off."""

    turns: tuple[Turn, ...]
    system: str = ""
    reasoning: str = ""

    def messages(self) -> list[dict[str, str]]:
        """OpenAI message objects up to and including the last question."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return found[:-1]


def with_reasoning(conversation: Conversation, thought: str, rng: random.Random) -> Conversation:
    """Sometimes a system message, sometimes a short reasoning: so that both forms are known to the model."""
    system = rng.choice(_SYSTEM) if rng.random() < 0.08 else ""
    reasoning = f"{thought} I answer it directly." if rng.random() < 0.05 else ""
    return replace(conversation, system=system, reasoning=reasoning)


def render(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """Pieces of text in order; True marks those the model writes (an answer and its `<|im_end|>`)."""
    if conversation.system:
        yield f"<|im_start|>system\n{conversation.system}<|im_end|>\n", False
    for i, turn in enumerate(conversation.turns):
        yield f"<|im_start|>user\n{turn.question.strip()}<|im_end|>\n<|im_start|>assistant\n", False
        last = i == len(conversation.turns) - 1
        if last and conversation.reasoning:
            yield "<think>\n", False
            yield f"{conversation.reasoning}\n</think>\n\n", True
        elif last:
            yield "<think>\n\n</think>\n\n", False
        # Earlier answers stand in the history without their wrapper: they are context, not output.
        yield f"{turn.answer.strip()}<|im_end|>", last
        yield "\n", False
