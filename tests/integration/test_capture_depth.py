"""Capture under hardship, from outside: server processes, their real files, disks that fill up, other processes' locks.

Whatever happens to the file, no client sees it; the figures add up, and the rows are written once they can be.
"""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from capture.store import wal_path
from tests.capture_rows import generation, write
from tests.servers import CHAT, ROOT, Lock, ProcessServer, clean_environment, eventually, running_process

FAKE = [sys.executable, "-m", "tests.fake_backend"]
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def ids(path: Path) -> list[str]:
    with closing(sqlite3.connect(path, timeout=30)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [row[0] for row in db.execute("SELECT id FROM generations ORDER BY id")]


def answered(response: httpx.Response) -> str:
    """The id of the row that a whole answer speaks of."""
    assert response.status_code == 200, response.text
    found: str = response.json()["id"]
    return found.removeprefix("chatcmpl-")


def streamed(server: ProcessServer, client: httpx.Client) -> str:
    """The id of the row that a stream speaks of, once it has come to its end."""
    with client.stream("POST", f"{server.url}{CHAT}", json={**ASK, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"stop"' in lines[-2]
    return lines[0].partition('"id":"chatcmpl-')[2].partition('"')[0]


def ready(server: ProcessServer) -> dict[str, Any]:
    response = server.http.get("/ready")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def written(server: ProcessServer) -> float:
    return server.metric("capture_generations_total", status="finished")


def no_trace_of_trouble(server: ProcessServer) -> None:
    said = "".join(server.output)
    assert "Traceback" not in said
    assert "database is locked" not in said


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_lock_of_another_process_costs_no_answer_and_no_row(
    serve_process: Callable[..., ProcessServer], seconds: float
) -> None:
    server = serve_process("--capture-commit-timeout", "0.2")
    assert server.capture is not None
    lock = Lock(server.capture)
    until = time.monotonic() + seconds
    seen = []
    while time.monotonic() < until:
        seen += [answered(server.chat()), streamed(server, server.http)]
    told = ready(server)
    assert (told["capture"], told["capture_failing"]) == ("late", False)
    assert told["capture_queue_depth"] == len(seen)
    assert written(server) == 0
    lock.release()
    eventually(lambda: ready(server)["capture"] == "on", 20)
    assert ids(server.capture) == sorted(seen)
    assert written(server) == server.metric("capture_late_total") == len(seen)
    assert server.metric("capture_failures_total") == 0
    assert server.stop() == 0
    no_trace_of_trouble(server)


@pytest.mark.slow
def test_a_lock_that_never_seems_to_end_is_told_and_still_costs_no_row(
    serve_process: Callable[..., ProcessServer],
) -> None:
    server = serve_process("--capture-commit-timeout", "0.2")
    assert server.capture is not None
    lock = Lock(server.capture)
    seen = [answered(server.chat())]
    eventually(lambda: ready(server)["capture"] == "failing", 60)
    assert server.metric("capture_failing") == 1
    lock.release()
    eventually(lambda: ready(server)["capture"] == "on", 20)
    assert ids(server.capture) == seen


def test_where_the_queue_stays_full_rows_are_lost_and_counted_and_every_answer_is_given(
    serve_process: Callable[..., ProcessServer],
) -> None:
    server = serve_process("--capture-commit-timeout", "0.3", "--capture-queue-rows", "2")
    assert server.capture is not None
    lock = Lock(server.capture)
    seen = [answered(server.chat()), streamed(server, server.http)]
    with ThreadPoolExecutor(4) as pool:
        lost = [*pool.map(lambda _: answered(server.chat()), range(4)), streamed(server, server.http)]
    assert server.metric("capture_queue_depth") == server.metric("capture_late_total") == 2
    assert server.metric("capture_failures_total") == server.metric("capture_queue_full_total") == 5
    lock.release()
    eventually(lambda: ready(server)["capture"] == "on", 20)
    seen.append(answered(server.chat()))
    assert ids(server.capture) == sorted(seen)
    assert written(server) == 3
    said = "".join(server.output)
    assert all(f"generation {name} is lost" in said for name in lost)
    no_trace_of_trouble(server)


def test_an_answer_that_finds_the_queue_full_is_captured_if_room_comes_in_time(
    serve_process: Callable[..., ProcessServer],
) -> None:
    server = serve_process("--capture-commit-timeout", "30", "--capture-queue-rows", "2")
    assert server.capture is not None
    lock = Lock(server.capture)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.chat) for _ in range(8)]
        eventually(lambda: server.metric("capture_queue_depth") == 2)
        assert not any(one.done() for one in asked)
        lock.release()
        seen = [answered(one.result(30)) for one in asked]
    assert ids(server.capture) == sorted(seen)
    assert written(server) == 8
    assert server.metric("capture_late_total") == server.metric("capture_failures_total") == 0


class SmallDisk:
    """A disk of the server's own, in memory: `fill` leaves no byte on it, `free` gives all of it back."""

    def __init__(self, server: ProcessServer, folder: Path) -> None:
        self._seen_from_here = Path(f"/proc/{server.process.pid}/root{folder}")
        self._ballast = self._seen_from_here / "ballast"
        self._copy = folder / "copy"  # on the disk that everybody else sees there

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        self._ballast.unlink()

    def ids(self) -> list[str]:
        # SQLite would follow /proc/PID/root to our own root.
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        for name in ("capture.db", "capture.db-wal"):
            shutil.copyfile(self._seen_from_here / name, self._copy / name)
        return ids(self._copy / "capture.db")


class SmallFiles:
    """No file of the server may grow any more, after `fill`; until `free`."""

    def __init__(self, server: ProcessServer, folder: Path) -> None:
        self._pid = server.process.pid
        self._capture = folder / "capture.db"
        self._limits = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def free(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._limits)

    def ids(self) -> list[str]:
        return ids(self._capture)


def apart(script: str, folder: Path) -> list[str]:
    """A command's beginning that runs it where a shell script has changed how the folder looks, for it alone."""
    return [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        f'{script}; shift; exec "$@"',
        "sh",
        str(folder),
    ]


def can_be_apart() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run([*apart("true", Path("/")), "true"]).returncode


@contextmanager
def small(kind: str, folder: Path, *flags: str) -> Iterator[tuple[ProcessServer, SmallDisk | SmallFiles]]:
    with ExitStack() as stack:
        if kind == "disk":
            if not can_be_apart():
                pytest.skip("no mount namespaces here")
            command = [*apart('mount -t tmpfs -o size=4m small "$1"', folder), *FAKE, *flags]
            server = stack.enter_context(running_process(command, folder / "capture.db"))
            yield server, SmallDisk(server, folder)
        else:
            if not hasattr(resource, "prlimit"):
                pytest.skip("no limits of other processes can be set here")
            server = stack.enter_context(running_process([*FAKE, *flags], folder / "capture.db"))
            yield server, SmallFiles(server, folder)


@pytest.mark.parametrize("kind", ["disk", "files"])
def test_a_full_disk_costs_no_answer_and_its_rows_are_written_once_there_is_room(tmp_path: Path, kind: str) -> None:
    with small(kind, tmp_path, "--capture-commit-timeout", "0.2") as (server, disk):
        seen = [answered(server.chat())]
        disk.fill()
        # The log may have some room left in it; so there are more than would fit.
        while ready(server)["capture"] != "failing":
            seen.append(answered(server.chat("Hi" * 20_000)))
        seen += [streamed(server, server.http), answered(server.chat())]
        told = ready(server)
        assert told["capture_failing"] is True
        assert told["status"] == "ready"
        assert server.metric("capture_failing") == 1
        waiting = server.metric("capture_queue_depth")
        assert waiting >= 3
        assert len(disk.ids()) == len(seen) - waiting
        disk.free()
        eventually(lambda: ready(server)["capture"] == "on", 20)
        assert server.metric("capture_failing") == server.metric("capture_failures_total") == 0
        assert disk.ids() == sorted(seen)
        assert written(server) == len(seen)
        no_trace_of_trouble(server)


def test_a_server_that_ends_while_the_disk_is_full_leaves_what_was_committed_whole(tmp_path: Path) -> None:
    with small("files", tmp_path, "--capture-commit-timeout", "0.1") as (server, disk):
        seen = [answered(server.chat()) for _ in range(3)]
        disk.fill()
        answered(server.chat())
        server.process.kill()
        server.process.wait()
        assert disk.ids() == sorted(seen)


def test_a_file_that_cannot_be_written_at_the_start_is_one_line(tmp_path: Path) -> None:
    if not can_be_apart():
        pytest.skip("no mount namespaces here")
    write(tmp_path / "capture.db", generation())
    sealed = apart('mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"', tmp_path)
    command = [*sealed, *FAKE, "--port", "0", "--capture", str(tmp_path / "capture.db")]
    ended = subprocess.run(command, cwd=ROOT, env=clean_environment(), text=True, capture_output=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "Read-only file system" in ended.stderr


def test_a_file_moved_away_and_one_deleted_under_a_busy_server_lose_only_what_was_deleted(
    serve_process: Callable[..., ProcessServer], tmp_path: Path
) -> None:
    server = serve_process()
    assert server.capture is not None
    over = threading.Event()

    def keep_asking() -> list[str]:
        seen = []
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not over.is_set():
                seen.append(answered(http.post(CHAT, json=ASK)))
        return seen

    archive = tmp_path / "archive.db"
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        try:
            eventually(lambda: written(server) > 20, 20)
            server.capture.replace(archive)
            many = written(server)
            eventually(lambda: server.capture.exists() and written(server) > many + 20, 20)
        finally:
            over.set()
        seen = {name for one in asking for name in one.result()}
    assert {*ids(archive), *ids(server.capture)} == seen
    assert written(server) == len(seen)
    assert server.metric("capture_failures_total") == 0

    server.capture.unlink()
    kept = [answered(server.chat()) for _ in range(3)]
    assert ids(server.capture) == kept
    assert server.stop() == 0
    assert {p.name for p in tmp_path.iterdir()} >= {"capture.db"}
    assert not wal_path(server.capture).exists()
    no_trace_of_trouble(server)


def capture(*arguments: str) -> str:
    """What the command prints, run as a process of its own; it must not complain."""
    command = [sys.executable, "-c", "from capture.cli import main; main()", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=clean_environment(), text=True, capture_output=True, timeout=120)
    assert ended.returncode == 0, f"capture {arguments}: {ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_32_streams_beside_export_prune_and_stats_come_to_their_ends_and_every_count_is_exact(
    serve_process: Callable[..., ProcessServer], tmp_path: Path, seconds: float
) -> None:
    server = serve_process()
    assert server.capture is not None
    path = ("--capture", str(server.capture))
    until = time.monotonic() + seconds

    def stream() -> list[str]:
        seen = []
        with httpx.Client(timeout=60) as http:
            while time.monotonic() < until:
                seen.append(streamed(server, http))
        return seen

    def repeated(once: Callable[[int], int]) -> list[int]:
        answers: list[int] = []
        while not answers or time.monotonic() < until:
            answers.append(once(len(answers)))
        return answers

    def prune(_: int) -> int:
        return int(json.loads(capture("prune", "--max-rows", "5", "--json", *path))["rows"])

    def stats(_: int) -> int:
        return int(json.loads(capture("stats", "--json", *path))["rows"])

    def export(number: int) -> int:
        out = tmp_path / f"export-{number}"
        capture("export", "--to", "npz", "--out", str(out), *path)
        with np.load(out / "shard-00000.npz") as shard:
            return len(shard["doc_ids"])

    seen = [streamed(server, server.http)]  # an export of nothing would be an error
    with ThreadPoolExecutor(35) as pool:
        streams = [pool.submit(stream) for _ in range(32)]
        commands = [pool.submit(repeated, once) for once in (prune, stats, export)]
        seen += [name for one in streams for name in one.result()]
        pruned, counted, exported = (one.result() for one in commands)
    assert len(set(seen)) == len(seen) == written(server)
    assert server.metric("capture_failures_total") == server.metric("capture_queue_depth") == 0
    left = ids(server.capture)
    assert len(left) + sum(pruned) == len(seen)
    assert set(left) <= set(seen)
    assert sum(pruned) > 0
    assert min(counted) >= 1
    assert min(exported) >= 1
    no_trace_of_trouble(server)


UPGRADE = """
import sys, time
from pathlib import Path
from capture import migrations
from capture.opening import open_for_writing

def slow(db):
    db["generations"].add_column("note", str)
    db.execute("UPDATE generations SET note = 'half done'")
    print("half way", flush=True)
    time.sleep(60)

migrations.upgrade.__defaults__ = ((*migrations.MIGRATIONS, slow),)
open_for_writing(Path(sys.argv[1]), "FULL")
"""


def test_an_upgrade_killed_in_the_middle_leaves_the_file_as_it_was_and_a_backup_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "capture.db", generation(id="one"), generation(id="two"))
    with closing(sqlite3.connect(path)) as db:
        schema = db.execute("SELECT sql FROM sqlite_master").fetchall()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    command = [sys.executable, "-c", UPGRADE, str(path)]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), text=True, stdout=subprocess.PIPE) as upgrade:
        assert upgrade.stdout is not None
        assert upgrade.stdout.readline() == "half way\n"
        upgrade.kill()
    backup = tmp_path / f"capture.db.v{version}.bak"
    for file in (path, backup):
        assert ids(file) == ["one", "two"]
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("SELECT sql FROM sqlite_master").fetchall() == schema
            assert db.execute("PRAGMA user_version").fetchone() == (version,)
    assert backup.stat().st_mode & 0o777 == 0o600
    write(path, generation(id="three"))
    assert len(ids(path)) == 3
