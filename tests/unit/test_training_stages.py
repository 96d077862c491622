"""Stages: done once for the same inputs, done anew for others, and never half-done."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from training.errors import TrainingError
from training.ledger import Entry, Ledger
from training.loop_stages import CODE
from training.stages import MARKER, ROOT, Done, Stage, code_of, locked, perform, write_json

RUNS = {
    "export": "capture/export_npz.py",
    "hot-vocab": "training/hot_vocab.py",
    "extract": "training/extract.py",
    "distill": "training/distill.py",
    "evaluate": "training/evaluate/evaluation.py",
    "promote": "training/promote.py",
}
# What a stage only reads and checks files with, or tells by: loading, texts, errors, the ledger; earlier stages' files.
_AROUND = ("training/errors.py", "training/ledger.py", "backend/interface.py", "backend/loading.py", "backend/text/")
_BACKEND = (*_AROUND, "backend/free_memory.py", "capture/")
SHAPES_NOTHING = {
    "export": _AROUND,
    "hot-vocab": ("backend/", "capture/", *_AROUND),
    "extract": _BACKEND,
    "distill": _BACKEND,
    "evaluate": _BACKEND,
    "promote": ("backend/", "capture/", *_AROUND),
}


class Work:
    """A stage that writes what it is given, and counts how often it did; `fails` before it is done."""

    def __init__(self, folder: Path) -> None:
        self.workdir, self.ledger = folder / "work", Ledger(folder / "ledger.jsonl")
        self.runs = 0
        self.fails: BaseException | None = None

    def __call__(self, inputs: dict[str, Any], **more: Any) -> Done:
        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            self.runs += 1
            (folder / f"part-{self.runs}").write_text("")
            if self.fails:
                raise self.fails
            entry.figures["count"] = inputs["count"]
            (folder / "deep").mkdir(exist_ok=True)
            made = [folder / "made.txt", folder / "deep" / "made.txt"]
            for path in made:
                path.write_text(str(inputs))
            return made

        return perform(self.workdir, Stage("copy", inputs, run, **more), self.ledger)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_a_stage_is_done_once_for_the_same_inputs(work: Work) -> None:
    first, second = work({"count": 1}), work({"count": 1})
    assert (first.skipped, second.skipped, work.runs) == (False, True, 1)
    assert (first.folder, first.outputs, first.figures) == (second.folder, second.outputs, second.figures)
    assert [run.outcome for run in work.ledger.read()[0]] == ["ok"]


@pytest.mark.parametrize("changed", [{"count": 2}, {"count": 1, "code": "x"}, {"Count": 1, "count": "1"}])
def test_other_inputs_are_another_stage(work: Work, changed: dict[str, Any]) -> None:
    first, second = work({"count": 1}), work(changed)
    assert not second.skipped
    assert first.folder != second.folder
    assert first.folder.exists()


def test_the_order_of_inputs_makes_no_other(work: Work) -> None:
    work({"count": 1, "a": 2})
    assert work({"a": 2, "count": 1}).skipped


@pytest.mark.parametrize("harm", ["changed", "gone", "deep", "no marker", "half a marker"])
def test_what_is_not_as_it_was_left_is_made_anew(work: Work, harm: str) -> None:
    done = work({"count": 1})
    made, marker = done.folder / "made.txt", done.folder / MARKER
    match harm:
        case "changed":
            made.write_text("other")
        case "gone":
            made.unlink()
        case "deep":
            (done.folder / "deep" / "made.txt").write_text("other")
        case "no marker":
            marker.unlink()
        case _:
            marker.write_text(marker.read_text()[:40])
    assert not work({"count": 1}).skipped
    assert made.read_text() == "{'count': 1}"


def test_a_stage_that_fails_is_not_done_and_begins_again_from_nothing(work: Work) -> None:
    work.fails = TrainingError("no room")
    with pytest.raises(TrainingError):
        work({"count": 1})
    work.fails = None
    done = work({"count": 1})
    assert sorted(path.name for path in done.folder.iterdir()) == ["deep", MARKER, "made.txt", "part-2"]
    assert [run.outcome for run in work.ledger.read()[0]] == ["refused", "ok"]


def test_a_resumable_stage_finds_what_it_left(work: Work) -> None:
    work.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        work({"count": 1}, resumable=True)
    work.fails = None
    assert (work({"count": 1}, resumable=True).folder / "part-1").exists()


def test_a_stage_can_be_done_though_it_is_done(work: Work) -> None:
    work({"count": 1})
    assert not work({"count": 1}, again=True).skipped


def test_large_outputs_of_other_inputs_are_let_go(work: Work) -> None:
    first = work({"count": 1}, keep=False)
    second = work({"count": 2}, keep=False)
    assert (first.folder.exists(), second.folder.exists()) == (False, True)


def test_killed_between_any_two_writes_it_is_done_or_not_but_never_half(tmp_path: Path) -> None:
    """The process dies just before its n-th file is put in place, for every n there is."""
    script = """
