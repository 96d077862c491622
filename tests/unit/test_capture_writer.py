"""The writer: when a future resolves the row is on disk, and no trouble of the moment loses one."""

from __future__ import annotations

import inspect
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from capture.opening import open_for_writing
from capture.records import CaptureError, RecordError
from capture.store import Store, default_path, wal_path
from capture.writer import CaptureWriter, QueueFullError
from tests.capture_rows import generation, write

LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=30)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
"""

READER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
db.execute("BEGIN")
before = db.execute("SELECT id FROM generations").fetchall()
print("reading", flush=True)
sys.stdin.readline()
assert db.execute("SELECT id FROM generations").fetchall() == before
db.execute("COMMIT")
print(*db.execute("PRAGMA integrity_check").fetchone())
"""


@contextmanager
def another_process(script: str, path: Path) -> Iterator[list[str]]:
    """Run the script until it prints a line; at the end let it go on, and find what it prints then in the list."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        assert process.stdout.readline()
        yield said
    finally:
        said += process.communicate("\n", timeout=10)[0].split()


def locked_by_another_process(path: Path) -> AbstractContextManager[list[str]]:
    return another_process(LOCKER, path)


class Events:
    """What a writer reported."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.failures: list[tuple[Exception, int]] = []

    def commit(self, rows: int, seconds: float) -> None:
        assert seconds >= 0
        self.commits.append(rows)

    def failure(self, error: Exception, rows: int) -> None:
        self.failures.append((error, rows))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is waited for in shorter slices, so that these tests are."""
    for module in ("target", "writer"):
        monkeypatch.setattr(f"capture.{module}.SLICE_SECONDS", 0.2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "folders" / "capture.db"


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def writer(path: Path, events: Events) -> Iterator[CaptureWriter]:
    made = CaptureWriter(path, on_commit=events.commit, on_failure=events.failure)
    made.start()
    yield made
    made.close(timeout=10)


def ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {row[0] for row in db.execute("SELECT id FROM generations")}


def wait_until(condition: object, seconds: float = 10) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_a_resolved_future_means_another_connection_sees_the_row(writer: CaptureWriter, path: Path) -> None:
    for name in "abc":
        writer.submit(generation(id=name)).result(timeout=10)
        assert name in ids(path)


def test_the_file_its_log_and_its_folder_are_private(writer: CaptureWriter, path: Path) -> None:
    writer.submit(generation()).result(timeout=10)
    modes = {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
    assert modes == {"capture.db": 0o600, "capture.db-wal": 0o600, "capture.db-shm": 0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_waits_goes_into_one_transaction(writer: CaptureWriter, path: Path, events: Events) -> None:
    with locked_by_another_process(path):
        first = writer.submit(generation())
        wait_until(lambda: events.failures)  # the writer has taken the first and is held up
        rest = [writer.submit(generation()) for _ in range(50)]
        assert writer.depth == 51
    for future in [first, *rest]:
        future.result(timeout=10)
    assert events.commits == [1, 50]
    assert writer.depth == 0


def test_a_lock_held_for_two_seconds_delays_rows_and_loses_none(
    writer: CaptureWriter, path: Path, events: Events
) -> None:
    with locked_by_another_process(path):
        future = writer.submit(generation(id="patient"))
        with pytest.raises(TimeoutError):
            future.result(timeout=2)
        assert writer.depth == 1
    future.result(timeout=10)
    assert ids(path) == {"patient"}
    assert events.failures
    assert all(rows == 0 for _, rows in events.failures)


def test_whoever_stops_waiting_does_not_unqueue_the_row(writer: CaptureWriter, path: Path) -> None:
    with locked_by_another_process(path):
        future = writer.submit(generation(id="kept"))
        assert not future.cancel()
    future.result(timeout=10)
    assert ids(path) == {"kept"}


def test_a_bad_row_does_not_sink_the_others_of_its_batch(writer: CaptureWriter, path: Path, events: Events) -> None:
    bad = {"logprobs": [-1.0]}
    with locked_by_another_process(path):
        futures: list[Future[None]] = [
            writer.submit(g)
            for g in (
                generation(id="a"),
                generation(id="b", **bad),
                generation(id="a"),
                generation(id="c", model=None),
                generation(id="d"),
            )
        ]
    outcomes = [future.exception(timeout=10) for future in futures]
    assert [type(outcome) for outcome in outcomes] == [type(None), RecordError, RecordError, RecordError, type(None)]
    assert ids(path) == {"a", "d"}
    assert sum(events.commits) == 2
    assert sum(rows for _, rows in events.failures) == 3
    assert writer.depth == 0


def test_after_a_bad_row_the_writer_goes_on(writer: CaptureWriter, path: Path) -> None:
    assert isinstance(writer.submit(generation(seed=2**64)).exception(timeout=10), RecordError)
    writer.submit(generation(id="next")).result(timeout=10)
    assert ids(path) == {"next"}


def test_a_callback_that_raises_costs_no_row(path: Path) -> None:
    def explode(rows: int, seconds: float) -> None:
        raise RuntimeError("metrics are down")

    writer = CaptureWriter(path, on_commit=explode)
    writer.start()
    for name in "ab":
        writer.submit(generation(id=name)).result(timeout=10)
    assert writer.close(timeout=10)
    assert ids(path) == {"a", "b"}


def test_closing_writes_everything_queued_and_leaves_one_file(writer: CaptureWriter, path: Path) -> None:
    futures = [writer.submit(generation()) for _ in range(200)]
    assert writer.close(timeout=30)
    assert all(future.done() for future in futures)
    assert [p.name for p in path.parent.iterdir()] == ["capture.db"]
    assert len(ids(path)) == 200
    assert writer.close(timeout=1)


def test_closing_gives_up_in_time_and_says_so(writer: CaptureWriter, path: Path, events: Events) -> None:
    with locked_by_another_process(path):
        future = writer.submit(generation())
        began = time.monotonic()
        assert writer.close(timeout=0.3) is False
        assert time.monotonic() - began < 1
        assert isinstance(future.exception(timeout=5), sqlite3.OperationalError)
        wait_until(lambda: not any(t.name == "capture-writer" for t in threading.enumerate()))
    assert [rows for _, rows in events.failures if rows] == [1]
    assert writer.depth == 0


def test_what_is_queued_behind_a_batch_that_is_given_up_is_given_up_with_it(
    writer: CaptureWriter, path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.writer.BATCH_ROWS", 1)
    with locked_by_another_process(path):
        futures = [writer.submit(generation())]
        wait_until(lambda: events.failures)
        futures += [writer.submit(generation()) for _ in range(20)]
        assert writer.close(timeout=0) is False
        wait_until(lambda: all(future.done() for future in futures), 5)
    assert all(future.exception() for future in futures)
    assert sum(rows for _, rows in events.failures) == 21
    assert writer.depth == 0


def test_a_closed_writer_refuses_rows_through_the_future(writer: CaptureWriter, events: Events) -> None:
    assert writer.close(timeout=10)
    assert isinstance(writer.submit(generation()).exception(timeout=0), CaptureError)
    assert [rows for _, rows in events.failures] == [1]


def test_many_threads_may_submit_at_once(writer: CaptureWriter, path: Path) -> None:
    def submit() -> None:
        for _ in range(50):
            writer.submit(generation()).result(timeout=30)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids(path)) == 400


def test_readers_see_a_consistent_file_while_rows_are_written(writer: CaptureWriter, path: Path) -> None:
    futures: list[Future[None]] = []
    with Store.open(path) as store:
        seen = []
        for _ in range(20):
            futures += [writer.submit(generation()) for _ in range(20)]
            with store.snapshot():
                counted = store.count()
                assert sum(1 for _ in store.iterate()) == counted
            seen.append(counted)
    assert seen == sorted(seen)
    for future in futures:
        future.result(timeout=10)


def test_a_reader_in_the_middle_of_the_file_does_not_hold_the_writer_up(writer: CaptureWriter, path: Path) -> None:
    for _ in range(3):
        writer.submit(generation()).result(timeout=10)
    with Store.open(path) as store, store.snapshot():
        rows = store.iterate()
        next(rows)
        writer.submit(generation(id="meanwhile")).result(timeout=5)
        assert "meanwhile" not in {row.id for row in rows}


def test_two_writers_on_one_file_both_write(writer: CaptureWriter, path: Path) -> None:
    other = CaptureWriter(path)
    other.start()
    futures = [w.submit(generation()) for _ in range(100) for w in (writer, other)]
    assert other.close(timeout=30)
    for future in futures:
        future.result(timeout=30)
    assert len(ids(path)) == 200


def test_writers_that_make_the_file_at_once_agree(path: Path) -> None:
    writers = [CaptureWriter(path) for _ in range(6)]
    errors: list[Exception] = []

    def start(writer: CaptureWriter) -> None:
        try:
            writer.start()
        except CaptureError as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        assert writer.close(timeout=10)
    assert errors == []


@pytest.mark.parametrize(("synchronous", "level"), [("FULL", 2), ("NORMAL", 1)])
def test_commits_reach_the_disk_as_asked(path: Path, synchronous: str, level: int) -> None:
    with closing(open_for_writing(path, synchronous)) as db:  # type: ignore[arg-type]
        assert db.execute("PRAGMA synchronous").fetchone() == (level,)
        assert db.journal_mode == "wal"


def test_full_is_the_default() -> None:
    assert inspect.signature(CaptureWriter).parameters["synchronous"].default == "FULL"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.mkdir(parents=True), "directory"),
        (lambda p: (p.parent.parent.mkdir(), p.parent.write_text("")), "File exists"),
        (lambda p: (p.parent.mkdir(parents=True), p.write_text("not a database" * 100)), "not an SQLite file"),
    ],
)
def test_a_file_that_cannot_be_opened_is_one_clear_line(path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(path)
    with pytest.raises(CaptureError, match=message) as caught:
        CaptureWriter(path).start()
    assert "\n" not in str(caught.value)


def test_the_default_file_is_the_one_configured_else_in_the_data_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTLOOP_CAPTURE", "/somewhere/my.db")
    assert default_path() == Path("/somewhere/my.db")
    monkeypatch.setenv("DRAFTLOOP_CAPTURE", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "draftloop" / "capture.db"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_path() == Path("/home/someone/.local/share/draftloop/capture.db")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_path() == Path("/home/someone/.local/share/draftloop/capture.db")


@contextmanager
def writing(path: Path, **options: Any) -> Iterator[CaptureWriter]:
    writer = CaptureWriter(path, **options)
    writer.start()
    try:
        yield writer
    finally:
        writer.close(timeout=20)


@pytest.mark.parametrize("bound", [{"max_rows": 3}, {"max_bytes": 3_000_000}])
def test_a_full_queue_takes_no_row_and_counts_none_until_there_is_room(path: Path, bound: dict[str, int]) -> None:
    events = Events()
    with writing(path, on_commit=events.commit, on_failure=events.failure, **bound) as writer:
        with locked_by_another_process(path):
            futures = [writer.submit(generation(response_text="x" * 1_000_000)) for _ in range(3)]
            with pytest.raises(QueueFullError, match="3 rows wait"):
                writer.submit(generation())
            assert writer.depth == 3
        for future in futures:
            future.result(timeout=10)
        writer.submit(generation(id="later")).result(timeout=10)
        assert writer.depth == 0
    assert len(ids(path)) == sum(events.commits) == 4
    assert not any(rows for _, rows in events.failures)


def test_an_empty_queue_takes_a_row_of_any_size(path: Path) -> None:
    with writing(path, max_bytes=10) as writer:
        writer.submit(generation(id="large", response_text="x" * 1_000_000)).result(timeout=10)
    assert ids(path) == {"large"}


def test_a_great_many_rows_are_written_in_transactions_of_a_bounded_size(path: Path) -> None:
    events = Events()
    with writing(path, on_commit=events.commit) as writer:
        with locked_by_another_process(path):
            for _ in range(2_500):
                writer.submit(generation())
        assert writer.close(timeout=60)
    assert sum(events.commits) == len(ids(path)) == 2_500
    assert max(events.commits) <= 1_000


def test_a_file_that_is_deleted_is_begun_anew(writer: CaptureWriter, path: Path) -> None:
    writer.submit(generation(id="gone")).result(timeout=10)
    path.unlink()
    writer.submit(generation(id="kept")).result(timeout=10)
    assert ids(path) == {"kept"}
    assert {p.stat().st_mode & 0o777 for p in path.parent.iterdir()} == {0o600}


def test_a_folder_that_is_deleted_is_made_anew(writer: CaptureWriter, path: Path) -> None:
    writer.submit(generation(id="gone")).result(timeout=10)
    shutil.rmtree(path.parent)
    writer.submit(generation(id="kept")).result(timeout=10)
    assert ids(path) == {"kept"}


def test_a_file_that_is_moved_away_takes_every_earlier_row_with_it(writer: CaptureWriter, path: Path) -> None:
    before = {writer.submit(row := generation()).result(timeout=10) or row.id for _ in range(20)}
    moved = path.replace(path.with_name("archive.db"))  # its log stays behind, with the rows in it
    writer.submit(generation(id="after")).result(timeout=10)
    assert ids(path) == {"after"}
    assert before <= ids(moved)
    for file in (path, moved):
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_reader_of_a_file_that_is_moved_away_and_the_new_file_do_not_disturb_each_other(
    writer: CaptureWriter, path: Path
) -> None:
    for _ in range(20):
        writer.submit(generation()).result(timeout=10)
    with another_process(READER, path) as said:
        for _ in range(20):
            writer.submit(generation()).result(timeout=10)
        moved = path.replace(path.with_name("archive.db"))
        futures = [writer.submit(generation(response_text="x" * 10_000)) for _ in range(200)]
        for future in futures:
            future.result(timeout=10)
    assert said == ["ok"]
    assert len(ids(path)) == 200
    wait_until(lambda: not writer._target.unfinished)
    assert len(ids(moved)) == 40
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_capture_file_put_in_its_place_is_written_to(writer: CaptureWriter, path: Path, tmp_path: Path) -> None:
    writer.submit(generation(id="mine")).result(timeout=10)
    write(tmp_path / "other.db", generation(id="theirs")).replace(path)
    writer.submit(generation(id="next")).result(timeout=10)
    assert ids(path) == {"theirs", "next"}


def test_rows_wait_for_as_long_as_a_foreign_file_stands_at_the_path(
    writer: CaptureWriter, path: Path, tmp_path: Path
) -> None:
    writer.submit(generation()).result(timeout=10)
    (tmp_path / "notes").write_text("not a database" * 100)
    (tmp_path / "notes").replace(path)
    waits = writer.submit(generation(id="waits"))
    wait_until(lambda: writer.failing)
    assert not waits.done()
    assert path.read_text().startswith("not a database")
    path.unlink()
    waits.result(timeout=10)
    assert ids(path) == {"waits"}
    assert not writer.failing


def test_a_log_that_is_deleted_costs_no_row_and_doubles_none(writer: CaptureWriter, path: Path, events: Events) -> None:
    writer.submit(generation(id="before")).result(timeout=10)
    wal_path(path).unlink()
    writer.submit(generation(id="after")).result(timeout=10)
    writer.submit(generation(id="next")).result(timeout=10)
    assert ids(path) == {"before", "after", "next"}
    assert sum(events.commits) == 3
    assert not any(rows for _, rows in events.failures)


def test_a_lock_that_outlasts_the_writers_patience_is_told_as_a_failure(
    writer: CaptureWriter, path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.writer.WRITER_BUSY_SECONDS", 1.5)
    with locked_by_another_process(path):
        future = writer.submit(generation(id="waits"))
        wait_until(lambda: events.failures)
        assert not writer.failing
        wait_until(lambda: writer.failing)
    future.result(timeout=10)
    assert not writer.failing
    assert ids(path) == {"waits"}


def test_the_log_stays_short_although_reads_never_cease(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOG_BYTES", 200_000), ("LONG_LOG_BYTES", 1_000_000), ("RESTART_EVERY_SECONDS", 0.05)):
        monkeypatch.setattr(f"capture.target.{name}", value)
    over = threading.Event()

    def read() -> None:
        with Store.open(path) as store:
            while not over.is_set():
                with store.snapshot():
                    store.count()
                    time.sleep(0.02)

    with writing(path, synchronous="NORMAL") as writer:
        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        try:
            longest = 0
            for _ in range(400):
                writer.submit(generation(response_text="x" * 100_000)).result(timeout=20)
                longest = max(longest, wal_path(path).stat().st_size)
        finally:
            over.set()
            for reader in readers:
                reader.join()
        assert longest < 30_000_000
    assert [p.name for p in path.parent.iterdir()] == ["capture.db"]


def at_commit(writer: CaptureWriter, act: Callable[[], Any]) -> None:
    """Act once, when the writer's connection is about to commit: a row that came alone commits by itself."""
    db = writer._target._db
    assert db is not None
    began = False

    def on_statement(statement: str) -> None:
        nonlocal began
        began = began or statement.startswith("BEGIN")
        if statement.startswith("COMMIT" if began else "INSERT INTO generations"):
            db.conn.set_trace_callback(None)
            act()

    db.conn.set_trace_callback(on_statement)


