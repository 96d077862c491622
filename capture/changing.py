"""A capture file changed in place beside its live writer: a little at a time, and nothing left of what was there.

Knows SQLite's pages, log and locks; knows nothing of why rows change.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlite_utils import Database

from capture.filters import Filters
from capture.migrations import check
from capture.records import CaptureError
from capture.store import WRITER_BUSY_SECONDS, connect

# What one transaction touches at most: the writer waits for it.
BATCH_ROWS = 200
BATCH_BYTES = 4_000_000
BATCH_PAGES = 1_000
LOG_SECONDS = 30.0
LOG_SLICE_SECONDS = 0.2

# What a row takes in its table and index, about.
TEXTS = ("request", "response_text", "reasoning", "tool_calls")
BLOBS = ("prompt_tokens", "completion_tokens", "logprobs", "steps")
ROW_BYTES = " + ".join(f"coalesce(length({name}), 0)" for name in TEXTS + BLOBS) + " + 1000"

Seen = tuple[str, str, int]  # created_at, id, about how many bytes


@contextmanager
def changing(path: Path) -> Iterator[Database]:
    """The file, open for changes; what they overwrite or delete is overwritten on the disk. Raises CaptureError."""
    with closing(connect(path, busy_seconds=WRITER_BUSY_SECONDS)) as db:
        check(db, path)
        db.execute("PRAGMA secure_delete = ON")
        yield db


def in_batches(db: Database, chosen: Filters) -> Iterator[list[Seen]]:
    """The chosen rows of a moment, oldest first, in batches small enough for one transaction each.

    After a batch it rests as long as the batch was worked on, so that the writer gets its turn.
    """
    where, arguments = chosen.sql()
    after: tuple[str, str] = ("", "")
    newest = db.execute("SELECT max(created_at) FROM generations").fetchone()[0] or ""
    while True:
        rows: list[Seen] = db.execute(
            f"SELECT created_at, id, {ROW_BYTES} FROM generations "
            f"WHERE (created_at, id) > (?, ?) AND created_at <= ? AND {where} "
            f"ORDER BY created_at, id LIMIT {BATCH_ROWS}",
            [*after, newest, *arguments],
        ).fetchall()
        if not rows:
            return
        batch: list[Seen] = []
        size = 0
        for row in rows:
            if batch and size + row[2] > BATCH_BYTES:
                break
            batch.append(row)
            size += row[2]
        after = batch[-1][:2]
        began = time.monotonic()
        yield batch
        time.sleep(time.monotonic() - began)


@contextmanager
def writing(db: Database) -> Iterator[None]:
    """One transaction that holds the write lock from its beginning."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


def used_bytes(db: Database) -> int:
    """What the rows take of the file; the rest of it is free pages."""
    return (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")


def give_back(db: Database, *, at_once: bool) -> None:
    """Make the file as small as its rows, a few pages at a time.

    Only `at_once` where that holds the writer up for longer: a file made before files could shrink by parts is written
    anew, and the log is waited for.
    """
    if _pragma(db, "auto_vacuum") != 2:
        if not at_once:
            return
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("VACUUM")
    while free := _pragma(db, "freelist_count"):
        began = time.monotonic()
        db.execute(f"PRAGMA incremental_vacuum({BATCH_PAGES})").fetchall()
        if _pragma(db, "freelist_count") >= free:
            break  # the writer takes them as fast as they come
        time.sleep(time.monotonic() - began)
    empty_log(db, LOG_SECONDS if at_once else 0)


def write_anew(db: Database) -> None:
    """Write the whole file anew, so that no page keeps a trace of what rows once held. The writer waits meanwhile."""
    db.execute("VACUUM")
    if not empty_log(db, LOG_SECONDS):
        raise CaptureError(
            "done, but the write-ahead log still holds old pages, because a long read is under way: run this again"
        )


def empty_log(db: Database, seconds: float) -> bool:
    """Move the write-ahead log into the file and cut it to nothing; False where others prevented it for that long."""
    deadline = time.monotonic() + seconds
    # While it waits for readers the writer has to wait too: so it waits a little at a time.
    db.execute(f"PRAGMA busy_timeout = {int(LOG_SLICE_SECONDS * 1000)}")
    try:
        while True:
            busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy or time.monotonic() > deadline:
                return not busy
            time.sleep(LOG_SLICE_SECONDS)
    finally:
        db.execute(f"PRAGMA busy_timeout = {int(WRITER_BUSY_SECONDS * 1000)}")


def backups(path: Path) -> Sequence[Path]:
    """The copies of a file that its upgrades have made, unfinished ones too, and older ones beside a link to it."""
    files = {Path(os.path.realpath(path)), Path(os.path.realpath(path.parent), path.name)}
    names = [(file.parent, f"{glob.escape(file.name)}.v*.{end}") for file in files for end in ("bak", "bak.tmp")]
    return sorted(copy for folder, name in names for copy in folder.glob(name))


def _pragma(db: Database, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