import os, sys
from pathlib import Path
from training.ledger import Ledger
from training.stages import Stage, perform
folder, left = Path(sys.argv[1]), int(sys.argv[2])
def counted(function):
    def call(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments, **named)
    return call
os.fsync, os.replace, Path.replace = counted(os.fsync), counted(os.replace), counted(Path.replace)
def run(folder, entry):
    (folder / "made.txt").write_text("made")
    os.fsync(os.open(folder, os.O_RDONLY))
    return [folder / "made.txt"]
perform(folder / "work", Stage("copy", {"a": 1}, run), Ledger(folder / "ledger.jsonl"))
print("done")
"""
    root = Path(__file__).parents[2]
    for left in range(20):
        told = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), str(left)], cwd=root, capture_output=True, text=True
        )
        if told.returncode == 0:
            assert told.stdout == "done\n"
            break
        assert told.returncode == -signal.SIGKILL, told.stderr
    else:
        pytest.fail("it never ended")
    assert left > 2
    again = perform(tmp_path / "work", Stage("copy", {"a": 1}, lambda folder, entry: []), Ledger(tmp_path / "l"))
    assert again.skipped
    assert (again.folder / "made.txt").read_text() == "made"


def test_one_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(TrainingError, match="another run works in"), locked(tmp_path):
        pytest.fail("both work")
    with locked(tmp_path):
        pass


def test_code_is_known_by_its_files() -> None:
    assert code_of("training/stages.py") == code_of("training/stages.py", "training/stage*.py")
    assert code_of("training/stages.py") != code_of("training/ledger.py")
    with pytest.raises(ValueError, match="no source file"):
        code_of("training/none*.py")


@pytest.mark.parametrize("stage", list(CODE))
def test_a_stage_is_anew_when_any_code_it_runs_is_changed(stage: str) -> None:
    """All that its module imports, and what that imports, but for what shapes nothing that it makes."""
    named = {path.relative_to(ROOT).as_posix() for pattern in CODE[stage] for path in ROOT.glob(pattern)}
    run = imported(RUNS[stage])
    assert RUNS[stage] in run
    assert sorted(path for path in run - named if not path.startswith(SHAPES_NOTHING[stage])) == []
    own = [pattern for pattern in CODE[stage] if pattern.startswith("training/") and "*" not in pattern]
    assert [path for path in own if path not in run] == [], "named, but not run"


def imported(module: str) -> set[str]:
    """Files of the packages that run with this one, itself included: type checkers' imports are none."""
    found, left = set[str](), [module]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        nodes = [ast.parse((ROOT / path).read_text(encoding="utf-8"))]
        names: list[str] = []
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            if isinstance(node, ast.Import):
                names += [one.name for one in node.names]
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
                nodes += ast.iter_child_nodes(node)
        files = [name.replace(".", "/") + ".py" for name in names]
        left += [file for file in files if (ROOT / file).is_file()]
    return found


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="cannot write"):
        write_json(tmp_path / "none" / "a.json", {})
    write_json(tmp_path / "a.json", {"a": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": null\n}\n'
    assert os.listdir(tmp_path) == ["a.json"]
