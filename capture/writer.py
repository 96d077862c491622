"""The one thread that writes a capture file: what is queued goes into one transaction, then its futures resolve.

Knows rows and SQLite's failures; knows nothing of requests, models or tokenizers.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from capture.opening import Synchronous
from capture.records import CaptureError, Generation, RecordError, to_row
from capture.store import WRITER_BUSY_SECONDS, file_error
from capture.target import LOCKED, SLICE_SECONDS, Target, kind, passes

QUEUE_ROWS = 10_000
QUEUE_BYTES = 256 << 20
# Of one transaction: a long one would make the first of its rows wait for the last.
BATCH_ROWS = 1_000
BATCH_BYTES = 16 << 20

log = logging.getLogger(__name__)


class QueueFullError(CaptureError):
    """There is no room for another row now; once rows have been committed there is."""


@dataclass(frozen=True, eq=False)
class _Entry:
    row: Mapping[str, object]
    bytes: int
    future: Future[None] = field(default_factory=Future)


class CaptureWriter:
    """Writes generations to one file from a thread of its own.

    `start` it, `submit` from any thread, and `close` it: the thread is not a daemon, a process that forgets to close
    it does not end. `on_commit(rows, seconds)` follows each transaction; `on_failure(error, rows)` each failed attempt,
    `rows` being those given up for good: 0 while they stay queued for the next attempt.

    The queue has room while it holds fewer than `max_rows` rows and `max_bytes` bytes of them.
    """

    def __init__(
        self,
        path: Path,
        *,
        synchronous: Synchronous = "FULL",
        max_rows: int = QUEUE_ROWS,
        max_bytes: int = QUEUE_BYTES,
        on_commit: Callable[[int, float], None] | None = None,
        on_failure: Callable[[Exception, int], None] | None = None,
    ) -> None:
        self.path = path
        self._target = Target(path, synchronous)
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._queue: deque[_Entry] = deque()
        self._changed = threading.Condition()  # guards the queue, the sizes and _open
        self._depth = 0
        self._bytes = 0
        self._open = False
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble: str | None = None  # why rows are not written now
        self._trouble_began = 0.0
        self._failing = False

    def start(self) -> None:
        """Create the file (mode 0600) and its folders where missing, upgrade it, begin writing. Raises CaptureError."""
        if self._thread is not None:
            raise CaptureError("this capture writer was started before")
        self._target.open()
        self._thread = threading.Thread(target=self._run, name="capture-writer", daemon=False)
        self._open = True
        self._thread.start()

    def submit(self, generation: Generation) -> Future[None]:
        """Queue a generation. The future resolves once its row is committed, or with the error that lost it.

        It cannot be cancelled: whoever stops waiting for it does not unqueue the row. Raises QueueFullError, and has
        then done nothing.
        """
        self._require_room()
        try:
            row = to_row(generation)
        except RecordError as error:
            return self._refuse(error)
        entry = _Entry(row, sum(len(value) for value in row.values() if isinstance(value, str | bytes)))
        entry.future.set_running_or_notify_cancel()
        with self._changed:
            self._require_room()
            if self._open:
                self._depth += 1
                self._bytes += entry.bytes
                self._queue.append(entry)
                self._changed.notify()
                return entry.future
        return self._refuse(CaptureError("capture is closed"))

    @property
    def depth(self) -> int:
        """Generations queued and not yet committed."""
        return self._depth

    @property
    def failing(self) -> bool:
        """Whether rows wait for a file that cannot be written. A lock is waited for 30 s before it counts as that."""
        return self._failing

    def close(self, timeout: float) -> bool:
        """Write what is queued, checkpoint and stop. After `timeout` seconds what is left is given up: False."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return not self._give_up.is_set()
        self._give_up.set()
        return False

    def _require_room(self) -> None:
        if self._depth >= self._max_rows or self._bytes >= self._max_bytes:
            raise QueueFullError(f"{self._depth} rows wait to be written to {self.path}, more are not taken now")

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            if batch:
                self._write(batch)
            self._target.tidy()
        self._target.close()

    def _take(self) -> list[_Entry] | None:
        """Wait for rows, then take what goes into one transaction; None once closed and written."""
        with self._changed:
            patience = SLICE_SECONDS if self._target.unfinished else None
            self._changed.wait_for(lambda: self._queue or not self._open, patience)
            if not (self._queue or self._open):
                return None
            batch: list[_Entry] = []
            size = 0
            while self._queue and len(batch) < BATCH_ROWS and (not batch or size + self._queue[0].bytes <= BATCH_BYTES):
                batch.append(self._queue.popleft())
                size += batch[-1].bytes
            return batch

    def _write(self, batch: Sequence[_Entry]) -> None:
        """Commit a batch, for as many attempts as it takes, and resolve its futures."""
        again = False
        while True:
            began = time.monotonic()
            try:
                refused = self._target.commit([entry.row for entry in batch], again)
            except Exception as error:
                if not passes(error):
                    self._fail(batch, error)
                    return
                if self._give_up.is_set():
                    with self._changed:
                        left, self._queue = self._queue, deque()
                    self._fail([*batch, *left], error)
                    return
                self._note(error, began)
                self._report_failure(error, 0)
                if again:  # the first time it is tried once more at once: the file may only have been moved
                    self._give_up.wait(max(0.0, SLICE_SECONDS - (time.monotonic() - began)))
                again = True
                continue
            self._settle(batch, refused, time.monotonic() - began)
            return

    def _note(self, error: Exception, began: float) -> None:
        """Remember why rows are not written; in the log it stands once."""
        trouble = str(file_error(self.path, error) if isinstance(error, sqlite3.Error) else error)
        if self._trouble is None:
            self._trouble_began = began
        if trouble != self._trouble:
            log.warning("capture: rows wait to be written: %s", trouble)
        self._trouble = trouble
        locked = kind(error) in LOCKED
        self._failing = not locked or time.monotonic() - self._trouble_began > WRITER_BUSY_SECONDS

    def _settle(self, batch: Sequence[_Entry], refused: Mapping[int, Exception], seconds: float) -> None:
        if self._trouble is not None:
            log.warning("capture: rows are written to %s again", self.path)
        self._trouble, self._failing = None, False
        written = [entry for i, entry in enumerate(batch) if i not in refused]
        self._forget(written)
        if written and self._on_commit is not None:
            _call(self._on_commit, len(written), seconds)
        for entry in written:
            entry.future.set_result(None)
        for i, error in refused.items():
            self._fail([batch[i]], error)

    def _fail(self, entries: Sequence[_Entry], error: Exception) -> None:
        log.error("capture: %d rows lost: %s", len(entries), error)
        self._forget(entries)
        self._report_failure(error, len(entries))
        for entry in entries:
            entry.future.set_exception(error)

    def _refuse(self, error: Exception) -> Future[None]:
        """The future of a row that is lost before it was queued."""
        log.error("capture: 1 rows lost: %s", error)
        self._report_failure(error, 1)
        future: Future[None] = Future()
        future.set_exception(error)
        return future

    def _forget(self, entries: Sequence[_Entry]) -> None:
        with self._changed:
            self._depth -= len(entries)
            self._bytes -= sum(entry.bytes for entry in entries)

    def _report_failure(self, error: Exception, rows: int) -> None:
        if self._on_failure is not None:
            _call(self._on_failure, error, rows)


def _call(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        log.exception("capture: a callback failed")
