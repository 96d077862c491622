"""What is kept and what goes: by age, by the number of rows, by size. Oldest first.

Knows limits; how a file is changed without being in the writer's way stands in changing.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from capture.changing import Seen, backups, changing, give_back, in_batches, used_bytes, writing
from capture.filters import EVERY_ROW, Filters
from capture.records import CaptureError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


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
    on_rows: Callable[[int], Any] = lambda _: None,
) -> Pruned:
    """Delete chosen rows, oldest first, until the file is within the limits; without limits, all that are chosen.

    Safe beside a running server: small transactions, with rests. What is deleted is overwritten, and the file shrinks.
    `on_rows` is told how many rows each step has looked at. Raises CaptureError.
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
            while doomed := _beyond(
                limits, rest, db["generations"].count - gone * dry_run, used_bytes(db) - size * dry_run
            ):
                if not dry_run:
                    _delete(db, [generation_id for _, generation_id, _ in doomed])
                gone += len(doomed)
                size += sum(taken for *_, taken in doomed)
                rest = rest[len(doomed) :]
            if rest:
                break
        if gone and not dry_run:
            give_back(db)
            size = max(0, before - used_bytes(db))
        return Pruned(gone, size, db["generations"].count - gone * dry_run, tuple(backups(path)))


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


def _delete(db: Database, ids: list[str]) -> None:
    with writing(db):
        db.execute(f"DELETE FROM generations WHERE id IN ({', '.join('?' * len(ids))})", ids)


def size(text: str) -> int:
    """Bytes of 500MB, 10GB, 1.5GiB or plain bytes. Raises CaptureError."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise CaptureError(f"{text!r} is no size; one is like 500MB, 10GB or 1GiB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))
