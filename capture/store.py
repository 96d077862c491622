"""A capture file to read: counts, acceptance, single rows, and all rows as a stream.

Knows the table and SQLite; knows nothing of how rows get there, of models or of tokenizers.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlite_utils import Database

from capture import totals
from capture.filters import EVERY_ROW, Filters
from capture.migrations import check, schema_version, upgrade
from capture.records import COLUMNS, CaptureError, Generation, Status, from_row, storable
from capture.selection import KEY_BITS, Sample, sample_key

READER_BUSY_SECONDS = 5.0
WRITER_BUSY_SECONDS = 30.0


class UnknownGenerationError(CaptureError):
    """No row, or more than one, answers to the id asked for."""


def default_path() -> Path:
    """The capture file of server and CLI alike: $DRAFTLOOP_CAPTURE, else draftloop/capture.db in the data home."""
    if configured := os.environ.get("DRAFTLOOP_CAPTURE"):
        return Path(configured)
    data_home = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification: a relative path in the variable is to be ignored.
    base = Path(data_home) if os.path.isabs(data_home) else Path.home() / ".local" / "share"
    return base / "draftloop" / "capture.db"


def connect(path: Path, *, busy_seconds: float) -> Database:
    """Open an existing file; the connection may move to another thread. Raises CaptureError."""
    try:
        missing = not path.exists()
    except OSError as error:
        raise CaptureError(f"cannot open {path}: {error.strerror}") from error
    if missing:
        raise CaptureError(f"no capture file at {path}: `serve` makes one, or name another with --capture")
    if not path.is_file():
        raise CaptureError(f"{path} is not a file")
    uri = f"{path.absolute().as_uri()}?mode=rw"
    try:
        connection = sqlite3.connect(uri, uri=True, timeout=busy_seconds, check_same_thread=False)
    except sqlite3.Error as error:
        raise CaptureError(f"cannot open {path}: {error}") from error
    db = Database(connection, execute_plugins=False)
    try:
        db.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        db.close()
        raise file_error(path, error) from error
    return db


def file_error(path: Path, error: sqlite3.Error) -> CaptureError:
    """What SQLite found wrong with a file, in one line."""
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_NOTADB:
        return CaptureError(f"{path} is not an SQLite file")
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
        return CaptureError(f"{path} is locked by another process")
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN:
        return CaptureError(f"{path} cannot be opened: SQLite makes files beside it; to read it elsewhere, copy it")
    return CaptureError(f"{path}: {error}")


@dataclass(frozen=True)
class Acceptance:
    """What a drafter's verify steps came to (DESIGN §6); lists are indexed by slot."""

    drafter: str
    steps: int  # verify steps, those that proposed nothing included
    proposed: tuple[int, ...]  # P_s: steps in which a draft stood in slot s
    accepted: tuple[int, ...]  # A_s: steps in which the drafts of slots 0 … s were all accepted

    @property
    def surv(self) -> tuple[float, ...]:
        """A_s / P_s."""
        return tuple(a / p for a, p in zip(self.accepted, self.proposed, strict=True))

    @property
    def draft_acceptance(self) -> float | None:
        """Σ A_s / Σ P_s; None where nothing was proposed."""
        return sum(self.accepted) / sum(self.proposed) if self.proposed else None

    @property
    def acceptance_length(self) -> float | None:
        """τ = 1 + Σ A_s / verify steps; None without a step."""
        return 1 + sum(self.accepted) / self.steps if self.steps else None


@dataclass(frozen=True)
class Stats:
    """Rows in figures; `file_bytes` is the whole file's size and includes the write-ahead log."""

    rows: int
    by_status: dict[str, int]
    by_finish_reason: dict[str, int]
    by_drafter: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    acceptance: tuple[Acceptance, ...]
    first: str | None
    last: str | None
    file_bytes: int


@dataclass(frozen=True)
class Summary:
    """A row without its large columns; token counts are None where no ids were kept."""

    id: str
    created_at: str
    status: Status
    finish_reason: str | None
    model: str
    drafter: str
    prompt_tokens: int | None
    completion_tokens: int | None
    preview: str  # the answer's first 80 characters


