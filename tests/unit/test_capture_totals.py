"""Figures of the whole file are those of its rows, whatever is done to these and by whom."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from capture import migrations
from capture.filters import Filters
from capture.migrations import MIGRATIONS, upgrade
from capture.records import Generation, to_row
from capture.store import Stats, Store
from tests.capture_rows import generation, write

ALL = Filters(since="2000-01-01T00:00:00.000000Z")  # no row is left out, but each is looked at


def figures(path: Path) -> Stats:
    """Those that were kept, once they are found to be those of the rows."""
    with Store.open(path) as store:
        kept, counted = store.stats(), store.stats(ALL)
    assert kept == counted
    return kept


def some(order: random.Random) -> Generation:
    """Any row: of every drafter, status and length, with steps of every kind and without."""
    status = order.choice(("finished", "cancelled", "failed"))
    steps = [(drafted := order.randrange(6), order.randint(0, drafted)) for _ in range(order.choice((0, 1, 7, 300)))]
    count = order.randrange(9)
    kept: dict[str, Any] = {"completion_tokens": range(count), "logprobs": [-1.0] * count}
    gone: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "logprobs": None}
    return generation(
        status=status,
        finish_reason=order.choice(("stop", "length")) if status == "finished" else None,
        drafter=order.choice(("mtp", "none", "student")),
        steps=[*steps, (255, 255)] if order.random() < 0.2 else steps,
        **(gone if order.random() < 0.2 else kept),
    )


@pytest.mark.parametrize("seed", range(3))
def test_figures_follow_rows_that_come_and_change_and_go(tmp_path: Path, seed: int) -> None:
    order = random.Random(seed)
    path = write(tmp_path / "capture.db", *(some(order) for _ in range(40)))
    assert figures(path).rows == 40
    with closing(sqlite3.connect(path, isolation_level=None)) as db:  # another program, with nothing of ours in it
        names = [name for (name,) in db.execute("SELECT id FROM generations")]
        for name in names[:10]:
            db.execute("DELETE FROM generations WHERE id = ?", [name])
        db.execute("UPDATE generations SET prompt_tokens = NULL, logprobs = NULL WHERE id = ?", [names[11]])
        db.execute(
            "UPDATE generations SET status = 'failed', finish_reason = NULL, drafter = 'mtp' WHERE drafter = 'none'"
        )
        db.execute("UPDATE generations SET steps = x'0301' WHERE id > ?", [names[30]])
        db.execute("UPDATE generations SET response_text = 'x'")
    after = figures(path)
    assert after.rows == 30
    assert "none" not in after.by_drafter
    write(path, *(some(order) for _ in range(5)))
    assert figures(path).rows == 35


def test_what_is_taken_back_was_never_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "capture.db", generation())
    before = figures(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute("DELETE FROM generations")
        db.execute("ROLLBACK")
    assert figures(path) == before


def test_an_emptied_file_has_no_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "capture.db", generation(), generation(drafter="none"))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM generations")
    found = figures(path)
    assert (found.rows, found.by_status, found.acceptance, found.first) == (0, {}, (), None)


def test_rows_of_a_file_from_before_are_counted_when_it_is_upgraded(tmp_path: Path) -> None:
    path, order = tmp_path / "capture.db", random.Random(5)
    with closing(sqlite3.connect(path)) as connection:
        db = Database(connection)
        migrations.upgrade(db, path, MIGRATIONS[:1])
        for _ in range(30):
            db["generations"].insert(to_row(some(order)))
        upgrade(db, path)
    assert figures(path).rows == 30
    write(path, generation())
    assert figures(path).rows == 31


def test_figures_are_told_without_a_look_at_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "capture.db", *(generation() for _ in range(20)))
    expected = figures(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TRIGGER count_changed")
        db.execute("UPDATE generations SET steps = x'', prompt_tokens = x'', completion_tokens = x''")
    with Store.open(path) as store:
        found = store.stats()
    assert (found.prompt_tokens, found.acceptance) == (expected.prompt_tokens, expected.acceptance)