def commit_together(writer: CaptureWriter, names: Sequence[str]) -> None:
    with writer._changed:  # so that it does not take the first before the last has come
        rows = [writer.submit(generation(id=name)) for name in names]
    for row in rows:
        row.result(timeout=10)


def test_rows_that_come_together_are_one_transaction_and_one_alone_is_one_statement(writer: CaptureWriter) -> None:
    assert writer._target._db is not None
    for names, statements in ((("a", "b", "c"), "BEGIN INSERT INSERT INSERT COMMIT"), (("alone",), "INSERT")):
        seen: list[str] = []
        writer._target._db.conn.set_trace_callback(seen.append)
        commit_together(writer, names)
        writer._target._db.conn.set_trace_callback(None)
        assert " ".join(one.split()[0] for one in dict.fromkeys(seen)) == statements  # once for each trigger, too


@pytest.mark.parametrize("names", [("torn",), ("torn", "apart")])
def test_rows_committed_to_a_file_that_was_moved_meanwhile_are_in_the_new_one_too(
    writer: CaptureWriter, path: Path, names: tuple[str, ...]
) -> None:
    at_commit(writer, lambda: path.replace(path.with_name("archive.db")))
    commit_together(writer, names)
    assert ids(path) == ids(path.with_name("archive.db")) == set(names)


