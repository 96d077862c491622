"""Documents through the trunk again, several at a time, in the regimes of serving: hidden states and the scalars of
the logits, bitwise those that the engine had. Knows the engine's runner; writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.runner import ForcedRows, Runner
from training.data import Document, Forced, Scalars

Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""

_TOGETHER = 16  # documents in a batch
_POSITIONS = 32_768  # in a batch, where more than one document is in it


@dataclass(frozen=True)
class Readings:
    """What to read off the logits. `vocab`: ids that may be chosen; `hot` int64 [S]: the hot vocabulary's."""

    vocab: int
    hot: Tensor | None = None


def force_documents(
    runner: Runner,
    documents: Sequence[Document],
    report: Report = lambda doing, done, total: None,
    readings: Readings | None = None,
) -> list[Forced]:
    """All of them, in order, their tensors on the model's device; with scalars where `readings` are asked for."""
    found: list[Forced] = []
    total = sum(len(document.tokens) for document in documents)
    for forced in force_each(runner, documents, readings):
        found.append(forced)
        report("forcing documents", sum(len(one.document.tokens) for one in found), total)
    return found


def force_each(
    runner: Runner, documents: Sequence[Document], readings: Readings | None = None, together: int = _TOGETHER
) -> Iterator[Forced]:
    """As `force_documents`, a batch of at most `together` documents at a time."""
    for batch in _batches(documents, together):
        yield from _force(runner, batch, readings)


def _batches(documents: Sequence[Document], together: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        longest = max(len(one.tokens) for one in (*batch, document))
        if batch and (len(batch) == together or longest * (len(batch) + 1) > _POSITIONS):
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def _force(runner: Runner, documents: Sequence[Document], readings: Readings | None) -> list[Forced]:
    H, device = runner.model.config.hidden_size, runner.device
    # Made out of inference mode, so that training can compute gradients through what reads them.
    made = [
        Forced(
            document,
            torch.empty(len(document.tokens), H, dtype=runner.dtype, device=device),
            None if readings is None else _no_scalars(len(document.tokens), device),
        )
        for document in documents
    ]
    with torch.inference_mode():
        for rows in runner.force_together([(document.prompt, document.answer) for document in documents]):
            forced = made[rows.document]
            forced.hidden[rows.start : rows.start + len(rows.hidden)] = rows.hidden
            if readings is not None and forced.scalars is not None:
                _read_off(rows, forced.document, forced.scalars, readings)
    return made


def _no_scalars(length: int, device: torch.device) -> Scalars:
    def unknown() -> Tensor:
        return torch.full((length,), torch.nan, device=device)

    return Scalars(unknown(), torch.zeros(length, dtype=torch.int64, device=device), unknown(), unknown())


def _read_off(rows: ForcedRows, document: Document, scalars: Scalars, readings: Readings) -> None:
    """The scalars of rows that have logits and a token after them."""
    end = rows.start + len(rows.hidden)
    first, last = end - len(rows.logits), min(end, len(document.tokens) - 1)
    if first >= last:
        return
    logits = rows.logits[: last - first]  # [r, V]
    following = torch.from_numpy(document.tokens[first + 1 : last + 1]).to(logits.device, torch.int64)  # [r]
    log_z = torch.logsumexp(logits, dim=-1)
    scalars.log_z[first:last] = log_z
    scalars.argmax[first:last] = logits[:, : readings.vocab].argmax(-1)
    # As the engine tells it (speculation), for its bits.
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, following[:, None])
    scalars.chosen_logprob[first:last] = logprobs[:, 0]
    if readings.hot is not None:
        scalars.hot_mass[first:last] = (torch.logsumexp(logits[:, readings.hot], dim=-1) - log_z).exp()
