"""Law L3 at the writer: a row whose future resolved survives a kill -9 at any moment, in a file that is whole."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from capture.store import Store

ROOT = Path(__file__).parents[2]
# Writes without end from four threads, and says each id only once its future has resolved.
WRITE = """
import os, sys, threading
from pathlib import Path
from capture.writer import CaptureWriter
from tests.capture_rows import generation

writer = CaptureWriter(Path(sys.argv[1]), synchronous=sys.argv[2])
writer.start()

def write():
    while True:
        rows = [generation(response_text="x" * 3000) for _ in range(3)]
        for row, future in [(row, writer.submit(row)) for row in rows]:
            future.result()
            os.write(1, (row.id + "\\n").encode())

for _ in range(4):
    threading.Thread(target=write).start()
"""


def kill_after(path: Path, synchronous: str, seconds: float) -> list[str]:
    """Run the writing process and kill it this long after its first acknowledgement; the ids it acknowledged."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITE, str(path), synchronous]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        # The pipe holds some 1,700 ids: a writer that fills it waits, and is killed waiting.
        time.sleep(seconds)
        process.kill()
        rest = process.stdout.read()
    return [line.decode().strip() for line in (first + rest).splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
def test_every_acknowledged_row_survives_a_kill_at_any_moment(tmp_path: Path, synchronous: str) -> None:
    path = tmp_path / "capture.db"
    moments = random.Random(synchronous)
    acknowledged: set[str] = set()
    for _ in range(5):
        acknowledged |= set(kill_after(path, synchronous, moments.uniform(0, 0.3)))
        with Store.open(path) as store:
            kept = {row.id for row in store.iterate()}
        assert acknowledged <= kept
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(acknowledged) > 50


def test_a_killed_writers_rows_can_be_read_before_anyone_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "capture.db"
    acknowledged = kill_after(path, "FULL", 0.1)
    assert path.with_name("capture.db-wal").stat().st_size > 0
    path.with_name("capture.db-shm").unlink()
    with Store.open(path) as store:
        assert set(acknowledged) <= {row.id for row in store.iterate()}
        assert store.stats().rows >= len(acknowledged)
