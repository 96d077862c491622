"""How one sequence is sampled: effective values, every default filled in. Knows no tensor and no text."""

from __future__ import annotations

from dataclasses import dataclass

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """top_k 0 = off, top_p 1 = off, min_p 0 = off, temperature 0 = greedy; penalties as in `backend.interface`.

    `seed` is a uint64; `choice` the i of n. `bad_words`: sequences of ids, the last of which may not follow the others
    in the output. `stop_token_ids`: every id that ends the answer, the model's own included unless they are ignored;
    `min_tokens` bans them before that many tokens of output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def plain(self) -> bool:
        """Logits are taken as they are: neither penalty nor bias nor ban."""
        bans = self.bad_words or (self.min_tokens and self.stop_token_ids)
        return not (self.penalised or self.logit_bias or bans)
