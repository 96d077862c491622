"""The schema's versions: `PRAGMA user_version` counts the migrations a file has had.

Knows how to bring an old file up to date safely, and nothing of what the rows mean.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from sqlite_utils import Database

from capture import totals
from capture.records import COLUMNS, NULLABLE, CaptureError

Migration = Callable[[Database], None]


def _create_generations(db: Database) -> None:
    table = db["generations"]
    table.create(dict(COLUMNS), pk="id", not_null={name for name in COLUMNS if name not in NULLABLE})
    table.create_index(["created_at", "id"])


MIGRATIONS: Sequence[Migration] = (_create_generations, totals.create)


def schema_version(db: Database) -> int:
    """How many migrations the file has had; 0 for a new one."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def check(db: Database, path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Refuse a file that this version cannot read as it is. Changes nothing. Raises CaptureError."""
    version = _known_version(db, path, migrations)
    if version == 0:
        raise CaptureError(f"{path} is empty: nothing has been captured into it yet")
    if version < len(migrations):
        raise CaptureError(
            f"{path} has schema version {version}, this draftloop reads {len(migrations)}: "
            "start `serve` on it once to upgrade it (a backup is made)"
        )


def upgrade(db: Database, path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring a file to the newest schema, in one transaction; an older file is first copied to `<file>.v<old>.bak`,
    beside the file itself wherever a link to it stands.

    `db` must have no open transaction. Raises CaptureError for a newer or a foreign file, and sqlite3.Error, with the
    file as it was, when a migration fails.
    """
    if _known_version(db, path, migrations) == len(migrations):
        return
    # Under the write lock, so that of two processes starting at once one upgrades and the other finds it done.
    db.execute("BEGIN IMMEDIATE")
    try:
        version = _known_version(db, path, migrations)
        if 0 < version < len(migrations):
            _back_up(path, Path(f"{os.path.realpath(path)}.v{version}.bak"))
        for migration in migrations[version:]:
            migration(db)
        db.execute(f"PRAGMA user_version = {len(migrations)}")
        db.execute("COMMIT")
    except BaseException as error:
        db.rollback()
        if isinstance(error, OSError):
            raise CaptureError(f"cannot copy {path} before it is upgraded: {error.strerror}") from error
        raise


def _known_version(db: Database, path: Path, migrations: Sequence[Migration]) -> int:
    with db.atomic():  # both as of one moment: another process may be making the file
        version, tables = schema_version(db), db.table_names()
    if version > len(migrations):
        raise CaptureError(
            f"{path} was written by a newer draftloop (schema version {version}, this one knows {len(migrations)}): "
            "upgrade draftloop, or name another file"
        )
    if tables and (version == 0 or "generations" not in tables):
        raise CaptureError(f"{path} is an SQLite file, but not a draftloop capture file")
    return version


def _back_up(path: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".tmp")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
    partial.replace(target)
