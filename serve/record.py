"""What a generation leaves behind: its timings block and its row. The only caller of capture.

Knows when a row is committed and what to do when it is not; a failing capture never fails a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from backend.interface import FinishReason, Result
from capture.filters import duration
from capture.records import Generation, Status, new_id, utc_now
from capture.redact import Redactor, redactor
from capture.retention import Retention, size
from capture.store import default_path
from capture.writer import CaptureWriter, QueueFullError
from serve.commits import Commits
from serve.metrics import Metrics
from serve.schemas.answer import Timings
from serve.settings import Settings

STATUS: Mapping[FinishReason, Status] = {
    "stop": "finished",
    "length": "finished",
    "cancelled": "cancelled",
    "error": "failed",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What the wire knows of a request and the engine need not."""

    model: str
    body: Mapping[str, Any]  # as the client sent it; headers are never part of it
    client: str | None = None  # the tag of the row
    key: str | None = None  # the name of the API key
    opted_out: bool = False
    arrived: float = field(default_factory=time.perf_counter)  # seconds, of the monotonic clock
    created_at: str = field(default_factory=utc_now)
    id: str = field(default_factory=new_id)  # of the row; the response's id carries that of its first row
    response: str | None = None  # the first row's id, in the others of one response

    def sibling(self) -> Origin:
        """Of another generation for the same response, in a row of its own."""
        return replace(self, id=new_id(), response=self.response or self.id)


def open_writer(settings: Settings) -> CaptureWriter | None:
    """The writer of the configured file, not yet started; None where capture is off. Raises CaptureError."""
    if settings.capture == "off":
        return None
    path = default_path() if settings.capture is None else Path(settings.capture).expanduser()
    return CaptureWriter(
        path,
        synchronous=settings.capture_synchronous,
        max_rows=settings.capture_queue_rows,
        max_bytes=int(settings.capture_queue_memory * 2**20),
    )


def open_redactor(settings: Settings) -> Redactor | None:
    """What takes text out of rows before they are stored; None where nothing does. Raises CaptureError."""
    return redactor(settings.redact, Path(settings.redact_file) if settings.redact_file else None)


def open_retention(settings: Settings, writer: CaptureWriter | None) -> Retention | None:
    """What deletes rows beyond the configured limits, not yet started; None where there is no limit, or no file.

    Raises CaptureError.
    """
    max_age = duration(settings.capture_max_age) if settings.capture_max_age else None
    max_bytes = size(settings.capture_max_bytes) if settings.capture_max_bytes else None
    if writer is None or (max_age is None and max_bytes is None):
        return None
    return Retention(writer.path, max_age=max_age, max_bytes=max_bytes)


