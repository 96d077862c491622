"""The one thread that writes a capture file: what is queued goes into one transaction, then its futures resolve.

Knows rows and SQLite's failures; knows nothing of requests, models or tokenizers.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from sqlite_utils import Database

from capture.migrations import upgrade
from capture.records import CaptureError, Generation, RecordError, to_row
from capture.store import WRITER_BUSY_SECONDS, connect, file_error

Synchronous = Literal["FULL", "NORMAL"]

# Failures of the moment: another process's lock, a full disk. The rows wait in memory and are written once it passes.
PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
# SQLite's wait for a lock cannot be interrupted, so while rows wait it is taken in slices: `close` stays prompt.
SLICE_SECONDS = 1.0

log = logging.getLogger(__name__)


class CaptureWriter:
    """Writes generations to one file from a thread of its own.

    `start` it, `submit` from any thread, and `close` it: the thread is not a daemon, a process that forgets to close
    it does not end. `on_commit(rows, seconds)` follows each transaction; `on_failure(error, rows)` each failed attempt,
    `rows` being those given up for good: 0 while they stay queued for the next attempt. Both are called on the
    writer's thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        synchronous: Synchronous = "FULL",
        on_commit: Callable[[int, float], None] | None = None,
        on_failure: Callable[[Exception, int], None] | None = None,
    ) -> None:
        self.path = path
        self._synchronous = synchronous
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _depth and _open
        self._depth = 0
        self._open = False
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Create the file (mode 0600) and its folders where missing, upgrade it, begin writing. Raises CaptureError."""
        if self._thread is not None:
            raise CaptureError("this capture writer was started before")
        db = _open_for_writing(self.path, self._synchronous)
        self._thread = threading.Thread(target=self._run, args=(db,), name="capture-writer", daemon=False)
        self._open = True
        self._thread.start()

    def submit(self, generation: Generation) -> Future[None]:
        """Queue a generation. The future resolves once its row is committed, or with the error that lost it.

        It cannot be cancelled: whoever stops waiting for it does not unqueue the row.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._open:
                self._depth += 1
                self._queue.put((generation, future))
                return future
        error = CaptureError("capture is closed")
        self._report_failure(error, 1)
        future.set_exception(error)
        return future

    @property
    def depth(self) -> int:
        """Generations queued and not yet committed."""
        return self._depth

    def close(self, timeout: float) -> bool:
        """Write what is queued, checkpoint and stop. After `timeout` seconds what is left is given up: False."""
        with self._lock:
            if self._open:
                self._open = False
                self._queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return not self._give_up.is_set()
        self._give_up.set()
        return False

    def _run(self, db: Database) -> None:
        closing = False
        while not closing:
            batch, closing = self._drain()
            self._write(db, batch)
        try:
            # A reader may hold the log back; then it is left for the next opening, complete all the same.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            log.warning("capture: no final checkpoint of %s: %s", self.path, error)
        finally:
            db.close()

    def _drain(self) -> tuple[list[_Entry], bool]:
        """Wait for something, then take all there is; True when the end of the queue was reached."""
        batch: list[_Entry] = []
        entry = self._queue.get()
        while entry is not None:
            batch.append(entry)
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _write(self, db: Database, batch: Sequence[_Entry]) -> None:
        """Commit a batch, for as many attempts as it takes, and resolve its futures."""
        failing = False
        while batch:
            began = time.monotonic()
            try:
                refused = _commit(db, [generation for generation, _ in batch])
            except Exception as error:
                if not _passes(error) or self._give_up.is_set():
                    self._fail(batch, error)
                    return
                if not failing:
                    log.warning("capture: cannot write to %s now, %d rows wait: %s", self.path, len(batch), error)
                failing = True
                self._report_failure(error, 0)
                self._give_up.wait(max(0.0, SLICE_SECONDS - (time.monotonic() - began)))
                continue
            if failing:
                log.warning("capture: writing to %s again", self.path)
            self._settle(batch, refused, time.monotonic() - began)
            return

    def _settle(self, batch: Sequence[_Entry], refused: dict[int, Exception], seconds: float) -> None:
        written = [entry for i, entry in enumerate(batch) if i not in refused]
        self._leave_queue(len(written))
        if written and self._on_commit is not None:
            _call(self._on_commit, len(written), seconds)
        for _, future in written:
            future.set_result(None)
        for i, error in refused.items():
            self._fail([batch[i]], error)

    def _fail(self, entries: Sequence[_Entry], error: Exception) -> None:
        log.error("capture: %d rows lost: %s", len(entries), error)
        self._leave_queue(len(entries))
        self._report_failure(error, len(entries))
        for _, future in entries:
            future.set_exception(error)

    def _leave_queue(self, rows: int) -> None:
        with self._lock:
            self._depth -= rows

    def _report_failure(self, error: Exception, rows: int) -> None:
        if self._on_failure is not None:
            _call(self._on_failure, error, rows)


_Entry = tuple[Generation, "Future[None]"]


def _open_for_writing(path: Path, synchronous: Synchronous) -> Database:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Made before SQLite sees it: the log and the shared memory beside it take their mode from it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _sync_folder(path.parent)
    except OSError as error:
        raise CaptureError(f"cannot write a capture file at {path}: {error.strerror}") from error
    db = connect(path, busy_seconds=WRITER_BUSY_SECONDS)
    try:
        upgrade(db, path)
        _enable_wal(db)
        if db.journal_mode != "wal":
            raise CaptureError(f"{path}: this file system cannot hold SQLite's write-ahead log; name a local file")
        db.execute(f"PRAGMA synchronous = {synchronous}")
        if synchronous == "FULL":
            db.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone stops at the drive's cache
        db.execute(f"PRAGMA busy_timeout = {int(SLICE_SECONDS * 1000)}")
    except sqlite3.Error as error:
        db.close()
        raise file_error(path, error) from error
    except BaseException:
        db.close()
        raise
    return db


def _enable_wal(db: Database) -> None:
    # Changing the journal's mode does not wait for locks by itself, and another process may be doing the same.
    deadline = time.monotonic() + WRITER_BUSY_SECONDS
    while True:
        try:
            db.enable_wal()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _commit(db: Database, generations: Sequence[Generation]) -> dict[int, Exception]:
    """Write all in one transaction; the errors of those no row can hold, by index. Raises what stopped them all."""
    refused: dict[int, Exception] = {}
    table = db["generations"]
    db.execute("BEGIN IMMEDIATE")
    try:
        for i, generation in enumerate(generations):
            try:
                table.insert(to_row(generation))
            except Exception as error:
                if _passes(error) or not db.conn.in_transaction:
                    raise
                refused[i] = _row_error(generation, error)
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise
    return refused


def _row_error(generation: Generation, error: Exception) -> CaptureError:
    return error if isinstance(error, CaptureError) else RecordError(f"generation {generation.id}: {error}")


def _passes(error: Exception) -> bool:
    # The low byte is the kind of failure; the rest of the code only says where it happened.
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in PASSING


def _call(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        log.exception("capture: a callback failed")
