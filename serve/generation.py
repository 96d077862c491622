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
    GenerationTimedOut,
    InvalidRequest,
    Result,
    Timings,
    ToolCall,
)
from serve import logs
from serve.metrics import Metrics
from serve.record import Origin, Recorder

log = logging.getLogger(__name__)


class Generation:
    """Runs from construction on. `begin` it, then iterate `events`; `cancel` it when nobody wants the rest.

    The event that carries the result is passed on only once the row is committed, or late (law L3). One that has not
    ended `timeout` seconds after its request arrived is cancelled, and told as GenerationTimedOut.
    """

    def __init__(
        self,
        backend: ChatBackend,
        recorder: Recorder,
        metrics: Metrics,
        request: ChatRequest,
        origin: Origin,
        timeout: float | None = None,
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
        self._calls: dict[int, ToolCall] = {}
        self._tokens = 0
        self._last_token_at: float | None = None
        self._over = False
        self._cancelled = False
        self._timeout, self._timed_out = timeout, False
        self.task = asyncio.create_task(self._run(), name=f"generation {origin.id}")
        if timeout is not None:
            left = timeout - (time.perf_counter() - origin.arrived)
            limit = asyncio.get_running_loop().call_later(left, self._time_out)
            self.task.add_done_callback(lambda _: limit.cancel())
        if line := logs.current.get():
            line.began(origin.id, self.task)

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

    def _time_out(self) -> None:
        self._timed_out = not (self._over or self._cancelled)
        self.cancel()

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
            for delta in event.tool_calls:
                call = self._calls.get(delta.index) or ToolCall(delta.id or "", delta.name or "", "")
                self._calls[delta.index] = replace(call, arguments=call.arguments + delta.arguments)
            if event.result is None:
                self._items.put_nowait(event)
                if self._cancelled:
                    self._backend.cancel(self._request.id)  # again: it may have come before the backend knew the id
                continue
            # The last tokens need not wait for the commit, only the end does.
            self._items.put_nowait(replace(event, result=None, raw=()))
            result = event.result
            late: GenerationTimedOut | None = None
            if self._timed_out and result.finish_reason == "cancelled":
                late = GenerationTimedOut(f"The generation did not end within {self._timeout:g} s.")
                result = replace(result, error=str(late))
            await self._settle(result)
            self._items.put_nowait(late or ChatEvent(result=result, raw=event.raw))
        if result is None:
            raise GenerationFailed("The engine ended the generation without a result.")

    @property
    def _began(self) -> bool:
        return bool(self._content)

    def _measure(self, event: ChatEvent) -> None:
        if not (event.tokens or event.content or event.reasoning or event.tool_calls):
            return
        now = time.perf_counter()
        count = len(event.tokens)  # 0 where an upstream tells text alone
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
        if line := logs.current.get():
            line.ended(result)
        self._metrics.prompt_tokens.inc(result.prompt_count)
        self._metrics.generation_tokens.inc(max(0, result.completion_count - self._tokens))
        siblings = () if result.upstream is None else result.upstream.siblings
        if result.upstream is None:  # which does not tell its own times
            self._metrics.queue_time.observe(result.timings.queue_ms / 1000)
        if result.finish_reason in ("stop", "length"):
            self._metrics.request_prompt_tokens.observe(result.prompt_count)
            self._metrics.request_generation_tokens.observe(result.completion_count)
            if result.upstream is None:
                self._metrics.prefill_time.observe(result.timings.prompt_ms / 1000)
                self._metrics.decode_time.observe(result.timings.predicted_ms / 1000)
        rows = [self._recorder.record(self._origin, result)]
        rows += [self._recorder.record(self._origin.sibling(), sibling) for sibling in siblings]
        await (asyncio.gather(*rows) if siblings else rows[0])
        self._metrics.e2e_latency.observe(time.perf_counter() - self._origin.arrived)
        for one in (result, *siblings):
            self._metrics.requests.labels(one.finish_reason).inc()

    def _broken(self, error: Exception) -> Result:
        """The result of a generation whose backend broke off without giving one: what it said, no tokens."""
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
            tool_calls=tuple(self._calls.values()),
            error=str(error) or type(error).__name__,
        )
