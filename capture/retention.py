"""What is kept and what goes: by age, by the number of rows, by size. Oldest first.

Knows limits; how a file is changed without being in the writer's way stands in changing.py.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from sqlite_utils import Database

from capture.changing import Seen, backups, changing, give_back, in_batches, used_bytes, writing
from capture.filters import EVERY_ROW, Filters
from capture.records import CaptureError, timestamp
from capture.store import file_error

RETENTION_SECONDS = 60.0
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a file may hold; None: as much as there is."""

    before: str | None = None  # rows created before this moment go
    max_rows: int | None = None
    max_bytes: int | None = None  # of the rows, by the pages they take

    def __bool__(self) -> bool:
        return self != Limits()


@dataclass(frozen=True)
class Pruned:
    """What went, or with `dry_run` would go (`bytes` is then an estimate)."""

    rows: int
    bytes: int
    rows_left: int
    backups: tuple[Path, ...]  # of upgrades: they keep what they held


def prune(
    path: Path,
    *,
    limits: Limits,
    chosen: Filters = EVERY_ROW,
    dry_run: bool = False,
    shrink: Literal["now", "gently"] = "now",
    on_rows: Callable[[int], Any] = lambda _: None,
) -> Pruned:
    """Delete chosen rows, oldest first, until the file is within the limits; without limits, all that are chosen.

    Safe beside a running server: small transactions, with rests. What is deleted is overwritten, and the file shrinks:
    `gently`, as far as that goes without holding the writer up. `on_rows` is told how many rows each step has looked
    at. Raises CaptureError.
    """
    if not limits and not chosen:
        raise CaptureError("every row would go: say how many, how much or how old may stay, or choose rows")
    with changing(path) as db:
        before = used_bytes(db)
        gone = size = 0
        for batch in in_batches(db, chosen):
            on_rows(len(batch))
            rest: Sequence[Seen] = batch
            # More than once, for sizes are guesses; a dry run deletes nothing, so what it has counted is taken off.
            while doomed := _beyond(limits, rest, _rows(db, limits) - gone * dry_run, used_bytes(db) - size * dry_run):
                if not dry_run:
                    _delete(db, [generation_id for _, generation_id, _ in doomed])
                gone += len(doomed)
                size += sum(taken for *_, taken in doomed)
                rest = rest[len(doomed) :]
            if rest:
                break
        if gone and not dry_run:
            give_back(db, at_once=shrink == "now")
            size = max(0, before - used_bytes(db))
        return Pruned(gone, size, db["generations"].count - gone * dry_run, tuple(backups(path)))


class Retention:
    """Prunes a file again and again from a thread of its own, beside the server that writes it.

    What goes wrong is logged and tried again the next time; `stop` ends it after the step it is in.
    """

    def __init__(
        self, path: Path, *, max_age: timedelta | None, max_bytes: int | None, every: float = RETENTION_SECONDS
    ) -> None:
        self._path = path
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._every = every
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture-retention", daemon=True)

    def start(self) -> None:
        """Begin, with what is beyond the limits already. Needs a file."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._prune()
            except _Stopped:
                return
            except CaptureError as error:
                log.warning("capture: nothing was pruned: %s", error)
            except sqlite3.Error as error:
                log.warning("capture: nothing was pruned: %s", file_error(self._path, error))
            self._stopping.wait(self._every)

    def _prune(self) -> None:
        before = None if self._max_age is None else timestamp(datetime.now(UTC) - self._max_age)
        limits = Limits(before=before, max_bytes=self._max_bytes)
        done = prune(self._path, limits=limits, shrink="gently", on_rows=self._go_on)
        if done.rows:
            log.info("capture: %d rows beyond the limits deleted", done.rows)

    def _go_on(self, _: int) -> None:
        if self._stopping.is_set():
            raise _Stopped


class _Stopped(Exception):
    """Leaves a pruning between two steps."""


def _beyond(limits: Limits, oldest: Sequence[Seen], rows: int, used: int) -> Sequence[Seen]:
    """The first of them that go, the file holding so many rows and bytes."""
    for i, row in enumerate(oldest):
        within = (
            (limits.before is None or row[0] >= limits.before)
            and (limits.max_rows is None or rows <= limits.max_rows)
            and (limits.max_bytes is None or used <= limits.max_bytes)
        )
        if limits and within:
            return oldest[:i]
        rows -= 1
        used -= row[2]
    return oldest


def _rows(db: Database, limits: Limits) -> int:
    """How many there are, where that matters: to count them takes its time."""
    return 0 if limits.max_rows is None else int(db["generations"].count)


def _delete(db: Database, ids: list[str]) -> None:
    with writing(db):
        db.execute(f"DELETE FROM generations WHERE id IN ({', '.join('?' * len(ids))})", ids)


def size(text: str) -> int:
    """Bytes of 500MB, 10GB, 1.5GiB or plain bytes. Raises CaptureError."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise CaptureError(f"{text!r} is no size; one is like 500MB, 10GB or 1GiB")
    base = 1024 if found[3] else 1000
    try:
        return int(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))
    except OverflowError:
        raise CaptureError(f"{text!r} is more than any file holds") from None
