"""What is pruned: the oldest first, no more than asked, beside a live writer, and from the disk as well."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capture.cli import app
from capture.filters import Filters
from capture.records import CaptureError, Generation
from capture.retention import Limits, Retention, prune, size
from capture.store import Store
from capture.writer import CaptureWriter
from serve.app import create_app
from serve.settings import load
from tests.capture_rows import generation, write
from tests.fake_backend import FakeBackend, Script
from tests.servers import eventually, running_app


def day(number: int, **fields: object) -> Generation:
    return generation(id=f"row-{number:03}", created_at=f"2025-01-{number:02}T00:00:00.000000Z", **fields)


def ids(path: Path) -> list[str]:
    with Store.open(path) as store:
        return [row.id for row in store.iterate()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "c.db", *(day(n, status="failed" if n % 2 else "finished") for n in range(1, 11)))


@pytest.mark.parametrize(
    ("limits", "chosen", "left"),
    [
        (Limits(before="2025-01-04T00:00:00.000000Z"), Filters(), range(4, 11)),
        (Limits(max_rows=3), Filters(), range(8, 11)),
        (Limits(max_rows=99), Filters(), range(1, 11)),
        (Limits(before="2025-01-03T00:00:00.000000Z", max_rows=5), Filters(), range(6, 11)),
        (Limits(before="2025-01-08T00:00:00.000000Z", max_rows=9), Filters(), range(8, 11)),
        (Limits(max_bytes=0), Filters(), []),
        (Limits(max_rows=7), Filters(status=["failed"]), [2, 4, 6, 7, 8, 9, 10]),
        (Limits(max_rows=0), Filters(status=["failed"]), [2, 4, 6, 8, 10]),
        (Limits(), Filters(until="2025-01-10T00:00:00.000000Z", status=["failed"]), [2, 4, 6, 8, 10]),
    ],
)
def test_the_oldest_go_until_every_limit_is_kept(path: Path, limits: Limits, chosen: Filters, left: list[int]) -> None:
    before = ids(path)
    would = prune(path, limits=limits, chosen=chosen, dry_run=True)
    assert ids(path) == before
    done = prune(path, limits=limits, chosen=chosen)
    assert ids(path) == [f"row-{n:03}" for n in left]
    assert would.rows == done.rows == 10 - len(left)
    assert would.rows_left == done.rows_left == len(left)


def test_nothing_chosen_and_no_limit_is_refused(path: Path) -> None:
    with pytest.raises(CaptureError, match="every row would go"):
        prune(path, limits=Limits())
    assert len(ids(path)) == 10


@pytest.mark.parametrize("longest", [1, 9000])  # what a row takes is guessed, of short ones too much
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_size_is_kept_by_the_file_itself(tmp_path: Path, share: float, longest: int) -> None:
    rows = [generation(response_text=f"{n} " + "x" * (n * 37 % longest), id=f"row-{n:03}") for n in range(300)]
    path = write(tmp_path / "c.db", *rows)
    most = int(path.stat().st_size * share)
    done = prune(path, limits=Limits(max_bytes=most))
    assert path.stat().st_size <= most
    assert path.stat().st_size > most - 200_000  # no more than that went
    assert ids(path) == [row.id for row in rows][done.rows :]
    assert done.bytes > 0


def test_what_is_pruned_is_on_no_disk_any_more(tmp_path: Path) -> None:
    # Held open, so that no log is emptied by itself.
    path = tmp_path / "c.db"
    writer = CaptureWriter(path)
    writer.start()
    for n in range(1, 21):
        writer.submit(day(n, response_text=f"secret-{n}- " * 500, completion_tokens=[7_777_000 + n] * 50, logprobs=[]))
    writer.submit(day(30, response_text="kept")).result(10)
    assert b"secret-7-" in on_disk(tmp_path)
    prune(path, limits=Limits(before="2025-01-30T00:00:00.000000Z"))
    left = on_disk(tmp_path)
    assert b"secret-" not in left
    assert not any((7_777_000 + n).to_bytes(4, "little") * 4 in left for n in range(1, 21))
    assert b"kept" in left
    assert writer.close(10)


def on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


def test_a_live_writer_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    old = "2025-01-01T00:00:00.000000Z"
    path = write(tmp_path / "c.db", *(generation(created_at=old, response_text="x" * 2000) for _ in range(1000)))
    failures: list[Exception] = []
    writer = CaptureWriter(path, synchronous="NORMAL", on_failure=lambda error, _: failures.append(error))
    writer.start()
    done = threading.Event()

    def submit() -> None:
        n = 0
        while not done.is_set() or n < 50:
            writer.submit(generation(id=f"new-{n:05}", created_at="2026-01-01T00:00:00.000000Z")).result(30)
            n += 1
            written.append(n)

    written: list[int] = []
    thread = threading.Thread(target=submit)
    thread.start()
    try:
        pruned = prune(path, limits=Limits(before="2025-06-01T00:00:00.000000Z"))
    finally:
        done.set()
        thread.join()
        assert writer.close(30)
    assert pruned.rows == 1000
    assert ids(path) == [f"new-{n:05}" for n in range(len(written))]
    assert failures == []


def test_a_file_that_could_not_shrink_by_parts_does_from_now_on(tmp_path: Path) -> None:
    path = write(tmp_path / "c.db", *(generation(response_text="x" * 5000) for _ in range(100)))
    with Store.open(path, readonly=False) as store:
        store._db.execute("PRAGMA auto_vacuum = NONE")
        store._db.execute("VACUUM")
        assert store._db.execute("PRAGMA auto_vacuum").fetchone()[0] == 0
    before = path.stat().st_size
    prune(path, limits=Limits(max_rows=10))
    assert path.stat().st_size < before / 4
    with Store.open(path) as store:
        assert store._db.execute("PRAGMA auto_vacuum").fetchone()[0] == 2


def test_the_command_says_what_went_and_what_copies_there_are(path: Path) -> None:
    copy = path.with_name("c.db.v1.bak")
    copy.write_bytes(b"old")

    def run(*arguments: str) -> dict[str, object]:
        done = CliRunner().invoke(app, ["prune", "--capture", str(path), "--json", *arguments])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    would = run("--older-than", "2025-01-03", "--dry-run")
    assert (would["rows"], would["rows_left"], would["dry_run"], would["backups"]) == (2, 8, True, [str(copy)])
    assert run("--status", "failed", "--max-rows", "9")["rows"] == 1
    assert run("--max-bytes", "0.5GiB", "--older-than", "9999d")["rows"] == 0
    told = CliRunner().invoke(app, ["prune", "--capture", str(path), "--max-rows", "5"])
    assert "4 rows" in told.stdout
    assert "5 left" in told.stdout
    assert str(copy) in told.stderr
    assert copy.exists()


@pytest.mark.parametrize("arguments", [[], ["--older-than", "soon"], ["--max-bytes", "much"]])
def test_a_limit_that_is_none_is_one_line_and_exit_code_two(path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["prune", "--capture", str(path), *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("capture: ")
    assert done.stderr.count("\n") == 1
    assert len(ids(path)) == 10


def test_a_retention_prunes_again_and_again_until_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    writer = CaptureWriter(path)
    writer.start()
    for n in range(1, 4):
        writer.submit(day(n)).result(10)
    fresh = generation(id="fresh")
    writer.submit(fresh).result(10)
    retention = Retention(path, max_age=timedelta(days=1), max_bytes=None, every=0.05)
    retention.start()
    eventually(lambda: ids(path) == ["fresh"])
    writer.submit(day(4)).result(10)
    eventually(lambda: ids(path) == ["fresh"])
    retention.stop(10)
    writer.submit(day(5)).result(10)
    assert writer.close(10)
    assert ids(path) == ["row-005", "fresh"]


def test_a_retention_outlives_what_goes_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.db"
    retention = Retention(path, max_age=None, max_bytes=1, every=0.05)
    retention.start()
    eventually(lambda: "nothing was pruned" in caplog.text)
    write(path, day(1))
    eventually(lambda: ids(path) == [])
    retention.stop(10)
    assert "no capture file" in caplog.text


def test_a_server_deletes_what_is_beyond_its_limits(tmp_path: Path) -> None:
    path = write(tmp_path / "c.db", *(day(n, response_text="x" * 50_000) for n in range(1, 21)))
    with running_app(capture=path, capture_max_age="52w", capture_max_bytes="1GB") as server:
        assert server.chat().status_code == 200
        eventually(lambda: len(ids(path)) == 1)
    assert not ids(path)[0].startswith("row-")


@pytest.mark.parametrize("limit", [{"capture_max_age": "soon"}, {"capture_max_bytes": "much"}])
def test_a_servers_limit_that_is_none_is_refused(limit: dict[str, str]) -> None:
    with pytest.raises(CaptureError, match="one is like"):
        create_app(load(capture="off", **limit), FakeBackend(Script()), None)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1234", 1234), ("5k", 5000), ("500MB", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("2tb", 2 * 10**12)],
)
def test_a_size_is_written_as_people_do(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 000", "1PB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(CaptureError, match="is no size"):
        size(text)
