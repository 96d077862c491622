"""What all endpoints share: the backend and its life from loading to draining, the recorder, what is running.

Knows no route and no body; says whether a request may start, and sees to it that a started one ends in a row.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, TypeVar

from backend.interface import ChatBackend, ChatRequest, EngineStats
from capture.writer import CaptureWriter
from serve.errors import drafter_choice_not_allowed, line_is_full, model_not_found, unavailable
from serve.generation import Generation
from serve.metrics import Metrics
from serve.record import Origin, Recorder, open_redactor, open_retention
from serve.settings import Settings

CANCEL_SECONDS = 5.0  # for cancelled generations to end and be recorded
FLUSH_SECONDS = 30.0  # for the capture queue to be written at the end

T = TypeVar("T")

log = logging.getLogger(__name__)


class State(Enum):
    """Of the service. READY turns to RECOVERING while the backend is not, and to FAILED where it will not be again."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


class Service:
    """One backend behind one API. All methods run on the event loop."""

    def __init__(self, settings: Settings, backend: ChatBackend, writer: CaptureWriter | None) -> None:
        self._settings = settings
        self.backend = backend
        self.metrics = Metrics()
        self.recorder = Recorder(
            writer,
            self.metrics,
            settings.capture_commit_timeout,
            open_redactor(settings),
            open_retention(settings, writer),
        )
        self.created = int(time.time())
        self.flushed = True  # False after `close` where rows had to be given up
        self.has_model = False  # True for good once the backend has loaded: info() and stats() can be asked
        self._state = State.LOADING
        self._started, self._draining = asyncio.Event(), asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._generations: set[Generation] = set()
        self.metrics.watch(self.stats, lambda: self.recorder.depth, lambda: self.recorder.state == "failing")
        if settings.metrics_compat == "vllm":
            self.metrics.tell_as_vllm_too(lambda: self.model_name if self.has_model else None)

    @property
    def state(self) -> State:
        if self._state is not State.READY or self.backend.ready():
            return self._state
        return State.FAILED if self.backend.failed() else State.RECOVERING

    @property
    def running(self) -> int:
        """Generations that have not ended yet."""
        return len(self._generations)

    def start(self) -> None:
        """Begin to load, in the background."""
        self._loading = asyncio.create_task(self._load(), name="loading")
        self._started.set()

    async def loaded(self) -> None:
        """Wait until started and ready. Raises BackendError or CaptureError, whose text is fit for a user."""
        await self._started.wait()
        assert self._loading is not None
        await asyncio.shield(self._loading)

    async def drain(self, grace: float) -> None:
        """Refuse what is new, wait at most `grace` seconds for what runs, then cancel it and see it recorded."""
        self._state = State.DRAINING
        self._draining.set()
        await self._ended(grace)
        for generation in list(self._generations):
            generation.cancel()
        await self._ended(CANCEL_SECONDS)
        if self._generations:
            log.error("%d generations did not end after being cancelled", self.running)

    async def close(self) -> None:
        """Drain without grace, commit what is queued, release the backend."""
        await self.drain(0)
        if self._loading is not None:
            self._loading.cancel()
        self.flushed = await asyncio.to_thread(self.recorder.close, FLUSH_SECONDS)
        await self.backend.close()

    async def until_draining(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what may take long. Raises ApiError 503 where the server is to end before, and cancels it."""
        working, ending = asyncio.create_task(work), asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise unavailable("The server is shutting down.", "shutting_down")
        finally:
            working.cancel()
            ending.cancel()

    def admit(self, choices: int = 1) -> None:
        """Raises ApiError 503 where no request can start now, 429 where so many more would wait too far back.

        An idle server takes any one request.
        """
        match self.state:
            case State.LOADING:
                raise unavailable("The model is still loading.", "model_loading")
            case State.DRAINING:
                raise unavailable("The server is shutting down.", "shutting_down")
            # How an upstream is now, a request finds out best.
            case State.RECOVERING if self._settings.upstream is None:
                raise unavailable("The engine is not ready; it may soon be again.", "engine_not_ready")
            case State.FAILED:
                raise unavailable("The engine has failed; the server's log says why.", "engine_failed")
        most = self._settings.max_queued
        if most is not None and self.running and self.running + choices > self._settings.max_num_seqs + most:
            raise line_is_full(most)

    def require_model(self) -> None:
        """Raises ApiError 503 while the model is not loaded; a draining server still tells what it serves."""
        if not self.has_model:
            self.admit()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for any name but the served ones; None is the first of them."""
        if name is not None and name not in self.model_names:
            raise model_not_found(name, self.model_name)

    def check_drafter(self, name: str | None) -> None:
        """Raises ApiError 403 where a request may not name its drafter; which ones there are is the backend's."""
        if name is not None and not self._settings.allow_drafter_choice:
            raise drafter_choice_not_allowed()

    def generate_all(self, asked: Sequence[tuple[ChatRequest, Origin]]) -> list[Generation]:
        """Start the generations of one request, or none of them: raises ApiError as `admit` does."""
        self.admit(len(asked))
        return [self._generate(request, origin) for request, origin in asked]

    def generate(self, request: ChatRequest, origin: Origin) -> Generation:
        """Start the one generation of a request; raises ApiError as `admit` does."""
        (generation,) = self.generate_all([(request, origin)])
        return generation

    def _generate(self, request: ChatRequest, origin: Origin) -> Generation:
        """From now on it is waited for, cancelled and recorded by this service."""
        if origin.key is not None:
            # Whoever has another key learns nothing from how fast a prompt is answered, whatever salt was sent.
            request = replace(request, cache_salt=f"{origin.key}/{request.cache_salt or ''}")
        generation = Generation(
            self.backend, self.recorder, self.metrics, request, origin, self._settings.request_timeout
        )
        self._generations.add(generation)
        generation.task.add_done_callback(lambda _: self._generations.discard(generation))
        return generation

    @property
    def keep_alive(self) -> float:
        """Seconds of silence in a stream after which it is told that the server still lives."""
        return self._settings.sse_keep_alive

    @property
    def unknown_fields(self) -> Literal["ignore", "refuse"]:
        """What to do with fields of a request that nobody here knows."""
        return self._settings.unknown_fields

    @property
    def model_names(self) -> Sequence[str]:
        """Every name by which requests may call the model."""
        return self._settings.served_model_name or (self.backend.info().name,)

    @property
    def model_name(self) -> str:
        """The one name by which answers and rows call it."""
        return self.model_names[0]

    @property
    def system_fingerprint(self) -> str:
        """Equal for servers that give equal answers to equal seeds; the drafter has no part in it (law L2)."""
        prints = self.backend.info().fingerprints
        parts = (prints.weights, prints.tokenizer, prints.chat_template, prints.build)
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def stats(self) -> EngineStats | None:
        """The engine's counters; None while there is no engine."""
        return self.backend.stats() if self.has_model else None

    async def _load(self) -> None:
        try:
            await asyncio.to_thread(self.recorder.start)
            await self.backend.start()
        except BaseException:
            self._state = State.FAILED
            raise
        self.has_model = True
        if self._state is State.LOADING:
            self._state = State.READY

    async def _ended(self, seconds: float) -> None:
        tasks = {generation.task for generation in self._generations}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
