"""The `capture` command from outside: what it prints, and that bad input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from capture.cli import app
from capture.records import COLUMNS, JSON_FIELDS, Generation
from tests.capture_rows import generation, write

ROOT = Path(__file__).parents[2]
NASTY = "[red]not red[/red] \x1b[31mred\x1b[0m \x07 \u202e done\nsecond line"


def capture(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DRAFTLOOP", "XDG"))}
    env = kept | {"HOME": str(cwd), "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "capture.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str, code: int = 2) -> None:
    assert done.returncode == code, done
    assert done.stdout == ""
    assert done.stderr.startswith("capture: ")
    assert done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in parts), done.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [
        generation(id="0190-one", response_text=NASTY, client="[bold]me", seed=2**64 - 1, steps=[(2, 2), (2, 0)]),
        generation(id="0190-two", status="cancelled", finish_reason="cancelled", error="x\ny"),
    ]
    return write(tmp_path / ".local" / "share" / "draftloop" / "capture.db", *rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["stats", "list", "show", "export", "prune", "redact", "merge", "verify", "replay"]),
        (["stats"], ["--capture", "--json", "DRAFTLOOP_CAPTURE"]),
        (["list"], ["--capture", "--json", "--limit", "--status", "--since", "--tag"]),
        (["show"], ["--capture", "--json", "ID"]),
        (["export"], ["--capture", "--to", "--out", "--include-unfinished", "--shard-bytes"]),
    ],
)
def test_help_names_every_option(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = capture(*arguments, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(word in done.stdout for word in words), done.stdout


def test_stats_shows_counts_and_acceptance_with_its_denominators(path: Path, tmp_path: Path) -> None:
    done = capture("stats", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("finished 1", "cancelled 1", "0.667 (2/3)", "0.333 (1/3)", "2.000"):
        assert text in done.stdout
    figures = json.loads(capture("stats", "--json", cwd=tmp_path).stdout)
    assert figures["rows"] == 2
    assert figures["acceptance"][0]["proposed"] == [3, 3]
    assert figures["acceptance"][0]["accepted"] == [2, 1]
    assert figures["acceptance"][0]["acceptance_length"] == 2.0


def test_list_shows_whole_ids_newest_first_and_stored_text_harmless(path: Path, tmp_path: Path) -> None:
    done = capture("list", cwd=tmp_path)
    header, newest, oldest = done.stdout.splitlines()
    assert header.startswith("id ")
    assert newest.startswith("0190-two")
    assert oldest.startswith("0190-one")
    assert r"[red]not red[/red] \x1b[31mred\x1b[0m \x07 \u202e done\nsecond line" in oldest
    [only] = capture("list", "--status", "cancelled", "--json", cwd=tmp_path).stdout.splitlines()
    assert json.loads(only)["id"] == "0190-two"
    assert len(capture("list", "-n", "1", "--json", cwd=tmp_path).stdout.splitlines()) == 1


def test_show_prints_stored_text_as_text_with_controls_escaped(path: Path, tmp_path: Path) -> None:
    done = capture("show", "0190-o", cwd=tmp_path, FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert r"[red]not red[/red] \x1b[31mred\x1b[0m \x07 \u202e done" in done.stdout
    assert "\nsecond line" in done.stdout
    assert "[bold]me" in done.stdout
    assert "18446744073709551615" in done.stdout
    assert "\x1b[31m" not in done.stdout
    assert "\u202e" not in done.stdout


def test_show_as_json_is_the_whole_row(path: Path, tmp_path: Path) -> None:
    row = json.loads(capture("show", "0190-one", "--json", cwd=tmp_path).stdout)
    assert row.keys() == {f.name for f in fields(Generation)}
    assert row["response_text"] == NASTY
    assert row["completion_tokens"] == [8, 9]
    assert row["steps"] == [[2, 2], [2, 0]]


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_"])
def test_show_takes_the_id_of_a_response(path: Path, tmp_path: Path, prefix: str) -> None:
    done = capture("show", f"{prefix}0190-two", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["id"] == "0190-two"


def test_export_alone_finds_the_file_and_prints_where_it_wrote(path: Path, tmp_path: Path) -> None:
    done = capture("export", "--to", "npz", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / done.stdout.strip()
    assert folder.parent == tmp_path
    assert folder.name.startswith("draftloop-export-")
    with np.load(folder / "shard-00000.npz", allow_pickle=False) as shard:
        assert shard["doc_ids"].tolist() == ["0190-one"]
        assert shard["tokens"].tolist() == [5, 6, 7, 8, 9]


def test_export_takes_its_options(path: Path, tmp_path: Path) -> None:
    options = ("--out", "here", "--include-unfinished", "--shard-bytes", "1")
    done = capture("export", "--to", "npz", *options, cwd=tmp_path)
    assert done.stdout == "here\n"
    assert len(list((tmp_path / "here").glob("shard-*.npz"))) == 2


def test_an_export_of_nothing_is_one_line_and_exit_code_one(tmp_path: Path) -> None:
    write(tmp_path / "empty.db")
    done = capture("export", "--to", "npz", "--capture", "empty.db", cwd=tmp_path)
    assert_one_line(done, "nothing to export", "empty.db", code=1)
    assert [p.name for p in tmp_path.iterdir()] == ["empty.db"]


def test_the_file_is_named_by_option_before_variable_before_default(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.db", *(generation() for _ in range(5)))
    write(tmp_path / "b.db", *(generation() for _ in range(7)))

    def rows(*arguments: str, **environment: str) -> int:
        return int(json.loads(capture("stats", "--json", *arguments, cwd=tmp_path, **environment).stdout)["rows"])

    assert rows() == 2
    assert rows(DRAFTLOOP_CAPTURE="a.db") == 5
    assert rows("--capture", "b.db", DRAFTLOOP_CAPTURE="a.db") == 7
    assert rows(DRAFTLOOP_CAPTURE="") == 2


COMMANDS = (["stats"], ["list"], ["show", "x"], ["export", "--to", "npz"])


@pytest.mark.parametrize(
    "command", [["prune", "--max-rows", "1"], ["redact", "x"], ["verify"], ["merge", "all.db"]], ids=lambda c: c[0]
)
def test_a_bad_file_is_one_line_to_whatever_would_change_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hello " * 100)
    (tmp_path / "empty").write_text("")
    with closing(sqlite3.connect(tmp_path / "new.db")) as db:
        db.execute("PRAGMA user_version = 99")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for name, words in (
        ("none", "no capture file"),
        ("text", "is not an SQLite file"),
        ("new.db", "newer draftloop"),
        ("empty", "is empty"),
    ):
        where = [name] if command[0] == "merge" else ["--capture", name]
        done = CliRunner().invoke(app, [*command, *where])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("capture: ")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_bad_file_is_one_line_and_exit_code_two(tmp_path: Path, command: list[str]) -> None:
    assert_one_line(capture(*command, cwd=tmp_path), "no capture file at")
    assert_one_line(capture(*command, cwd=tmp_path, DRAFTLOOP_CAPTURE="off"), "capture is off")
    (tmp_path / "text").write_text("hello " * 100)
    assert_one_line(capture(*command, "--capture", "text", cwd=tmp_path), "text is not an SQLite file")
    with closing(sqlite3.connect(tmp_path / "new.db")) as db:
        db.execute("PRAGMA user_version = 99")
    assert_one_line(capture(*command, "--capture", "new.db", cwd=tmp_path), "newer draftloop", "99")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.db", "text"]


HUGE = str(10**20)


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "--limit", HUGE],
        ["stats", "--min-tokens", HUGE],
        ["export", "--to", "npz", "--sample", HUGE],
        ["export", "--to", "npz", "--sample", "1", "--seed", HUGE],
        ["replay", "--server", "http://127.0.0.1:9", "--sample", HUGE],
        ["prune", "--max-bytes", "9" * 400],
        ["stats", "--capture", "x" * 5000],
        ["merge", "x" * 5000, ".local/share/draftloop/capture.db"],
        ["merge", "circle", ".local/share/draftloop/capture.db"],
    ],
)
def test_what_is_too_large_or_no_path_at_all_is_one_line(path: Path, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "circle").symlink_to("circle")
    assert_one_line(capture(*arguments, cwd=tmp_path))


def test_an_argument_that_is_not_utf8_finds_what_was_stored_of_such_a_text(path: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff")
    write(path, generation(id="odd", client=odd, model=odd))
    for option in ("--client", "--model"):
        [row] = capture("list", "--json", option, odd, cwd=tmp_path).stdout.splitlines()
        assert json.loads(row)["id"] == "odd"
    done = capture("list", "--json", "--tag", f"a={odd}", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_home_is_meant_by_its_sign_as_the_server_means_it(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine.db", *(generation() for _ in range(3)))
    for arguments, environment in (([], {"DRAFTLOOP_CAPTURE": "~/mine.db"}), (["--capture=~/mine.db"], {})):
        done = capture("stats", "--json", *arguments, cwd=path.parent, **{"HOME": str(tmp_path)} | environment)
        assert json.loads(done.stdout)["rows"] == 3


@pytest.mark.parametrize("command", [["stats"], ["list", "--json"], ["show", "0190-one"], ["verify"]])
def test_output_that_cannot_be_written_is_one_line(path: Path, command: list[str]) -> None:
    line = [sys.executable, "-m", "capture.cli", *command, "--capture", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "capture: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["stats", "list", "show 0190-one", "verify"])
def test_a_stream_that_was_closed_is_done_without(path: Path, command: str, closed: str) -> None:
    line = f"exec {sys.executable} -m capture.cli {command} --capture {path} {closed}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=60, check=False)
    whole = capture(*command.split(), "--capture", str(path), cwd=path.parent)
    assert done.returncode == whole.returncode
    assert (done.stdout, done.stderr) == (whole.stdout if closed == "2>&-" else "", "")


def test_whatever_a_foreign_file_says_is_harmless(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for name, kind in COLUMNS.items():
            if kind is str and name not in ("id", *JSON_FIELDS):
                db.execute(f"UPDATE generations SET {name} = ? WHERE id = '0190-one'", [NASTY])
    for command in (["stats"], ["stats", "--since", "2000-01-01"], ["list"], ["show", "0190-one"], ["verify"]):
        done = capture(*command, cwd=tmp_path)
        assert done.returncode in (0, 1)
        assert not set("\x1b\x07\u202e") & set(done.stdout + done.stderr), command


def test_a_damaged_file_is_one_line(path: Path, tmp_path: Path) -> None:
    write(path, *(generation(response_text="x" * 5000) for _ in range(50)))
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 100_000)
    for command in (["stats"], ["list"], ["export", "--to", "npz"]):
        assert_one_line(capture(*command, cwd=tmp_path), "malformed")


@pytest.mark.parametrize("wanted", ["zz", "chatcmpl-zz", "%", "0190-", "\x1b[31m"])
def test_an_id_that_names_no_single_row_is_one_line(path: Path, tmp_path: Path, wanted: str) -> None:
    done = capture("show", wanted, cwd=tmp_path)
    assert_one_line(done)
    assert "\x1b" not in done.stderr


def test_a_folder_that_cannot_be_written_is_one_line(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below", "."):
        assert_one_line(capture("export", "--to", "npz", "--out", out, cwd=tmp_path), out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["show", ""],
        ["show", "chatcmpl-"],
        ["show", "resp_"],
        ["export"],
        ["export", "--to", "csv"],
        ["export", "--to", "npz", "--shard-bytes", "0"],
        ["list", "--limit", "0"],
        ["list", "--limit", "many"],
        ["list", "--status", "done"],
        ["stats", "--no-such-option"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_is_explained_with_exit_code_two(path: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = capture(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: capture")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["show", "long"], ["show", "long", "--json"], ["list", "-n", "9999", "--json"]])
def test_a_reader_that_goes_away_is_no_trouble(tmp_path: Path, command: list[str]) -> None:
    rows = (generation(response_text="x" * 80) for _ in range(5000))
    write(tmp_path / "c.db", generation(id="long", response_text="line\n" * 600_000), *rows)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "capture.cli", *command, "--capture", "c.db"]
    with subprocess.Popen(line, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) in (0, 1)


def test_an_interrupted_export_leaves_no_traceback_and_no_folder(path: Path, tmp_path: Path) -> None:
    script = """
import os, signal, capture.cli as cli, capture.commands.export as command
real = command.export_npz
def interrupted(store, folder, **options):
    options["on_row"] = lambda: os.kill(os.getpid(), signal.SIGINT)
    return real(store, folder, **options)
command.export_npz = interrupted
cli.main()
"""
    command = [sys.executable, "-c", script, "export", "--to", "npz", "--out", "out", "--capture", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode not in (0, 2)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_loads_nothing_of_the_model_or_the_server(tmp_path: Path) -> None:
    script = "import sys, capture.cli; print(sorted({m.split('.')[0] for m in sys.modules}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "backend",
        "serve",
        "training",
        "fastapi",
        "pydantic",
    }
    assert not heavy & set(eval(done.stdout))


def test_output_that_is_not_utf8_gets_escapes(path: Path, tmp_path: Path) -> None:
    write(path, generation(id="umlaut", response_text="grün"))
    done = capture("show", "umlaut", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"gr\xfcn" in done.stdout
