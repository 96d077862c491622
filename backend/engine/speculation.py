"""The speculative step over the batch: draft K, verify K + 1 rows, accept what the target itself chose.

By coupled sampling the emitted tokens are the target's own choices; drafts only decide how many a step yields (L2).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.draft_length import DraftLength
from backend.engine.memory import Memory
from backend.engine.runner import Runner
from backend.engine.sampling import SamplerBatch, leading
from backend.engine.sequence import Emission, EmittedToken
from backend.engine.sequence import Sequence as Running
from backend.engine.statistics import TimedStep
from backend.interface import BackendError, GenerationFailed, Step
from backend.ops.delta_replay import MAX_ROWS

log = logging.getLogger(__name__)

PREDICTION, GRAMMAR = "prediction", "grammar"  # sources of drafts beside the drafters


@dataclass(frozen=True)
class _Blocks:
    """What a step runs: row 0 is each sequence's last token, the rest its drafts (or tokens it replays)."""

    tokens: Tensor  # int64 [B, R]
    counts: list[int]  # rows that are meant
    sources: list[str]


class Speculation:
    """A runner over one memory, and the draft length in force. Call under `torch.inference_mode()`."""

    def __init__(
        self, runner: Runner, memory: Memory, lengths: DraftLength, watch: Callable[[TimedStep], None] | None = None
    ) -> None:
        """`watch` hears of every step of one drafter's sequences (or of sequences without one) that ran alone."""
        self.runner, self.memory, self.lengths, self.watch = runner, memory, lengths, watch
        self.draft_tokens = 0  # K of the last step

    def prefill(self, sequence: Running, rows: int) -> None:
        """Run the next `rows` prompt tokens, one chunk of the grid; the last also emits the first generated token."""
        assert sequence.place is not None
        start = sequence.prefilled
        chunk = sequence.prompt[start : start + rows]
        tokens, hidden = self.runner.prefill_chunk(self.memory, sequence.place, chunk, start)
        if sequence.drafter:
            try:
                sequence.drafter.prefill(sequence.draft_state, tokens, hidden, start, len(chunk))
            except Exception:
                go_on_without_drafts(sequence)
        sequence.prefilled += len(chunk)
        if sequence.scoring:
            self._score(sequence, hidden[0], start)
        if sequence.prefilled < len(sequence.prompt):
            return
        if not sequence.max_tokens:
            sequence.end("length")
            return
        last = hidden[:, len(chunk) - 1 : len(chunk)]  # [1, 1, H]
        if sequence.tokens:  # it was preempted: what follows is known
            self._observe(sequence, sequence.tokens[:1], last[0])
            return
        logits = self.runner.model.logits(last)
        none = torch.empty(1, 0, dtype=torch.int64, device=logits.device)
        chosen = SamplerBatch([sequence.sampler], [sequence.length]).verify(logits, none)
        _, told, logprobs = _read(chosen, chosen, _logprobs(logits, chosen))
        self._emit(sequence, logits[0], last[0], told[0], logprobs[0], [])

    def _score(self, sequence: Running, hidden: Tensor, start: int) -> None:
        """Tell how likely the prompt's tokens are that follow the rows run last, hidden [R, H] from `start`."""
        if sequence.scored > start + 1:  # told before it was preempted
            return
        following = sequence.prompt[start + 1 : sequence.prefilled + 1]
        told = [] if start else [EmittedToken(sequence.prompt[0], math.nan, ())]
        if following:
            logits = self.runner.model.logits(hidden[: len(following)])  # [r, V]
            tokens = torch.tensor(following, device=hidden.device)
            told += _scored(logits, tokens, sequence.prompt_alternatives or 0)
        sequence.scored += len(told)
        sequence.on_emission(Emission("", (), prompt=tuple(told)))

    def step(self, batch: Sequence[Running], alone: bool = True) -> None:
        """One verify step of all sequences being decoded, in the order of their slots; its counts are DESIGN §6's.

        `alone`: nothing else ran in this turn, so that the step's duration is its own.
        """
        began = time.perf_counter()
        alone = alone and all(sequence.replayed == len(sequence.tokens) - 1 for sequence in batch)  # none runs again
        before = [len(sequence.steps) for sequence in batch]
        drafters = {sequence.drafter.name if sequence.drafter else "none" for sequence in batch}
        self.draft_tokens = self.lengths.choose(len(batch))
        blocks = self._blocks(batch, self.draft_tokens)
        logits, hidden, chosen, chosen_logprobs = self._verify(batch, blocks)
        given, told, logprobs = _read(blocks.tokens, chosen, chosen_logprobs)
        for i, sequence in enumerate(batch):
            if sequence.finish:  # its sampling failed
                continue
            if sequence.replayed < len(sequence.tokens) - 1:
                self._replay(sequence, blocks.counts[i], hidden[i])
                continue
            drafts = given[i][1 : blocks.counts[i]]
            try:
                self._emit(sequence, logits[i], hidden[i], told[i], logprobs[i], drafts, blocks.sources[i])
            except Exception as error:
                # A fault in one sequence's text is its own failure; the others' states are their own.
                fail(sequence, error)
        seconds = time.perf_counter() - began if alone else None
        outcomes = [step for sequence, n in zip(batch, before, strict=True) for step in sequence.steps[n:]]
        self.lengths.observe(len(batch), self.draft_tokens, seconds, outcomes)
        # One that has failed meanwhile did not do all of it, and its drafter may not be told any more.
        if self.watch and seconds and len(drafters) == 1 and len(outcomes) == len(batch):
            (drafter,) = drafters
            if {source for source in blocks.sources if source != "none"} <= {drafter}:
                self.watch(TimedStep(drafter, len(batch), sum(step.accepted for step in outcomes), seconds))

    def _verify(self, batch: Sequence[Running], blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits [B, R, V], hidden states [B, R, H], the target's tokens [B, R] and their logprobs.

        Together with `_blocks` the part of a step that stays on the device: nothing is read back before it is done.
        """
        places = [sequence.place for sequence in batch if sequence.place]
        starts = [sequence.held for sequence in batch]
        logits, hidden = self.runner.verify(self.memory, places, blocks.tokens, blocks.counts, starts)
        chosen = _chosen(batch, starts, logits, blocks.tokens[:, 1:])
        return logits, hidden, chosen, _logprobs(logits, chosen)

    def _blocks(self, batch: Sequence[Running], most: int) -> _Blocks:
        """Drafts from the first source that has any: the grammar, the client's prediction, the drafter."""
        blocks: list[list[int]] = []
        sources: list[str] = []
        waiting: dict[int, list[int]] = {}  # drafter → members of the batch
        limits = [min(most, sequence.remaining - 1) for sequence in batch]
        for i, (sequence, limit) in enumerate(zip(batch, limits, strict=True)):
            behind = sequence.tokens[sequence.replayed : -1][:MAX_ROWS]
            drafts, source = behind[1:], "none"
            if not behind and limit > 0:
                if drafts := sequence.sampler.forced(limit):
                    source = GRAMMAR
                elif sequence.prediction and sequence.prediction.source == PREDICTION:
                    drafts, source = sequence.prediction.propose(limit), PREDICTION
                elif sequence.drafter:
                    source = sequence.drafter.name
                    waiting.setdefault(id(sequence.drafter), []).append(i)
            blocks.append([behind[0] if behind else sequence.tokens[-1], *drafts])
            sources.append(source)
        proposals = []
        for members in waiting.values():
            some = [batch[i] for i in members]
            drafter = some[0].drafter
            assert drafter is not None
            samplers = SamplerBatch([s.sampler for s in some], [s.length for s in some])
            states = [s.draft_state for s in some]
            try:
                proposals.append((members, drafter.propose(states, [limits[i] for i in members], samplers.draft)))
            except Exception:
                for sequence in some:
                    go_on_without_drafts(sequence)
        counts = [len(block) for block in blocks]
        for members, proposal in proposals:
            for i, count in zip(members, proposal.counts, strict=True):
                counts[i] = 1 + count
        rows = max(counts)
        tokens = torch.tensor([[*block, *[0] * (rows - len(block))] for block in blocks], device=self.runner.device)
        for members, proposal in proposals:
            width = min(proposal.tokens.shape[1], rows - 1)
            tokens[members, 1 : 1 + width] = proposal.tokens[:, :width].to(tokens.device)
        return _Blocks(tokens, counts, sources)

    def _replay(self, sequence: Running, rows: int, hidden: Tensor) -> None:
        """Rows of known tokens are in memory again."""
        self._observe(sequence, sequence.tokens[sequence.replayed + 1 : sequence.replayed + 1 + rows], hidden[:rows])
        sequence.replayed += rows

    def _observe(self, sequence: Running, tokens: Sequence[int], hidden: Tensor) -> None:
        if sequence.drafter:
            try:
                sequence.drafter.observe(sequence.draft_state, tokens, hidden)
            except Exception:
                go_on_without_drafts(sequence)

    def _emit(
        self,
        sequence: Running,
        logits: Tensor,
        hidden: Tensor,
        chosen: Sequence[int],
        logprobs: Sequence[float],
        drafts: Sequence[int],
        source: str = "none",
    ) -> None:
        """Take the target's tokens until one differs from its draft or ends the sequence.

        logits float32 [R, V], hidden [R, H]; `chosen` and `logprobs` of each row.
        """
        first = not sequence.tokens  # it comes from the prompt's last row and belongs to no step
        text, accepted = "", 0
        tokens: list[EmittedToken] = []
        fault: Exception | None = None
        for row, token in enumerate(chosen[: len(drafts) + 1]):
            try:
                best = _alternatives(logits[row], sequence.alternatives)
                emitted = _checked(sequence, EmittedToken(token, logprobs[row], best))
                text += sequence.append(emitted)
            except Exception as error:
                fault = error
                break
            tokens.append(emitted)
            matched = row < len(drafts) and token == drafts[row]
            accepted += matched
            if sequence.finish or not matched:
                break
        ids = [token.token_id for token in tokens]
        step: Step | None = None
        if not first and tokens:
            # Slots past the token that ended the sequence were neither proposed nor accepted; rejected ones were.
            proposed = min(len(drafts), len(tokens)) if sequence.finish else len(drafts)
            step = Step(proposed, accepted)
            sequence.steps.append(step)
            sequence.sources.append(source)
            sequence.replayed += len(ids)
        if sequence.prediction:
            sequence.prediction.extend(ids)
        if not (sequence.finish or fault):
            self._observe(sequence, ids, hidden[: len(ids)])
        if tokens:
            sequence.on_emission(Emission(text, tuple(tokens), sequence.finish, step=step, source=source))
        if fault:  # what came before it has been told
            raise fault


def go_on_without_drafts(sequence: Running) -> None:
    """Its drafter has failed. Drafts only ever save time: without them the same tokens come."""
    assert sequence.drafter is not None
    log.exception("drafter %s failed; sequence %s goes on without it", sequence.drafter.name, sequence.id)
    sequence.drafter = None


def fail(sequence: Running, error: Exception) -> None:
    """End a sequence for a fault, and say so."""
    if isinstance(error, BackendError):
        sequence.end("error", str(error))
    else:
        log.error("sequence %s failed", sequence.id, exc_info=error)
        sequence.end("error", f"{type(error).__name__}: {error}")


def _chosen(batch: Sequence[Running], starts: Sequence[int], logits: Tensor, drafts: Tensor) -> Tensor:
    """The target's tokens int64 [B, R]. A fault in one sequence's sampling ends it and nobody else."""
    positions = [start + 1 for start in starts]
    try:
        return SamplerBatch([sequence.sampler for sequence in batch], positions).verify(logits, drafts)
    except Exception:
        chosen = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        for i, sequence in enumerate(batch):
            try:
                alone = SamplerBatch([sequence.sampler], positions[i : i + 1])
                chosen[i] = alone.verify(logits[i : i + 1], drafts[i : i + 1])[0]
            except Exception as error:
                fail(sequence, error)
        return chosen


def _checked(sequence: Running, token: EmittedToken) -> EmittedToken:
    if sequence.sampler.failure:
        raise GenerationFailed(f"the grammar cannot go on: {sequence.sampler.failure}")
    if not math.isfinite(token.logprob):
        raise GenerationFailed("the model produced logits that are not finite")
    return token


def _logprobs(logits: Tensor, chosen: Tensor) -> Tensor:
    """Of the raw logits [B, R, V], for the tokens chosen [B, R]."""
    return torch.log_softmax(logits, dim=-1).gather(-1, chosen[..., None])[..., 0]


def _read(
    tokens: Tensor, chosen: Tensor, logprobs: Tensor
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """The one host read of a step, all [B, R]."""
    if tokens.device.type != "cpu":
        both = torch.stack((tokens.double(), chosen.double(), logprobs.double())).cpu()  # ids are exact in float64
        tokens, chosen, logprobs = both[0].long(), both[1].long(), both[2]
    return tokens.tolist(), chosen.tolist(), logprobs.tolist()


def _scored(logits: Tensor, tokens: Tensor, alternatives: int) -> list[EmittedToken]:
    """The given tokens int64 [r] by raw logits float32 [r, V]; of equal logits the lower id ranks first."""
    logprobs, ids = torch.log_softmax(logits, dim=-1), torch.arange(logits.shape[-1], device=logits.device)
    mine = logits.gather(-1, tokens[:, None])  # [r, 1]
    ahead = (logits > mine) | ((logits == mine) & (ids < tokens[:, None]))
    told = tokens[:, None]  # [r, 1 + alternatives]
    if alternatives:
        best = [leading(row, min(alternatives, len(row))) for row in logits]
        told = torch.cat((told, torch.stack(best)), dim=-1)
    ranks = 1 + ahead.sum(-1, keepdim=True)
    # One host read, in which ids are exact.
    read = torch.cat((ranks.double(), told.double(), logprobs.gather(-1, told).double()), dim=-1).tolist()
    found = []
    for rank, *row in read:
        pairs = [
            (int(token), logprob) for token, logprob in zip(row[: len(row) // 2], row[len(row) // 2 :], strict=True)
        ]
        if not math.isfinite(pairs[0][1]):
            raise GenerationFailed("the model produced logits that are not finite")
        found.append(EmittedToken(*pairs[0], tuple(pairs[1:]), int(rank)))
    return found


def _alternatives(logits: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    logprobs = torch.log_softmax(logits, dim=-1)
    best = leading(logits, min(count, len(logits)))
    return tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