@pytest.mark.parametrize("names", [("doubtful",), ("doubtful", "dubious")])
def test_rows_whose_commit_only_seemed_to_fail_are_written_once_and_not_lost(
    writer: CaptureWriter, path: Path, events: Events, names: tuple[str, ...]
) -> None:
    at_commit(writer, wal_path(path).unlink)
    commit_together(writer, names)
    assert ids(path) == set(names)
    assert events.commits == [len(names)]
    assert [rows for _, rows in events.failures] == [0]


def test_a_connection_that_can_only_read_is_given_up_for_another(writer: CaptureWriter, path: Path) -> None:
    assert writer._target._db is not None
    writer._target._db.execute("PRAGMA query_only = ON")
    writer.submit(generation(id="written")).result(timeout=10)
    assert ids(path) == {"written"}


def test_a_file_behind_a_link_is_written_and_its_log_kept_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("LOG_BYTES", 100_000), ("LONG_LOG_BYTES", 200_000), ("RESTART_EVERY_SECONDS", 0)):
        monkeypatch.setattr(f"capture.target.{name}", value)
    (tmp_path / "disk").mkdir()
    link = tmp_path / "capture.db"
    link.symlink_to(tmp_path / "disk" / "real.db")
    longest = 0
    with writing(link, synchronous="NORMAL") as writer:
        for _ in range(50):
            writer.submit(generation(response_text="x" * 50_000)).result(timeout=10)
            longest = max(longest, (tmp_path / "disk" / "real.db-wal").stat().st_size)
    assert 0 < longest < 1_000_000
    assert len(ids(link)) == 50
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["real.db"]
    assert not caplog.records
