"""A capture file to write into: made where there is none, upgraded, and still the one that stands at its path.

Knows files and SQLite's settings; knows no rows.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from pathlib import Path
from typing import Literal

from sqlite_utils import Database

from capture.migrations import schema_version, upgrade
from capture.records import CaptureError
from capture.store import WRITER_BUSY_SECONDS, connect, file_error

Synchronous = Literal["FULL", "NORMAL"]
Identity = tuple[tuple[int, int] | None, ...]


def open_for_writing(path: Path, synchronous: Synchronous, busy_seconds: float = WRITER_BUSY_SECONDS) -> Database:
    """The file, made (mode 0600) with its folders where missing, and upgraded. Raises CaptureError.

    Locks of other processes are waited for `busy_seconds`, here and by the connection later on.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(path)
    except OSError as error:
        raise CaptureError(f"cannot write a capture file at {path}: {error.strerror}") from error
    db = connect(path, busy_seconds=busy_seconds)
    try:
        if not schema_version(db):
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # what is pruned is given back a few pages at a time
        upgrade(db, path)
        _enable_wal(db, busy_seconds)
        if db.journal_mode != "wal":
            raise CaptureError(f"{path}: this file system cannot hold SQLite's write-ahead log; name a local file")
        db.execute(f"PRAGMA synchronous = {synchronous}")
        if synchronous == "FULL":
            db.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone stops at the drive's cache
    except sqlite3.Error as error:
        db.close()
        raise file_error(path, error) from error
    except BaseException:
        db.close()
        raise
    return db


def identity(path: Path, log: Path) -> Identity:
    """Which files stand at a path and at that of its log; equal as long as nobody deletes or replaces them."""
    return _inode(path), _inode(log)


def _inode(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make(path: Path) -> None:
    """An empty file, of mode 0600 before SQLite sees it: the log and the shared memory take their mode from it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not path.exists():
            fcntl.flock(folder, fcntl.LOCK_EX)  # of those who find it missing at once, one clears up and makes it
        if not path.exists():
            # Left by a file that was deleted or moved away. SQLite would take them for the new one's.
            for left in ("-wal", "-shm"):
                Path(os.path.realpath(path) + left).unlink(missing_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.fsync(folder)
    finally:
        os.close(folder)


def _enable_wal(db: Database, busy_seconds: float) -> None:
    # Changing the journal's mode does not wait for locks by itself, and another process may be doing the same.
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            db.enable_wal()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
