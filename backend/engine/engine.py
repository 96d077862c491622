"""The engine thread: it alone touches the model. Requests come in through a queue, emissions leave by callback.

Each turn: take what arrived → admit in order → one prefill chunk at most → one verify step per running sequence.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from backend.engine.sequence import Emission, Sequence
from backend.engine.speculation import Speculation
from backend.engine.statistics import SpeculationCounts
from backend.interface import BackendError, BackendUnavailable

log = logging.getLogger(__name__)

Loader = Callable[[], Speculation]


class Engine:
    """FIFO admission up to `max_sequences` at once; running sequences progress by turns."""

    def __init__(self, load: Loader, *, max_sequences: int, draft_slots: int) -> None:
        self._load = load
        self._max_sequences = max_sequences
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._known: dict[str, Sequence] = {}
        # Whoever ends admission holds it, so that no sequence slips in behind the drain and waits for ever.
        self._admission = threading.Lock()
        self._closing = False
        self._failure: BackendError | None = None
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.counts = SpeculationCounts(draft_slots)

    def start(self) -> None:
        """Load on the engine thread; returns once it decodes. Raises BackendError when loading fails."""
        self._thread.start()
        self._loaded.result()

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._admission:
            self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its `on_emission` hears of everything after. Raises BackendUnavailable when closed."""
        with self._admission:
            if self._closing or self._failure:
                raise BackendUnavailable(str(self._failure or "the engine is shutting down"))
            sequence.on_emission = self._behind_the_books(sequence)
            self._known[sequence.id] = sequence
            self._inbox.put(sequence)

    def cancel(self, sequence_id: str) -> None:
        """End a sequence before its next step; unknown ids do nothing."""
        sequence = self._known.get(sequence_id)
        if sequence is not None:
            sequence.cancelled = True
            self._inbox.put(None)

    @property
    def alive(self) -> bool:
        return self._loaded.done() and self._failure is None and not self._closing and self._thread.is_alive()

    def load(self) -> tuple[int, int, int]:
        """Sequences running, sequences waiting, and tokens the running ones hold in their caches."""
        running = list(self._running)
        held = sum(sequence.prefilled + len(sequence.tokens) for sequence in running)
        return len(running), max(len(self._known) - len(running), 0), held

    def _behind_the_books(self, sequence: Sequence) -> Callable[[Emission], None]:
        """The owner's callback, called once all it will tell is counted: who hears of an end sees it in the figures."""
        tell, counted = sequence.on_emission, 0

        def book_and_tell(emission: Emission) -> None:
            nonlocal counted
            for step in sequence.steps[counted:]:
                self.counts.add(step)
            counted = len(sequence.steps)
            if emission.finish:
                self._remove(sequence)
            tell(emission)

        return book_and_tell

    def _main(self) -> None:
        try:
            speculation = self._load()
        except BaseException as error:
            if not isinstance(error, BackendError):
                log.exception("loading failed")
            self._fail("loading failed", error)
            self._loaded.set_exception(self._failure)
        else:
            self._loaded.set_result(None)
            self._run(speculation)
        self._drain()

    @torch.inference_mode()
    def _run(self, speculation: Speculation) -> None:
        while not self._closing:
            try:
                self._turn(speculation)
            except Exception as error:
                log.exception("engine turn failed")
                self._fail("the engine failed", error)
                return

    def _fail(self, what: str, error: BaseException) -> None:
        with self._admission:
            self._failure = error if isinstance(error, BackendError) else BackendError(f"{what}: {error}")

    def _turn(self, speculation: Speculation) -> None:
        self._receive(block=not self._running and not self._waiting)
        self._admit()
        prefilling = next((s for s in self._running if s.in_prefill), None)
        if prefilling:
            self._advance(speculation.prefill, prefilling)
        for sequence in [s for s in self._running if not s.in_prefill and s is not prefilling]:
            self._advance(speculation.decode, sequence)

    def _receive(self, block: bool) -> None:
        while True:
            try:
                sequence = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if sequence is not None:
                self._waiting.append(sequence)

    def _admit(self) -> None:
        for sequence in [s for s in (*self._running, *self._waiting) if s.cancelled]:
            sequence.end("cancelled")
            sequence.release()
        while self._waiting and len(self._running) < self._max_sequences:
            sequence = self._waiting.popleft()
            sequence.admitted_at = time.monotonic()
            self._running.append(sequence)

    def _advance(self, run: Callable[[Sequence], None], sequence: Sequence) -> None:
        try:
            run(sequence)
        except BackendError as error:
            sequence.end("error", str(error))
        except Exception as error:
            # A fault of one sequence's step is that sequence's failure; the others' states are their own.
            log.exception("sequence %s failed", sequence.id)
            sequence.end("error", f"{type(error).__name__}: {error}")
        if sequence.finish:
            sequence.release()

    def _remove(self, sequence: Sequence) -> None:
        self._known.pop(sequence.id, None)
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _drain(self) -> None:
        self._receive(block=False)
        for sequence in [*self._running, *self._waiting]:
            if self._failure:
                sequence.end("error", str(self._failure))
            else:
                sequence.end("cancelled")
            sequence.release()
