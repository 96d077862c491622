"""Redaction of rows that are stored already, so that the text is in no file of the capture's any more.

Knows which files those are; what is replaced stands in redact.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from capture.changing import backups, changing, in_batches, write_anew, writing
from capture.filters import EVERY_ROW, Filters
from capture.records import COLUMNS, CaptureError, Generation, from_row, to_row
from capture.redact import Redactor


@dataclass(frozen=True)
class Redacted:
    """What was done, or with `dry_run` would be: rows with a match, matches, copies of the file removed."""

    rows: int
    matches: int
    backups: tuple[Path, ...]


def redact_rows(
    path: Path,
    redactor: Redactor,
    *,
    chosen: Filters = EVERY_ROW,
    dry_run: bool = False,
    on_rows: Callable[[int], Any] = lambda _: None,
) -> Redacted:
    """Redact the chosen rows, a few at a time beside a running server, then write the file anew and empty its log.

    The copies that upgrades made are removed, for the text may be in them. Exports are other files: they stay as they
    are. `on_rows` is told how many rows each step has looked at. Raises CaptureError.
    """
    rows = matches = 0
    with changing(path) as db:
        for batch in in_batches(db, chosen):
            found = _redact(db, [generation_id for _, generation_id, _ in batch], redactor, dry_run)
            rows += len(found)
            matches += sum(found)
            on_rows(len(batch))
        copies = tuple(backups(path))
        if not dry_run:
            _remove(copies)
            write_anew(db)
    return Redacted(rows, matches, copies)


def _remove(copies: Iterable[Path]) -> None:
    try:
        for copy in copies:
            copy.unlink(missing_ok=True)
    except OSError as error:
        raise CaptureError(f"{error.filename} may hold the text and cannot be removed: {error.strerror}") from error


def _redact(db: Database, ids: Sequence[str], redactor: Redactor, dry_run: bool) -> list[int]:
    """Redact rows in one transaction; how many matches each had that had any."""
    clean = list(_redacted(db, ids, redactor))
    if dry_run or not clean:
        return [matches for _, matches in clean]
    with writing(db):
        # Once more, as they stand under the lock: another redaction may have taken something else out of them.
        clean = list(_redacted(db, [row.id for row, _ in clean], redactor))
        for row, _ in clean:
            values = to_row(row)
            assignments = ", ".join(f"{name} = :{name}" for name in values if name != "id")
            db.execute(f"UPDATE generations SET {assignments} WHERE id = :id", values)
    return [matches for _, matches in clean]


def _redacted(db: Database, ids: Sequence[str], redactor: Redactor) -> Iterator[tuple[Generation, int]]:
    """Those of the rows that have a match, without it, and how many they had."""
    wanted = f"id IN ({', '.join('?' * len(ids))})"
    for found in db["generations"].rows_where(wanted, ids, select=", ".join(COLUMNS)):
        row = from_row(found)
        clean = redactor.generation(row)
        if clean is not row:
            yield clean, clean.redacted - row.redacted