class Recorder:
    """Hands rows to the writer and waits for their commits, on the event loop."""

    def __init__(
        self,
        writer: CaptureWriter | None,
        metrics: Metrics,
        commit_timeout: float,
        redactor: Redactor | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._writer = writer
        self._retention = retention
        self._redactor = redactor
        self._metrics = metrics
        self._commit_timeout = commit_timeout
        self._commits = Commits()
        self._late: set[asyncio.Future[None]] = set()
        self._room = asyncio.Event()  # set, and made anew, whenever a row has left the queue

    def start(self) -> None:
        """Open the file. Raises CaptureError."""
        if self._writer is not None:
            self._writer.start()
        if self._retention is not None:
            self._retention.start()

    def close(self, timeout: float) -> bool:
        """Commit what is queued; False where that took longer than `timeout` seconds and rows were given up."""
        if self._retention is not None:
            self._retention.stop(timeout)
        return self._writer is None or self._writer.close(timeout)

    @property
    def state(self) -> Literal["on", "off", "late", "failing"]:
        """late: an answer has left whose row is still not committed; failing: nor can it be, as the file is now."""
        if self._writer is None:
            return "off"
        if self._writer.failing:
            return "failing"
        return "late" if self._late else "on"

    @property
    def late(self) -> int:
        """Rows not yet committed whose answers have left."""
        return len(self._late)

    @property
    def depth(self) -> int:
        """Rows handed to the writer and not yet committed."""
        return 0 if self._writer is None else self._writer.depth

    async def record(self, origin: Origin, result: Result) -> None:
        """Write the row and wait for its commit, at most the commit timeout; later it stays queued. Never raises.

        Where the queue stays full for that long, the row is lost.
        """
        if self._writer is None:
            return
        if origin.opted_out:
            self._metrics.captured.labels("opted_out").inc()
            return
        began = time.perf_counter()
        if (row := self._redacted(to_generation(origin, result))) is None:
            return
        deadline = began + self._commit_timeout
        if (commit := await self._submitted(self._writer, row, deadline)) is None:
            self._metrics.capture_failures.inc()
            self._metrics.capture_queue_full.inc()
            log.error("capture: generation %s is lost: too many rows wait to be written", origin.id)
            return
        commit.add_done_callback(partial(self._settled, STATUS[result.finish_reason], began))
        done, _ = await asyncio.wait({commit}, timeout=max(0.0, deadline - time.perf_counter()))
        if not done:
            self._late.add(commit)
            self._metrics.capture_late.inc()
            log.warning("capture: generation %s is answered before its row is committed", origin.id)

    async def _submitted(self, writer: CaptureWriter, row: Generation, deadline: float) -> asyncio.Future[None] | None:
        """The row's commit to come; None where the queue was full until the deadline."""
        while True:
            room = self._room
            try:
                return self._commits.follow(writer.submit(row))
            except QueueFullError:
                if (left := deadline - time.perf_counter()) <= 0:
                    return None
            with suppress(TimeoutError):
                await asyncio.wait_for(room.wait(), left)

    def _redacted(self, row: Generation) -> Generation | None:
        """The row as it may be stored; None, counted as lost, where that cannot be told."""
        if self._redactor is None:
            return row
        try:
            clean = self._redactor.generation(row)
        except Exception:
            log.exception("capture: generation %s could not be redacted, so it is not stored", row.id)
            self._metrics.capture_failures.inc()
            return None
        if clean.redacted:
            self._metrics.capture_redacted.inc()
        return clean

    def _settled(self, status: Status, began: float, commit: asyncio.Future[None]) -> None:
        self._late.discard(commit)
        room, self._room = self._room, asyncio.Event()
        room.set()
        if commit.cancelled() or commit.exception() is not None:
            self._metrics.capture_failures.inc()  # the writer has logged why
            return
        self._metrics.captured.labels(status).inc()
        self._metrics.capture_commit.observe(time.perf_counter() - began)


def to_generation(origin: Origin, result: Result) -> Generation:
    """The row of a generation, however it ended."""
    status = STATUS[result.finish_reason]
    prints, away = result.fingerprints, result.upstream
    return Generation(
        id=origin.id,
        created_at=origin.created_at,
        status=status,
        finish_reason=result.finish_reason if status == "finished" else None,
        model=origin.model,
        weights_fingerprint=prints.weights,
        tokenizer_fingerprint=prints.tokenizer,
        template_fingerprint=prints.chat_template,
        drafter_fingerprint=prints.drafter,
        build=prints.build,
        drafter=result.drafter,
        seed=result.seed,
        parameters={**result.sampling, **({"response": origin.response} if origin.response else {})},
        request=origin.body,
        response_text=result.content,
        reasoning=result.reasoning,
        tool_calls=[
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in result.tool_calls
        ],
        prompt_tokens=None if away and not away.prompt_told else result.prompt_ids,
        completion_tokens=None if away and not away.completion_told else result.completion_ids,
        logprobs=None if away and not away.completion_told else result.logprobs,
        steps=[(step.drafted, step.accepted) for step in result.steps],
        timings={"queue_ms": result.timings.queue_ms, **timings(result).model_dump()},
        client=origin.client,
        error=result.error,
        split_key_length=result.first_user_end,
    )


def timings(result: Result) -> Timings:
    """The timings block of a response; draft counts are those of DESIGN §6."""
    times, steps = result.timings, result.steps
    slots = range(max((step.drafted for step in steps), default=0))
    return Timings(
        cache_n=result.cached_tokens,
        prompt_n=times.prompt_n,
        prompt_ms=times.prompt_ms,
        prompt_per_token_ms=_ratio(times.prompt_ms, times.prompt_n),
        prompt_per_second=_ratio(1000 * times.prompt_n, times.prompt_ms),
        predicted_n=times.predicted_n,
        predicted_ms=times.predicted_ms,
        predicted_per_token_ms=_ratio(times.predicted_ms, times.predicted_n),
        predicted_per_second=_ratio(1000 * times.predicted_n, times.predicted_ms),
        drafter=result.drafter,
        draft_n=sum(step.drafted for step in steps),
        draft_n_accepted=sum(step.accepted for step in steps),
        draft_n_per_pos=[sum(step.drafted > slot for step in steps) for slot in slots],
        draft_n_accepted_per_pos=[sum(step.accepted > slot for step in steps) for slot in slots],
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
