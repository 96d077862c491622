"""One running generation: pulled from the backend by a task of its own, measured, and recorded before it is told.

Knows neither HTTP nor JSON. Whether anybody still listens makes no difference to it: it always ends in a row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from backend.interface import (
    BackendError,
    BackendUnavailable,
    ChatBackend,
    ChatEvent,
    ChatRequest,
    GenerationFailed,
    InvalidRequest,
    Result,
    Timings,
)
from serve.metrics import Metrics
from serve.record import Origin, Recorder

log = logging.getLogger(__name__)


class Generation:
    """Runs from construction on. `begin` it, then iterate `events`; `cancel` it when nobody wants the rest.

    The event that carries the result is passed on only once the row is committed, or late (law L3).
    """

    def __init__(
        self, backend: ChatBackend, recorder: Recorder, metrics: Metrics, request: ChatRequest, origin: Origin
    ) -> None:
        self._backend = backend
        self._recorder = recorder
        self._metrics = metrics
        self._request = request
        self._origin = origin
        self._items: asyncio.Queue[ChatEvent | BackendError] = asyncio.Queue()
        self._first: ChatEvent | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tokens = 0
        self._last_token_at: float | None = None
        self._over = False
        self._cancelled = False
        self.task = asyncio.create_task(self._run(), name=f"generation {origin.id}")

    async def begin(self) -> None:
        """Wait for the first event. Raises InvalidRequest or BackendUnavailable where the generation never started."""
        if self._first is None:
            self._first = await self._next()

    async def events(self) -> AsyncIterator[ChatEvent]:
        """Every event, after `begin`; the last one carries the result. Raises BackendError where the backend broke."""
        assert self._first is not None, "begin() comes first"
        event = self._first
        while True:
            yield event
            if event.result is not None:
                return
            event = await self._next()

    def cancel(self) -> None:
        """End it within one step of the engine; it is still recorded. No-op once it has ended or is ending."""
        if not (self._over or self._cancelled):
            self._cancelled = True
            self._backend.cancel(self._request.id)

    async def _next(self) -> ChatEvent:
        item = await self._items.get()
        if isinstance(item, BackendError):
            raise item
        return item

    async def _run(self) -> None:
        try:
            await self._pull()
        except Exception as error:
            if isinstance(error, InvalidRequest | BackendUnavailable) and not self._began:
                self._over = True
                self._items.put_nowait(error)
                return
            if isinstance(error, BackendError):
                log.error("generation %s failed: %s", self._origin.id, error)
                told: BackendError = error
            else:
                log.exception("generation %s failed", self._origin.id)
                told = GenerationFailed("The server had an error while generating; its log says more.")
            try:
                await self._settle(self._broken(error))
            finally:
                self._items.put_nowait(told)  # whoever waits must not wait for ever

    async def _pull(self) -> None:
        result: Result | None = None
        async for event in self._backend.chat(self._request):
            self._measure(event)
            self._content.append(event.content)
            self._reasoning.append(event.reasoning)
            if event.result is None:
                self._items.put_nowait(event)
                if self._cancelled:
                    self._backend.cancel(self._request.id)  # again: it may have come before the backend knew the id
                continue
            # The last tokens need not wait for the commit, only the end does.
            self._items.put_nowait(replace(event, result=None))
            result = event.result
            await self._settle(result)
            self._items.put_nowait(ChatEvent(result=result))
        if result is None:
            raise GenerationFailed("The engine ended the generation without a result.")

    @property
    def _began(self) -> bool:
        return bool(self._content)

    def _measure(self, event: ChatEvent) -> None:
        if not event.tokens:
            return
        now = time.perf_counter()
        count = len(event.tokens)
        if self._last_token_at is None:
            self._metrics.time_to_first_token.observe(now - self._origin.arrived)
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._last_token_at) / count)
        self._last_token_at = now
        self._tokens += count
        self._metrics.generation_tokens.inc(count)

    async def _settle(self, result: Result) -> None:
        """Count the end and commit the row."""
        self._over = True
        self._metrics.prompt_tokens.inc(len(result.prompt_ids))
        self._metrics.generation_tokens.inc(max(0, len(result.completion_ids) - self._tokens))
        self._metrics.queue_time.observe(result.timings.queue_ms / 1000)
        await self._recorder.record(self._origin, result)
        self._metrics.e2e_latency.observe(time.perf_counter() - self._origin.arrived)
        self._metrics.requests.labels(result.finish_reason).inc()

    def _broken(self, error: Exception) -> Result:
        """The result of a generation whose backend broke off without giving one: its text, no tokens."""
        info, asked = self._backend.info(), self._request.sampling
        return Result(
            finish_reason="error",
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            seed=asked.seed or 0,
            sampling={"temperature": asked.temperature, "max_tokens": asked.max_tokens, "stop": list(asked.stop)},
            drafter=info.drafter,
            steps=(),
            fingerprints=info.fingerprints,
            timings=Timings(queue_ms=0.0, prompt_n=0, prompt_ms=0.0, predicted_n=0, predicted_ms=0.0),
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            error=str(error) or type(error).__name__,
        )
