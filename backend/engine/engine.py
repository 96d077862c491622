"""The engine thread: it alone touches what sequences hold. Requests come in by a queue, emissions leave by callback.

Each turn: take what arrived → admit in order → one prompt chunk at most → one verify step of all that decode. A turn
that breaks ends everything that was asked for; the engine then begins anew with an empty memory, once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from backend.engine.loop import Loop
from backend.engine.sequence import Emission, Sequence
from backend.engine.statistics import SpeculationCounts
from backend.interface import BackendError, BackendUnavailable

MOST_RESTARTS = 1  # what breaks twice is not put right by a third try in the same process

log = logging.getLogger(__name__)

Loader = Callable[[], Loop]
T = TypeVar("T")


class _Call(Generic[T]):
    """Something to be run on the engine thread, and its outcome."""

    def __init__(self, work: Callable[[Loop], T]) -> None:
        self._work, self.done = work, Future[T]()

    def run(self, loop: Loop) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = self._work(loop)
        except torch.AcceleratorError as error:
            self.done.set_exception(error)
            raise  # the device is lost to everybody
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)

    def refuse(self, error: BackendError) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


def _nobody(emission: Emission) -> None:
    """Hears of a sequence that has ended."""


class Engine:
    """Runs what the scheduler lets run. `counts` are booked before anybody is told of what they count."""

    def __init__(self, load: Loader, counts: SpeculationCounts) -> None:
        self._load = load
        self._inbox: queue.SimpleQueue[Sequence | _Call[Any] | None] = queue.SimpleQueue()
        self._loop: Loop | None = None
        self._known: dict[str, Sequence] = {}
        # Whoever ends admission holds it, so that no sequence slips in behind the drain and waits for ever.
        self._admission = threading.Lock()
        self._closing = False
        self._failure: BackendError | None = None  # set while it takes nothing
        self.restarts = 0
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.counts = counts

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
            self._refuse_if_over()
            sequence.on_emission = self._behind_the_books(sequence)
            self._known[sequence.id] = sequence
            self._inbox.put(sequence)

    def call(self, work: Callable[[Loop], T]) -> Future[T]:
        """Run something short on the engine thread, between two turns; its result, or what it raised, in the future.

        Raises BackendUnavailable when closed; what is not begun before the engine ends or breaks gets that as well.
        """
        with self._admission:
            self._refuse_if_over()
            call = _Call(work)
            self._inbox.put(call)
        return call.done

    def cancel(self, sequence_id: str) -> None:
        """End a sequence before its next step; unknown ids do nothing."""
        sequence = self._known.get(sequence_id)
        if sequence is not None:
            sequence.cancelled = True
            self._inbox.put(None)

    @property
    def alive(self) -> bool:
        return self._loaded.done() and self._failure is None and not self._closing and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """It has crashed, and will not be started again."""
        return self._loaded.done() and not self._closing and not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Sequences that were submitted and do not run."""
        running = len(self._loop.scheduler.running) if self._loop else 0
        return max(len(self._known) - running, 0)

    def _behind_the_books(self, sequence: Sequence) -> Callable[[Emission], None]:
        """The owner's callback, called once all it will tell is counted: who hears of an end sees it in the figures."""
        tell, counted = sequence.on_emission, 0

        def book_and_tell(emission: Emission) -> None:
            nonlocal counted
            for step, source in zip(sequence.steps[counted:], sequence.sources[counted:], strict=True):
                if step.drafted:
                    self.counts.add(source, step)
            counted = len(sequence.steps)
            if emission.finish:
                self._known.pop(sequence.id, None)
                if self._loop:  # it may never have been loaded
                    self._loop.scheduler.leave(sequence)
                # Each knows the other: a drafter that only they still have would stay with them for a while.
                sequence.on_emission = _nobody
            tell(emission)

        return book_and_tell

    def _main(self) -> None:
        try:
            loop = self._loop = self._load()
        except BaseException as error:
            if not isinstance(error, BackendError):
                log.exception("loading failed")
            self._fail("loading failed", error)
            self._loaded.set_exception(self._failure)
            self._drain()
            return
        self._loaded.set_result(None)
        while self._crashed(loop) and self.restarts < MOST_RESTARTS:
            loop.renew()
            self._loop = loop
            self.restarts += 1
            with self._admission:
                self._failure = None
            log.warning("the engine has been started again")

    @torch.inference_mode()
    def _crashed(self, loop: Loop) -> bool:
        """Turn until it is closed or a turn breaks; either way, whatever was asked for has then ended."""
        try:
            while not self._closing:
                self._receive(loop, block=not loop.busy)
                loop.turn()
        except BaseException as error:
            log.exception("the engine failed")
            self._fail("the engine failed", error)
            self._loop = None  # its books are wrong: nobody is to settle with them
        self._drain()
        return self._failure is not None

    def _fail(self, what: str, error: BaseException) -> None:
        with self._admission:
            self._failure = error if isinstance(error, BackendError) else BackendError(f"{what}: {error}")

    def _refuse_if_over(self) -> None:
        if self._closing or self._failure:
            raise BackendUnavailable(str(self._failure or "the engine is shutting down"))

    def _receive(self, loop: Loop, block: bool) -> None:
        while True:
            try:
                came = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if isinstance(came, Sequence):
                loop.add(came)
            elif came is not None:
                came.run(loop)

    def _drain(self) -> None:
        """End whatever is known, wherever it is; nothing new comes in meanwhile."""
        for sequence in list(self._known.values()):
            self._end(sequence)
        while not self._inbox.empty():
            left = self._inbox.get()
            if isinstance(left, _Call):
                left.refuse(BackendUnavailable(str(self._failure or "the engine is shutting down")))

    def _end(self, sequence: Sequence) -> None:
        try:
            if self._failure:
                sequence.end("error", str(self._failure))
            else:
                sequence.end("cancelled")
        except Exception:  # whoever comes after it is to be told all the same
            log.exception("the owner of sequence %s could not be told of its end", sequence.id)
            self._known.pop(sequence.id, None)
