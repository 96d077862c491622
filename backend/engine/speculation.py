"""The speculative step of one sequence: draft K, verify K + 1 rows, accept what the target itself chose.

By coupled sampling the emitted tokens are the target's own choices; drafts only decide how many a step yields (L2).
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.drafters.protocol import Drafter
from backend.engine.forms import GRID
from backend.engine.runner import Rows, Runner
from backend.engine.sampling import token_logprobs
from backend.engine.sequence import Emission, EmittedToken, Sequence
from backend.interface import GenerationFailed, Step


@dataclass(frozen=True)
class Speculation:
    """A runner, the drafter in force (None decodes plainly) and the draft length."""

    runner: Runner
    drafter: Drafter | None
    draft_tokens: int

    def prefill(self, sequence: Sequence) -> None:
        """Run the next prompt chunk; the last one also emits the first generated token."""
        if sequence.cache is None:
            sequence.cache = self.runner.new_cache()
            sequence.draft_state = self.drafter.new_state() if self.drafter else None
        start = sequence.prefilled
        chunk = sequence.prompt[start : start + GRID]
        tokens, hidden = self.runner.prefill_chunk(sequence.cache, chunk, start)
        if self.drafter:
            self.drafter.prefill(sequence.draft_state, tokens, hidden, start, len(chunk))
        sequence.prefilled += len(chunk)
        if not sequence.in_prefill:
            last = hidden[:, len(chunk) - 1 : len(chunk)]
            self._emit(sequence, Rows(sequence.length - 1, self.runner.model.logits(last[0]), last), [])

    def decode(self, sequence: Sequence) -> None:
        """One verify step; every count of it is DESIGN §6's."""
        assert sequence.cache is not None
        drafts = self._draft(sequence)
        rows = self.runner.verify(sequence.cache, [sequence.tokens[-1], *drafts], sequence.length - 1)
        emitted = self._emit(sequence, rows, drafts)
        sequence.cache.accept(emitted)

    def _draft(self, sequence: Sequence) -> list[int]:
        count = min(self.draft_tokens, sequence.remaining - 1)
        if self.drafter is None or count < 1:
            return []
        return self.drafter.propose(sequence.draft_state, count, sequence.sampler.choose)

    def _emit(self, sequence: Sequence, rows: Rows, drafts: list[int]) -> int:
        """Choose the target's tokens until one differs from its draft or ends the sequence; returns how many."""
        from_prefill = not sequence.tokens
        text, accepted = "", 0
        tokens: list[EmittedToken] = []
        for row, logits in enumerate(rows.logits):
            try:
                token = sequence.sampler.choose(logits, sequence.length)
            except GenerationFailed:
                if not tokens:
                    raise
                break  # what was chosen before it is told first; the next step meets the same row and fails there
            logprob, alternatives = token_logprobs(logits, token, sequence.alternatives)
            tokens.append(EmittedToken(token, logprob, alternatives))
            text += sequence.append(tokens[-1])
            matched = row < len(drafts) and token == drafts[row]
            accepted += matched
            if sequence.finish or not matched:
                break
        if not from_prefill:
            # Slots past the token that ended the sequence were neither proposed nor accepted; rejected ones were.
            proposed = min(len(drafts), len(tokens)) if sequence.finish else len(drafts)
            sequence.steps.append(Step(proposed, accepted))
        if self.drafter and not sequence.finish:
            ids = [token.token_id for token in tokens]
            self.drafter.observe(sequence.draft_state, ids, rows.hidden[:, : len(ids)])
        sequence.on_emission(Emission(text, tuple(tokens), sequence.finish))
        return len(tokens)
