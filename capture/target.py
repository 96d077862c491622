"""The file that a writer commits to: its transactions, the length of its log, and what to do when it is moved away.

Knows rows as values for columns and SQLite's failures; knows no queue, and nobody who waits for a row.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from sqlite_utils import Database

from capture.changing import writing
from capture.opening import Identity, Synchronous, identity, open_for_writing
from capture.records import COLUMNS, CaptureError, RecordError
from capture.store import wal_path

LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
# Failures of the moment: another process's lock, a full disk, a file that is damaged until somebody puts it right.
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
# SQLite's wait for a lock cannot be interrupted, so it is taken in slices.
SLICE_SECONDS = 1.0
# The log is moved into the file from the first size on. From the second on it is also begun anew, though that holds up
# writers until every read that began before is over; so it is tried shortly and seldom.
LOG_BYTES = 4 << 20
LONG_LOG_BYTES = 32 << 20
RESTART_SECONDS = 0.25
RESTART_EVERY_SECONDS = 5.0
# Written out: sqlite-utils' own insert asks for the table's columns and keys before every row, and each statement is
# a turn in which this thread gives the interpreter away and waits for it, and the engine's waits in its turn.
INSERT = f"INSERT INTO generations ({', '.join(COLUMNS)}) VALUES ({', '.join(f':{name}' for name in COLUMNS)})"

log = logging.getLogger(__name__)

Row = Mapping[str, object]


class FileReplacedError(CaptureError):
    """What was open is not what stands at the path any more: it, or its log, was deleted, moved or replaced."""


class Target:
    """The file at a path. `open` it before the first `commit`; after a failure the next one opens it again if need be.

    All but `open` on one thread.
    """

    def __init__(self, path: Path, synchronous: Synchronous) -> None:
        self.path = path
        self._synchronous = synchronous
        self._db: Database | None = None
        self._log = path  # the one that SQLite writes, wherever the path leads
        self._identity: Identity = ()
        self._moved: list[Database] = []  # files that stood here once; a read holds the rows in their logs back
        self._unmoved = 0  # bytes of rows that went into the log since it was last moved into the file
        self._restart_tried = 0.0

    def open(self) -> None:
        """Make the file (mode 0600) and its folders where missing, and upgrade it. Raises CaptureError."""
        self._use(open_for_writing(self.path, self._synchronous))

    @property
    def unfinished(self) -> bool:
        """Whether `tidy` has something to do before the next commit."""
        return bool(self._moved)

    def commit(self, rows: Sequence[Row], again: bool) -> dict[int, RecordError]:
        """Write all in one transaction, to the file that stands at the path; the errors of those it cannot hold.

        `again`: an attempt came before, which may have been committed though it seemed to fail; such rows are known.
        Raises what stopped them all: it may pass, or not, as `passes` says.
        """
        if self._db is None:
            self._use(open_for_writing(self.path, self._synchronous, SLICE_SECONDS))
        assert self._db is not None
        self._require_in_place(self._db)
        try:
            refused = _insert(self._db, rows, again)
        except Exception as error:
            if passes(error) and kind(error) not in LOCKED | {sqlite3.SQLITE_FULL}:
                self._db.close()  # what a connection has found wrong once, it may go on to find
                self._db = None
            raise
        # If not, they are in a file that nobody finds, and are written once more to the one that will be there.
        self._require_in_place(self._db)
        self._unmoved += sum(len(value) for row in rows for value in row.values() if isinstance(value, str | bytes))
        return refused

    def tidy(self) -> None:
        """Move the log into the file once it has grown, so that neither it nor a reader's way through it gets long."""
        self._let_go()
        if self._db is None:
            return
        try:
            size, now = self._log.stat().st_size, time.monotonic()
            if size >= LONG_LOG_BYTES and now - self._restart_tried >= RESTART_EVERY_SECONDS:
                self._restart_tried = now
                if not _emptied(self._db, RESTART_SECONDS):
                    log.warning("capture: a long read keeps %d MB in the log of %s", size >> 20, self.path)
            elif self._unmoved >= LOG_BYTES:
                self._unmoved = 0
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except (OSError, sqlite3.Error) as error:
            # Every row is safe in the log. What is wrong with the file, the next transaction will find too.
            log.warning("capture: the log of %s cannot be moved into it: %s", self.path, error)

    def close(self) -> None:
        """Close it, with its log moved into it; where a read prevents that it is complete with the log beside it."""
        self._let_go()
        for db in self._moved:
            log.error("capture: a file moved away from %s lacks rows that a long read held back", self.path)
            db.close()
        if self._db is None:
            return
        try:
            _emptied(self._db, SLICE_SECONDS)
        except sqlite3.Error as error:
            log.warning("capture: no final checkpoint of %s: %s", self.path, error)
        finally:
            self._db.close()

    def _use(self, db: Database) -> None:
        db.conn.isolation_level = None  # a row that comes alone is a transaction by itself: one statement, not three
        _wait_at_most(db, SLICE_SECONDS)
        db.execute("PRAGMA wal_autocheckpoint = 0")  # the answers need not wait for it: `tidy` follows them
        db.execute("SELECT 1 FROM sqlite_master").fetchone()  # the log is there from the first read on
        self._db, self._log = db, wal_path(self.path)
        self._identity = identity(self.path, self._log)

    def _require_in_place(self, db: Database) -> None:
        found = identity(self.path, self._log)
        if found == self._identity:
            return
        # Its log will not be found beside it, or not under its name.
        if _emptied(db, RESTART_SECONDS):
            db.close()
        elif found[0] == self._identity[0]:
            raise FileReplacedError(
                f"the log of {self.path} was deleted, and a long read prevents that a new one is made"
            )
        else:
            self._moved.append(db)
        self._db = None
        raise FileReplacedError(f"{self.path} or its log was deleted or replaced while it is written to")

    def _let_go(self) -> None:
        for db in list(self._moved):
            try:
                if not _emptied(db, 0):
                    continue
            except sqlite3.Error as error:
                log.error("capture: a file moved away from %s may lack rows: %s", self.path, error)
            self._moved.remove(db)
            db.close()


def kind(error: Exception) -> int:
    """SQLite's primary code of an error; 0 for those of others."""
    # The low byte is the kind of failure; the rest of the code only says where it happened.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF if isinstance(error, sqlite3.Error) else 0


def passes(error: Exception) -> bool:
    """Whether a commit that failed so may be tried again, as often as it takes."""
    return isinstance(error, CaptureError) or kind(error) in PASSING


def _insert(db: Database, rows: Sequence[Row], again: bool) -> dict[int, RecordError]:
    refused: dict[int, RecordError] = {}
    alone = len(rows) == 1
    with nullcontext() if alone else writing(db):
        for i, row in enumerate(rows):
            try:
                db.execute(INSERT, row)
            except Exception as error:
                if passes(error) or not (alone or db.conn.in_transaction):
                    raise
                if not (again and _stands(db, row)):
                    refused[i] = RecordError(f"generation {row['id']}: {error}")
    return refused


def _stands(db: Database, row: Row) -> bool:
    """Whether the file holds just this row."""
    return row in db["generations"].rows_where("id = ?", [row["id"]], select=", ".join(row))


def _emptied(db: Database, seconds: float) -> bool:
    """Move the log into the file and cut it to nothing; False where reads prevent that for so long."""
    _wait_at_most(db, seconds)
    try:
        busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    finally:
        _wait_at_most(db, SLICE_SECONDS)


def _wait_at_most(db: Database, seconds: float) -> None:
    db.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
