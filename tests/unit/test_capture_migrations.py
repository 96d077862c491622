"""The schema over the versions: what is upgraded, what is refused, and that nothing is half done."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from capture.migrations import MIGRATIONS, Migration, check, upgrade
from capture.records import CaptureError
from capture.store import Store
from capture.writer import CaptureWriter
from tests.capture_rows import generation, write


def add_note(db: Database) -> None:
    db["generations"].add_column("note", str)


def fail_after_changing(db: Database) -> None:
    db["generations"].add_column("half", str)
    raise RuntimeError("no")


LATEST = len(MIGRATIONS)
NEXT: list[Migration] = [*MIGRATIONS, add_note]


def columns(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {row[1] for row in db.execute("PRAGMA table_info(generations)")}


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "capture.db", generation(id="one"), generation(id="two"))


def set_version(path: Path, value: int) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {value}")


def test_an_older_file_is_upgraded_and_its_rows_stay(path: Path) -> None:
    with closing(Database(path)) as db:
        upgrade(db, path, NEXT)
    assert version(path) == len(NEXT)
    assert "note" in columns(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id FROM generations ORDER BY id").fetchall() == [("one",), ("two",)]


def test_an_older_file_is_backed_up_first_and_the_backup_is_private(path: Path) -> None:
    with closing(Database(path)) as db:
        upgrade(db, path, NEXT)
    backup = path.with_name(f"capture.db.v{LATEST}.bak")
    assert version(backup) == LATEST
    assert "note" not in columns(backup)
    assert backup.stat().st_mode & 0o777 == 0o600
    with Store.open(backup) as store:
        assert store.count() == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["capture.db", f"capture.db.v{LATEST}.bak"]


def test_the_backup_holds_rows_that_are_still_in_the_write_ahead_log(path: Path) -> None:
    writer = CaptureWriter(path)
    writer.start()
    writer.submit(generation(id="three")).result(timeout=10)
    with closing(Database(path)) as db:
        upgrade(db, path, NEXT)
    assert writer.close(timeout=10)
    with Store.open(path.with_name(f"capture.db.v{LATEST}.bak")) as store:
        assert store.count() == 3


def test_a_failing_migration_leaves_the_file_as_it_was(path: Path) -> None:
    before = columns(path)
    with closing(Database(path)) as db, pytest.raises(RuntimeError):
        upgrade(db, path, [*NEXT, fail_after_changing])
    assert version(path) == LATEST
    assert columns(path) == before


def test_where_no_copy_can_be_made_nothing_is_upgraded_and_one_line_says_so(path: Path) -> None:
    path.with_name(f"capture.db.v{LATEST}.bak.tmp").mkdir()
    with closing(Database(path)) as db, pytest.raises(CaptureError, match=r"cannot copy .*/capture\.db before"):
        upgrade(db, path, NEXT)
    assert version(path) == LATEST
    assert "note" not in columns(path)


def test_a_current_file_is_left_alone(path: Path) -> None:
    with closing(Database(path)) as db:
        upgrade(db, path)
    assert [p.name for p in path.parent.iterdir()] == ["capture.db"]


def test_a_new_file_gets_every_migration_and_no_backup(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with closing(Database(path)) as db:
        upgrade(db, path, NEXT)
    assert version(path) == len(NEXT)
    assert [p.name for p in tmp_path.iterdir()] == ["new.db"]


def test_a_newer_file_is_refused_by_reader_and_writer_alike(path: Path) -> None:
    set_version(path, 99)
    for refuse in (lambda: Store.open(path), lambda: CaptureWriter(path).start()):
        with pytest.raises(CaptureError, match="newer draftloop") as caught:
            refuse()
        assert "\n" not in str(caught.value)
    assert version(path) == 99


def test_a_foreign_database_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "music.db"
    for user_version in (0, LATEST):
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE IF NOT EXISTS songs (name)")
            db.execute(f"PRAGMA user_version = {user_version}")
        with pytest.raises(CaptureError, match="not a draftloop capture file"):
            CaptureWriter(path).start()
        with pytest.raises(CaptureError, match="not a draftloop capture file"):
            Store.open(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]


def test_a_reader_does_not_upgrade_but_says_who_does(path: Path) -> None:
    with closing(Database(path)) as db, pytest.raises(CaptureError, match="start `serve` on it once"):
        check(db, path, NEXT)
    assert version(path) == LATEST
