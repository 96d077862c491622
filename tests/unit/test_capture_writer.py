"""The writer: when a future resolves the row is on disk, and no trouble of the moment loses one."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from capture.records import CaptureError, RecordError
from capture.store import Store, default_path
from capture.writer import CaptureWriter
from tests.capture_rows import generation

LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=30)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def locked_by_another_process(path: Path) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield
    finally:
        process.communicate("\n", timeout=10)


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
    from capture.writer import open_for_writing

    with closing(open_for_writing(path, synchronous)) as db:  # type: ignore[arg-type]
        assert db.execute("PRAGMA synchronous").fetchone() == (level,)
        assert db.journal_mode == "wal"


def test_full_is_the_default() -> None:
    assert CaptureWriter(Path("x"))._synchronous == "FULL"


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
