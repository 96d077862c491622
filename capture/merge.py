"""Several capture files into one: every id once, nothing overwritten. What replicas wrote apart can be read together.

Knows rows and files; needs no server, and does not mind running ones.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from capture.changing import LOG_SECONDS, changing, empty_log, writing
from capture.filters import EVERY_ROW, Filters
from capture.records import COLUMNS, CaptureError, to_row
from capture.store import WRITER_BUSY_SECONDS, Store, file_error
from capture.writer import CaptureWriter

BATCH_ROWS = 200


@dataclass(frozen=True)
class Merged:
    """What came of one file: rows copied, rows there already, and the ids of rows there with other content."""

    source: Path
    copied: int
    known: int
    conflicts: tuple[str, ...]


def merge(
    into: Path,
    sources: Sequence[Path],
    *,
    chosen: Filters = EVERY_ROW,
    on_rows: Callable[[int], Any] = lambda _: None,
) -> list[Merged]:
    """Copy the chosen rows of each source into a file, which is made where there is none. One result a source.

    A row whose id is there with other content is left as it is there, and reported. Files of older versions are
    upgraded first. What was merged before is known the next time. Raises CaptureError.
    """
    with ExitStack() as stack:
        opened = []
        for source in sources:
            if into.exists() and source.exists() and source.samefile(into):
                raise CaptureError(f"{source} cannot be merged into itself")
            opened.append(stack.enter_context(Store.open(source, readonly=False)))
        # Made, or upgraded, as the server does it.
        writer = CaptureWriter(into)
        writer.start()
        writer.close(WRITER_BUSY_SECONDS)
        db = stack.enter_context(changing(into))
        merged = [_copy(db, store, chosen, on_rows) for store in opened]
        empty_log(db, LOG_SECONDS)
        return merged


def _copy(db: Database, source: Store, chosen: Filters, on_rows: Callable[[int], Any]) -> Merged:
    copied = known = 0
    conflicts: list[str] = []
    for rows in _batches(source, chosen):
        with writing(db):
            there = _present(db, [str(row["id"]) for row in rows])
            fresh = [row for row in rows if row["id"] not in there]
            db.conn.executemany(INSERT, fresh)
        copied += len(fresh)
        for row in rows:
            if (other := there.get(str(row["id"]))) is not None:
                known += other == row
                conflicts += [str(row["id"])] if other != row else []
        on_rows(len(rows))
    return Merged(source.path, copied, known, tuple(conflicts))


INSERT = f"INSERT INTO generations ({', '.join(COLUMNS)}) VALUES ({', '.join(f':{name}' for name in COLUMNS)})"


def _batches(source: Store, chosen: Filters) -> Iterator[list[dict[str, object]]]:
    where, arguments = chosen.sql()
    rows = (to_row(row) for row in source.iterate(where=where, arguments=arguments))
    try:
        while batch := list(islice(rows, BATCH_ROWS)):
            yield batch
    except sqlite3.Error as error:
        raise file_error(source.path, error) from error


def _present(db: Database, ids: Sequence[str]) -> dict[str, dict[str, object]]:
    wanted = f"id IN ({', '.join('?' * len(ids))})"
    found = db["generations"].rows_where(wanted, ids, select=", ".join(COLUMNS))
    return {row["id"]: row for row in found}
