"""Files of several replicas in one: every id once, nothing overwritten, whatever is merged again."""

from __future__ import annotations

import json
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database
from typer.testing import CliRunner, Result

from capture.cli import app
from capture.filters import Filters
from capture.merge import merge
from capture.migrations import MIGRATIONS, schema_version, upgrade
from capture.records import CaptureError, Generation, to_row
from capture.store import Store
from capture.writer import CaptureWriter
from tests.capture_rows import generation, write


def rows(path: Path) -> dict[str, dict[str, object]]:
    with Store.open(path) as store:
        return {row.id: to_row(row) for row in store.iterate()}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


@pytest.fixture
def replicas(tmp_path: Path) -> tuple[Path, Path]:
    shared = generation(id="both", seed=2**64 - 1, logprobs=[-0.1, float("nan")], response_text="grün \ud800")
    one = [generation(id=f"one-{n:03}", client="a" if n % 2 else "b") for n in range(300)]
    two = [generation(id="two", prompt_tokens=None, completion_tokens=None, logprobs=None, seed=None)]
    return write(tmp_path / "one.db", shared, *one), write(tmp_path / "two.db", *two, shared)


def test_every_id_is_there_once_and_bit_by_bit(replicas: tuple[Path, Path], tmp_path: Path) -> None:
    into = tmp_path / "new" / "all.db"
    done = merge(into, replicas)
    assert [(found.copied, found.known, found.conflicts) for found in done] == [(301, 0, ()), (1, 1, ())]
    assert rows(into) == rows(replicas[0]) | rows(replicas[1])
    assert stat.S_IMODE(into.stat().st_mode) == 0o600
    assert not into.with_name("all.db-wal").exists()
    again = merge(into, replicas)
    assert [(found.copied, found.known) for found in again] == [(0, 301), (0, 2)]


def test_only_chosen_rows_are_copied(replicas: tuple[Path, Path], tmp_path: Path) -> None:
    [done] = merge(tmp_path / "all.db", replicas[:1], chosen=Filters(clients=["a"]))
    assert done.copied == len(rows(tmp_path / "all.db")) == 150


def test_a_row_with_other_content_stays_and_is_reported(replicas: tuple[Path, Path], tmp_path: Path) -> None:
    into = write(tmp_path / "all.db", generation(id="both", response_text="mine"), generation(id="one-007", seed=None))
    done = run(into, *replicas)
    assert done.exit_code == 1
    assert "299 copied, 0 there already, 2 in conflict" in done.stdout
    assert "1 copied, 0 there already, 1 in conflict" in done.stdout
    assert done.stderr.count("both is there with other content") == 2
    assert rows(into)["both"]["response_text"] == "mine"
    assert len(rows(into)) == 302


def test_the_counts_are_told_for_programs_too(replicas: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(tmp_path / "all.db", *replicas, "--json")
    assert done.exit_code == 0
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [found["copied"] for found in told] == [301, 1]


def test_a_file_is_not_merged_into_itself(replicas: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "alias.db").symlink_to(replicas[0])
    with pytest.raises(CaptureError, match="into itself"):
        merge(replicas[0], [tmp_path / "alias.db"])


def test_what_cannot_be_merged_leaves_no_new_file(replicas: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello " * 100)
    with closing(sqlite3.connect(tmp_path / "new.db")) as db:
        db.execute("PRAGMA user_version = 99")
    for bad, word in ((text, "is not an SQLite file"), (tmp_path / "none.db", "no capture file"), ("new.db", "newer")):
        done = run(tmp_path / "all.db", replicas[0], tmp_path / bad)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("capture: ")
        assert done.stderr.count("\n") == 1
        assert word in done.stderr
        assert not (tmp_path / "all.db").exists()


def test_a_damaged_row_is_one_line_that_names_it(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.db", generation(id="whole"), generation(id="torn"))
    with closing(sqlite3.connect(bad)) as db, db:
        db.execute("UPDATE generations SET request = '{' WHERE id = 'torn'")
    done = run(tmp_path / "all.db", bad)
    assert done.exit_code == 2
    assert "generation torn cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_of_an_older_version_is_upgraded_first(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    old.touch()
    with closing(Database(old)) as db:
        upgrade(db, old, MIGRATIONS[:1])
        db["generations"].insert(to_row(generation(id="old")))
        assert schema_version(db) == 1
    assert merge(tmp_path / "all.db", [old])[0].copied == 1
    assert rows(tmp_path / "all.db").keys() == {"old"}
    with closing(Database(old)) as db:
        assert schema_version(db) == len(MIGRATIONS)


def test_a_replica_may_be_running(tmp_path: Path) -> None:
    def submit(writer: CaptureWriter, row: Generation) -> None:
        writer.submit(row).result(10)

    running, into = CaptureWriter(tmp_path / "running.db"), CaptureWriter(tmp_path / "all.db")
    for writer in (running, into):
        writer.start()
    submit(running, generation(id="there"))
    submit(into, generation(id="here"))
    merge(into.path, [running.path])
    submit(running, generation(id="later"))
    submit(into, generation(id="and here"))
    merge(into.path, [running.path])
    assert rows(into.path).keys() == {"there", "here", "later", "and here"}
    assert all(writer.close(10) for writer in (running, into))
