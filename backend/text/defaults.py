"""Sampling defaults of a checkpoint: its generation_config, else the model card's rows by thinking mode."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from backend.interface import BackendError


@dataclass(frozen=True)
class Defaults:
    """temperature 0 = greedy, top_p 1 = off, top_k 0 = off, min_p 0 = off, penalties 0 and repetition 1 = off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


# Qwen3.5's model card, rows "thinking, general" and "non-thinking, general".
_THINKING = Defaults(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5)
_NON_THINKING = Defaults(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5)


@dataclass(frozen=True)
class SamplingDefaults:
    """Both modes' defaults; equal when the checkpoint states its own."""

    thinking: Defaults = _THINKING
    non_thinking: Defaults = _NON_THINKING

    @classmethod
    def load(cls, directory: Path) -> SamplingDefaults:
        """From `directory`/generation_config.json where it states any sampling value. Raises BackendError if broken."""
        path = directory / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            stated = json.loads(path.read_text(encoding="utf-8"))
            own = Defaults(
                temperature=float(stated.get("temperature", 1.0)),
                top_p=float(stated.get("top_p", 1.0)),
                top_k=int(stated.get("top_k", 0)),
                min_p=float(stated.get("min_p", 0.0)),
                repetition_penalty=float(stated.get("repetition_penalty", 1.0)),
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise BackendError(f"cannot read {path}: {error}") from None
        return cls(own, own) if own != Defaults() else cls()

    def for_mode(self, *, thinking: bool) -> Defaults:
        return self.thinking if thinking else self.non_thinking
