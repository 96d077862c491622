"""The ledger: every run leaves a line, however it ends, and nothing that happens to the file hides the others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.errors import TrainingError
from training.ledger import Ledger, identity, plain


@dataclass(frozen=True)
class Options:
    out: Path
    steps: int = 3


def test_a_run_is_recorded_with_what_it_had_and_what_it_found(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    data.write_bytes(b"tokens")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with ledger.run("distill", Options(tmp_path / "out"), [data]) as entry:
        entry.figures["tau"] = 2.5
        entry.seeds["data"] = 7
        entry.fingerprints["weights"] = "abc"
        entry.made(data)
    [run], damaged = ledger.read()
    assert damaged == 0
    assert (run.command, run.outcome, run.reason) == ("distill", "ok", None)
    assert run.figures == {"tau": 2.5}
    assert run.fields["arguments"] == {"out": str(tmp_path / "out"), "steps": 3}
    assert run.fields["inputs"] == run.fields["outputs"] == {str(data): identity(data)}
    assert run.fields["seeds"] == {"data": 7}
    assert run.fields["code"]["version"]
    assert run.fields["memory"]["process_bytes"] > 1_000_000
    assert run.wall_seconds is not None


def test_a_password_in_a_url_is_in_no_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    url = "http://user:pass@word@127.0.0.1:8000/v1"
    with pytest.raises(TrainingError), ledger.run("promote", {"server": url, "urls": [url]}):
        raise TrainingError(f"no server answers at {url}: mail@example.org knows")
    text = ledger.path.read_text()
    assert "user" not in text
    assert "word" not in text
    [run], _ = ledger.read()
    assert run.fields["arguments"] == {"server": "http://127.0.0.1:8000/v1", "urls": ["http://127.0.0.1:8000/v1"]}
    assert run.reason == "no server answers at http://127.0.0.1:8000/v1: mail@example.org knows"


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (TrainingError("no shard"), "refused", "no shard"),
        (ValueError("two\nlines"), "failed", "ValueError: two lines"),
        (KeyboardInterrupt(), "failed", "interrupted"),
    ],
    ids=["an input refused", "an error", "an interruption"],
)
def test_a_run_that_breaks_off_says_why_and_the_error_goes_on(
    tmp_path: Path, error: BaseException, outcome: str, reason: str
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def extract() -> None:
        with ledger.run("extract") as entry:
            entry.figures["shards"] = 1
            raise error

    with pytest.raises(type(error)):
        extract()
    [run], _ = ledger.read()
    assert (run.outcome, run.reason) == (outcome, reason)
    assert run.figures == {"shards": 1}


def test_a_negative_result_stays_one_when_the_command_exits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def promote() -> None:
        with ledger.run("promote") as entry:
            entry.negative("no faster")
            raise SystemExit(1)

    with pytest.raises(SystemExit):
        promote()
    [run], _ = ledger.read()
    assert (run.outcome, run.reason) == ("negative", "no faster")


def test_a_killed_run_leaves_its_first_line(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom training.ledger import Ledger\n"
        "with Ledger(Path(sys.argv[1])).run('distill', {'seed': 5}):\n    os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "ledger.jsonl"
    ended = subprocess.run([sys.executable, "-c", script, str(path)], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -signal.SIGKILL
    [run], damaged = Ledger(path).read()
    assert (run.command, run.outcome, run.fields["arguments"], damaged) == ("distill", "running", {"seed": 5}, 0)


@pytest.mark.parametrize("left", [b'{"schema": 1, "id": "x", "comm', b"\xff\xfe", b"[1, 2]", b'{"schema": "1"}'])
def test_half_a_line_costs_no_other(tmp_path: Path, left: bytes) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with ledger.run("first"):
        pass
    with ledger.path.open("ab") as file:
        file.write(left)
    assert [run.command for run in ledger.read()[0]] == ["first"]
    with ledger.run("second"):  # were it killed now, this is all there would be of it
        assert [(run.command, run.outcome) for run in ledger.read()[0]] == [("first", "ok"), ("second", "running")]
    runs, damaged = ledger.read()
    assert [run.command for run in runs] == ["first", "second"]
    assert damaged == 1


def test_what_stands_in_a_ledger_is_never_touched_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    before = b""
    for number in range(3):
        with ledger.run(f"run {number}"):
            pass
        now = ledger.path.read_bytes()
        assert now.startswith(before)
        before = now


def test_runs_at_the_same_time_keep_their_lines_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def work(name: str) -> None:
        for _ in range(10):
            with ledger.run(name) as entry:
                entry.figures["text"] = name * 500

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs, damaged = ledger.read()
    assert damaged == 0
    assert sorted(run.command for run in runs) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    assert all(run.figures["text"] == run.command * 500 for run in runs)


def test_a_ledger_of_a_newer_draftloop_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    line = {"schema": 2, "id": "x", "command": "c", "started": "s", "outcome": "ok"}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(TrainingError, match="schema 2; this build reads 1"):
        Ledger(path).read()


def test_nothing_is_begun_that_the_ledger_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write to the ledger"), Ledger(tmp_path / "file" / "l").run("x"):
        pytest.fail("it ran")
    with pytest.raises(TrainingError, match="cannot read the ledger"):
        Ledger(tmp_path / "none").read()


def test_the_ledger_stands_beside_the_run_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTLOOP_LEDGER", raising=False)
    assert Ledger.beside(tmp_path / "run").path == tmp_path / "ledger.jsonl"
    monkeypatch.setenv("DRAFTLOOP_LEDGER", str(tmp_path / "mine"))
    assert Ledger.beside(tmp_path / "run").path == tmp_path / "mine"
    assert Ledger.beside(tmp_path / "run", tmp_path / "given").path == tmp_path / "given"


def test_a_folder_is_known_by_its_manifest_or_else_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    bare = identity(tmp_path)
    (tmp_path / "b").write_text("2")
    assert identity(tmp_path) != bare
    (tmp_path / "manifest.json").write_text("{}")
    assert identity(tmp_path) == identity(tmp_path / "manifest.json")
    assert identity(tmp_path / "gone") == "missing"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


@given(JSON)
def test_whatever_a_figure_is_a_line_can_hold_it(value: object) -> None:
    text = json.dumps(plain(value), allow_nan=False)
    assert plain(json.loads(text)) == json.loads(text)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    import numpy as np
    import torch

    assert plain({"a": np.float32(0.5), "b": np.array([1, 2]), "c": torch.tensor([float("nan")]), "d": Path("x")}) == {
        "a": 0.5,
        "b": [1, 2],
        "c": [None],
        "d": "x",
    }