class Store:
    """An open capture file. Use as a context manager, or `close()` it."""

    def __init__(self, path: Path, db: Database) -> None:
        self.path = path
        self._db = db
        self._table = db["generations"]

    @classmethod
    def open(cls, path: Path, *, readonly: bool = True) -> Self:
        """Open an existing file; an older schema is upgraded only when not `readonly`. Raises CaptureError."""
        db = connect(path, busy_seconds=READER_BUSY_SECONDS if readonly else WRITER_BUSY_SECONDS)
        try:
            if readonly:
                # Not SQLite's own read-only mode: it cannot recover a killed writer's log, and leaves files behind.
                db.execute("PRAGMA query_only = ON")
            elif schema_version(db):
                upgrade(db, path)
            check(db, path)
            db.register_function(sample_key, deterministic=True)
        except sqlite3.Error as error:
            db.close()
            raise file_error(path, error) from error
        except BaseException:
            db.close()
            raise
        return cls(path, db)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Every read inside sees the file at one moment, whatever is written meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.rollback()

    def count(self, chosen: Filters = EVERY_ROW) -> int:
        """How many rows."""
        return int(self._table.count_where(*chosen.sql()))

    def get(self, id_or_prefix: str) -> Generation:
        """The row with this id, or the only one whose id starts so. Raises UnknownGenerationError."""
        # A range rather than LIKE: it walks the index, and no character of the prefix means anything else.
        bounds = {"start": storable(id_or_prefix)}
        found = [*self._table.rows_where("id >= :start AND id < :start || char(1114111)", bounds, "id", limit=2)]
        if not found:
            raise UnknownGenerationError(f"no generation {id_or_prefix!r} in {self.path}")
        if len(found) > 1 and found[0]["id"] != id_or_prefix:
            raise UnknownGenerationError(f"{id_or_prefix!r} is the start of more than one id: give more of it")
        return from_row(found[0])

    def iterate(self, *, where: str | None = None, arguments: Sequence[Any] = ()) -> Iterator[Generation]:
        """Every row, oldest first, one in memory at a time; `where` is an SQL condition over `arguments`."""
        for row in self._table.rows_where(where, arguments, order_by="created_at, id", select=", ".join(COLUMNS)):
            yield from_row(row)

    def stored(self, chosen: Filters = EVERY_ROW) -> Iterator[Mapping[str, Any]]:
        """Rows as they are stored, oldest first, one in memory at a time."""
        yield from self._table.rows_where(*chosen.sql(), order_by="created_at, id", select=", ".join(COLUMNS))

    def integrity(self) -> Sequence[str]:
        """What SQLite finds wrong with the file's pages and indexes, up to a hundred lines."""
        try:
            return [line for (line,) in self._db.execute("PRAGMA integrity_check") if line != "ok"]
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            return [str(error)]

    def miscounted(self) -> Sequence[str]:
        """What the figures that `stats` tells of the whole file say otherwise than its rows."""
        with self.snapshot():
            return [*totals.differences(self._db)]

    def sampled(self, sample: Sample, *, where: str, arguments: Sequence[Any] = ()) -> tuple[str, list[Any]]:
        """A condition that holds for the sample's rows alone of those that meet `where`, and its arguments."""
        if sample.share is not None:
            return "sample_key(id, ?) < ?", [sample.seed, int(sample.share * (1 << KEY_BITS))]
        key = "SELECT sample_key(id, ?) FROM generations WHERE"
        last = self._db.execute(
            f"{key} {where} ORDER BY 1 LIMIT 1 OFFSET ?", [sample.seed, *arguments, (sample.rows or 1) - 1]
        ).fetchone()
        return ("true", []) if last is None else ("sample_key(id, ?) <= ?", [sample.seed, last[0]])

    def groups(
        self, columns: Sequence[str], *, where: str | None = None, arguments: Sequence[Any] = ()
    ) -> list[tuple[tuple[Any, ...], int]]:
        """The distinct values of some columns, the first seen first, each with its number of rows."""
        names = ", ".join(columns)
        rows = self._db.execute(
            f"SELECT count(*), {names} FROM generations WHERE {where or 'true'} GROUP BY {names} ORDER BY min(id)",
            arguments,
        )
        return [(tuple(values), count) for count, *values in rows]

    def stats(self, chosen: Filters = EVERY_ROW) -> Stats:
        """The file in figures, taken at one moment; without a choice of rows in no time, however many there are."""
        with self.snapshot():
            return self._stats_of(chosen) if chosen else self._stats()

    def _stats(self) -> Stats:
        by = {
            column: _most_first(totals.rows_by(self._db, column)) for column in ("status", "finish_reason", "drafter")
        }
        prompt, completion = totals.tokens(self._db)
        counts = {drafter: np.zeros((2, 256), dtype=np.int64) for drafter in by["drafter"]}
        for drafter, drafted, accepted, count in totals.steps(self._db):
            counts[drafter][(0, 1), (drafted, accepted)] += count
        created = "created_at FROM generations ORDER BY created_at"
        first, last = (
            self._db.execute(f"SELECT {created} {order} LIMIT 1").fetchone() or (None,) for order in ("ASC", "DESC")
        )
        return Stats(
            rows=sum(by["status"].values()),
            by_status=by["status"],
            by_finish_reason=by["finish_reason"],
            by_drafter=by["drafter"],
            prompt_tokens=prompt,
            completion_tokens=completion,
            acceptance=tuple(_acceptance_of(*item) for item in sorted(counts.items())),
            first=first[0],
            last=last[0],
            file_bytes=self._file_bytes(),
        )

    def _stats_of(self, chosen: Filters) -> Stats:
        where, arguments = chosen.sql()
        tokens = "coalesce(sum(length({0})) / 4, 0)"
        prompt, completion, first, last = self._db.execute(
            f"SELECT {tokens.format('prompt_tokens')}, {tokens.format('completion_tokens')}, "
            f"min(created_at), max(created_at) FROM generations WHERE {where}",
            arguments,
        ).fetchone()
        return Stats(
            rows=self.count(chosen),
            by_status=self._counts("status", chosen),
            by_finish_reason=self._counts("finish_reason", chosen),
            by_drafter=self._counts("drafter", chosen),
            prompt_tokens=prompt,
            completion_tokens=completion,
            acceptance=self._acceptance(chosen),
            first=first,
            last=last,
            file_bytes=self._file_bytes(),
        )

    def _file_bytes(self) -> int:
        return sum(p.stat().st_size for p in (self.path, wal_path(self.path)) if p.exists())

    def _counts(self, column: str, chosen: Filters) -> dict[str, int]:
        where, arguments = chosen.sql()
        groups = self.groups([column], where=where, arguments=arguments)
        found = {("none" if value is None else value): count for (value,), count in groups}
        return _most_first(found)

    def _acceptance(self, chosen: Filters) -> tuple[Acceptance, ...]:
        # Counts of (drafted, accepted) values, 0 … 255, per drafter, from the raw blobs of many rows at once.
        totals: dict[str, NDArray[np.int64]] = {}
        where, arguments = chosen.sql()
        cursor = self._db.execute(f"SELECT drafter, steps FROM generations WHERE {where}", arguments)
        while rows := cursor.fetchmany(1000):
            blobs: dict[str, list[bytes]] = {}
            for drafter, steps in rows:
                blobs.setdefault(drafter, []).append(steps)
            for drafter, parts in blobs.items():
                pairs = np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(-1, 2)
                counts = np.stack([np.bincount(column, minlength=256) for column in pairs.T])
                totals[drafter] = totals.get(drafter, 0) + counts
        return tuple(_acceptance_of(drafter, counts) for drafter, counts in sorted(totals.items()))

    # Last, because its name hides the built-in in the annotations after it.
    def list(self, limit: int = 20, chosen: Filters = EVERY_ROW) -> Iterator[Summary]:
        """The newest rows, newest first."""
        rows = self._table.rows_where(
            *chosen.sql(),
            order_by="created_at DESC, id DESC",
            limit=limit,
            select="id, created_at, status, finish_reason, model, drafter, length(prompt_tokens) / 4 AS prompt_tokens, "
            "length(completion_tokens) / 4 AS completion_tokens, substr(response_text, 1, 80) AS preview",
        )
        return (Summary(**row) for row in rows)


def wal_path(path: Path) -> Path:
    """SQLite's write-ahead log: beside the file itself, wherever a link to it stands."""
    return Path(os.path.realpath(path) + "-wal")


def _most_first(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _acceptance_of(drafter: str, counts: NDArray[np.int64]) -> Acceptance:
    """`counts[0][n]`, `counts[1][n]`: steps that drafted, that accepted, exactly n tokens."""
    at_least = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # [2, 256]: steps with n or more
    proposed, accepted = at_least[:, 1:]
    slots = int(np.count_nonzero(proposed))
    return Acceptance(drafter, int(at_least[0, 0]), tuple(proposed[:slots].tolist()), tuple(accepted[:slots].tolist()))
