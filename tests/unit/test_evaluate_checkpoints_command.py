"""`training evaluate checkpoints`: students on disk and the native head, over one extraction, as a table or as JSON."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.drafters.student import StudentHeader, Target, save_student
from backend.models.hub import resolve_model
from backend.models.student import StudentBlock, StudentConfig
from backend.models.weights import LoadedModel, load_model
from tests.exports import TINY, exported, row
from training.cli import main
from training.extract import ExtractOptions, extract
from training.student import initialise

IDS = torch.arange(0, 4096, 8, dtype=torch.int32)
ANSWERS = {0: [300, 301, 302, 303, 304], 1: [700, 701, 702], 2: [8, 16, 24, 32]}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(resolve_model("tiny"), torch.device("cpu"), torch.float32, with_mtp=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> Path:
    place = tmp_path_factory.mktemp("data")
    rows = [
        row(answer, number, is_held_out=True, weights_fingerprint=tiny.weights, logprobs=[])
        for number, answer in ANSWERS.items()
    ]
    train = row([900, 901], weights_fingerprint=tiny.weights, logprobs=[])
    return extract(ExtractOptions((exported(place, *rows, train),), "tiny", place / "forced", threads=1))


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> list[Path]:
    place = tmp_path_factory.mktemp("students")
    return [saved(place / name, tiny, how) for name, how in (("sliced", "slice"), ("random", "random"))]


def saved(directory: Path, tiny: LoadedModel, how: Any) -> Path:
    block = StudentBlock(StudentConfig.preset("sv", tiny.config, len(IDS)), tiny.config, IDS)
    initialise(block, tiny.model, how)
    target = Target(weights=tiny.weights, tokenizer=TINY.fingerprint, chat_template=TINY.template_fingerprint)
    save_student(directory, block, StudentHeader.of(block, target))
    return directory


@contextlib.contextmanager
def told(*arguments: object) -> Iterator[tuple[int, str, str]]:
    """Exit code, stdout and stderr of `training evaluate checkpoints`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        patch.setattr("sys.argv", ["training", "evaluate", "checkpoints", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    yield int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_students_and_the_native_head_stand_in_one_table(data: Path, students: list[Path]) -> None:
    with told(*students, "mtp", "--data", data, "--json", "--slots", 2) as (code, out, err):
        assert code == 0, err
    found = json.loads(out)
    assert (found["documents"], found["tokens"], found["windows"]) == (3, 12, 3)
    assert [one["checkpoint"] for one in found["checkpoints"]] == ["sliced", "random", "mtp"]
    assert [[slot["positions"] for slot in one["slots"]] for one in found["checkpoints"]] == [[9, 6]] * 3
    sliced, _, native = found["checkpoints"]
    assert sliced["d2t"] is not None
    assert (native["d2t"], native["slots"][0]["covered_mass"]["value"]) == (None, pytest.approx(1))
    assert sliced["slots"][0]["covered_mass"]["value"] < 1
    assert found["data"]
    assert found["fingerprints"]["tokenizer"] == TINY.fingerprint


def test_against_its_own_head_as_teacher_the_native_head_is_right_always(data: Path, students: list[Path]) -> None:
    with told("mtp", students[0], "--data", data, "--json", "--teacher", "mtp") as (code, out, err):
        assert code == 0, err
    native, student = json.loads(out)["checkpoints"]
    assert native["slots"][0]["top1"]["value"] == 1
    assert student["differences"][0]["teacher_kl"]["value"] > 0


def test_the_table_tells_every_slot_and_what_differs(data: Path, students: list[Path]) -> None:
    with told(*students, "--data", data, "--all") as (code, out, err):
        assert code == 0, err
    assert "4 documents, 14 generated tokens" in out
    assert "less sliced's" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prediction",), "no weights to judge"),
        (("nowhere",), "no drafter 'nowhere'"),
        (("student",), "no drafter 'student'"),
        (("student:",), "no drafter 'student:'"),
        (("hot_vocab:",), "no drafter 'hot_vocab:'"),
        (("mtp:file",), "no drafter 'mtp:file'"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(data: Path, arguments: tuple[str, ...], said: str) -> None:
    with told(*arguments, "--data", data) as (code, out, err):
        assert (code, out) == (2, "")
    assert said in err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["student", "mtp.1", "hot_vocab"])
def test_a_students_directory_may_have_any_name(
    name: str, data: Path, students: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).symlink_to(students[0])
    monkeypatch.chdir(tmp_path)
    with told(name, "--data", data, "--ledger", tmp_path / "ledger.jsonl") as (code, _out, err):
        assert (code, err.count("error")) == (0, 0)


def test_a_folder_that_is_no_extraction_is_refused_in_one_line(tmp_path: Path) -> None:
    with told("mtp", "--data", tmp_path / "nowhere") as (code, out, err):
        assert (code, out) == (2, "")
    assert "no complete extraction" in err.strip().splitlines()[-1]
