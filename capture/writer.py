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

from sqlite_utils import Database

from capture.opening import FileReplacedError, Identity, Synchronous, identity, open_for_writing
from capture.records import CaptureError, Generation, RecordError, to_row
from capture.store import WRITER_BUSY_SECONDS, file_error, wal_path

LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
# Failures of the moment: another process's lock, a full disk, a file that is damaged until somebody puts it right. The
# rows wait in memory and are written once it passes.
PASSING = LOCKED | {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
}
# SQLite's wait for a lock cannot be interrupted, so while rows wait it is taken in slices: `close` stays prompt.
SLICE_SECONDS = 1.0
QUEUE_ROWS = 10_000
QUEUE_BYTES = 256 << 20
# Of one transaction: a long one would make the first of its rows wait for the last.
BATCH_ROWS = 1_000
BATCH_BYTES = 16 << 20
# The log is moved into the file from the first size on. From the second on it is also begun anew, though that holds up
# writers until every read that began before is over; so it is tried shortly and seldom.
LOG_BYTES = 4 << 20
LONG_LOG_BYTES = 32 << 20
RESTART_SECONDS = 0.25
RESTART_EVERY_SECONDS = 5.0

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
        self._synchronous = synchronous
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
        # From here on the writing thread's own.
        self._db: Database | None = None
        self._identity: Identity = ()
        self._trouble: str | None = None  # why rows are not written now
        self._trouble_began = 0.0
        self._failing = False
        self._unmoved = 0  # bytes of rows that went into the log since it was last moved into the file
        self._restart_tried = 0.0

    def start(self) -> None:
        """Create the file (mode 0600) and its folders where missing, upgrade it, begin writing. Raises CaptureError."""
        if self._thread is not None:
            raise CaptureError("this capture writer was started before")
        self._use(open_for_writing(self.path, self._synchronous))
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
        while batch := self._take():
            self._write(batch)
            self._unmoved += sum(entry.bytes for entry in batch)
            self._move_log()
        self._leave()

    def _take(self) -> list[_Entry]:
        """Wait for rows, then take what goes into one transaction; nothing once closed and written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._open)
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
                refused = self._attempt(batch, again)
            except Exception as error:
                if not _passes(error):
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

    def _attempt(self, batch: Sequence[_Entry], again: bool) -> dict[int, Exception]:
        """One transaction into the file that stands at the path; the errors of the rows it cannot hold, by index."""
        if self._db is None:
            self._use(open_for_writing(self.path, self._synchronous, SLICE_SECONDS))
        assert self._db is not None
        try:
            refused = _commit(self._db, [entry.row for entry in batch], again)
        except Exception as error:
            if _passes(error) and _kind(error) not in LOCKED | {sqlite3.SQLITE_FULL}:
                self._leave()  # what a connection has found wrong once, it may go on to find
            raise
        if identity(self.path) != self._identity:
            # The rows are in a file that nobody finds: they are written once more, to the one that will be there.
            self._leave()
            raise FileReplacedError(f"{self.path} or its log was deleted or replaced while the server writes to it")
        return refused

    def _use(self, db: Database) -> None:
        db.execute(f"PRAGMA busy_timeout = {int(SLICE_SECONDS * 1000)}")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # the answers need not wait for it: it follows them
        db.execute("SELECT 1 FROM sqlite_master").fetchone()  # the log is there from the first read on
        self._db, self._identity = db, identity(self.path)

    def _leave(self) -> None:
        """Close the file with its log moved into it, wherever it may be now."""
        db, self._db = self._db, None
        if db is None:
            return
        try:
            # A reader may hold the log back; then it is left for the next opening, complete all the same.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            if self._trouble is None:
                log.warning("capture: no final checkpoint of %s: %s", self.path, error)
        finally:
            db.close()

    def _move_log(self) -> None:
        """Move the log into the file once it has grown, so that neither it nor a reader's way through it gets long."""
        if self._db is None:
            return
        try:
            size, now = wal_path(self.path).stat().st_size, time.monotonic()
            if size >= LONG_LOG_BYTES and now - self._restart_tried >= RESTART_EVERY_SECONDS:
                self._restart_tried = now
                self._begin_log_anew(self._db, size)
            elif self._unmoved >= LOG_BYTES:
                self._unmoved = 0
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except (OSError, sqlite3.Error) as error:
            # Every row is safe in the log. What is wrong with the file, the next transaction will find too.
            log.warning("capture: the log of %s cannot be moved into it: %s", self.path, error)

    def _begin_log_anew(self, db: Database, size: int) -> None:
        db.execute(f"PRAGMA busy_timeout = {int(RESTART_SECONDS * 1000)}")
        try:
            busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            db.execute(f"PRAGMA busy_timeout = {int(SLICE_SECONDS * 1000)}")
        if busy:
            log.warning("capture: a long read keeps %d MB in the log of %s", size >> 20, self.path)

    def _note(self, error: Exception, began: float) -> None:
        """Remember why rows are not written; in the log it stands once."""
        trouble = str(file_error(self.path, error) if isinstance(error, sqlite3.Error) else error)
        if self._trouble is None:
            self._trouble_began = began
        if trouble != self._trouble:
            log.warning("capture: rows wait to be written: %s", trouble)
        self._trouble = trouble
        locked = _kind(error) in LOCKED
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


def _commit(db: Database, rows: Sequence[Mapping[str, object]], again: bool) -> dict[int, Exception]:
    """Write all in one transaction; the errors of those it cannot hold, by index. Raises what stopped them all.

    `again`: an attempt came before, which may have been committed though it seemed to fail; such rows are known.
    """
    refused: dict[int, Exception] = {}
    table = db["generations"]
    db.execute("BEGIN IMMEDIATE")
    try:
        for i, row in enumerate(rows):
            try:
                table.insert(dict(row))
            except Exception as error:
                if _passes(error) or not db.conn.in_transaction:
                    raise
                if not (again and _stands(db, row)):
                    refused[i] = RecordError(f"generation {row['id']}: {error}")
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise
    return refused


def _stands(db: Database, row: Mapping[str, object]) -> bool:
    """Whether the file holds just this row."""
    return row in db["generations"].rows_where("id = ?", [row["id"]], select=", ".join(row))


def _kind(error: Exception) -> int:
    # The low byte is the kind of failure; the rest of the code only says where it happened.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF if isinstance(error, sqlite3.Error) else 0


def _passes(error: Exception) -> bool:
    return isinstance(error, CaptureError) or _kind(error) in PASSING


def _call(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        log.exception("capture: a callback failed")
