"""A sound file is found sound; each kind of damage is found, named by its row, and told without the row's text."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capture.cli import app
from capture.store import Store
from tests.capture_rows import generation, write
from tests.fake_backend import FINGERPRINTS
from tests.servers import AppServer, running_app

PRINTS = {"weights_fingerprint": "a" * 64, "tokenizer_fingerprint": FINGERPRINTS.tokenizer}
SAYS: dict[str, Any] = {**PRINTS, "response_text": "A secret", "completion_tokens": list(b"A secret"), "logprobs": []}


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", "--capture", str(path), *arguments])


def damaged(path: Path, sql: str, *values: object) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(sql, values).rowcount == 1
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    whole = generation(id="whole", seed=2**64 - 1, logprobs=[-0.5, float("-inf")], tool_calls=[{"a": "grün \ud800"}])
    text = generation(id="text", prompt_tokens=None, completion_tokens=None, logprobs=None, seed=None, steps=[])
    return write(tmp_path / "c.db", whole, text, generation(id="secret", response_text="secret"))


def test_a_sound_file_is_found_sound(path: Path) -> None:
    done = run(path)
    assert (done.exit_code, done.stdout) == (0, "3 rows, 0 problems\n")
    assert run(path, "--model", "none").stdout == "0 rows, 0 problems\n"


@pytest.mark.parametrize(
    ("change", "value", "words"),
    [
        ("request", "{", "cannot be read"),
        ("request", "[]", "request must be a JSON object"),
        ("tool_calls", "{}", "tool_calls must be a JSON array"),
        ("request", '{"a":' * 5000 + "1" + "}" * 5000, "cannot be read"),
        ("parameters", '{"a": 1}', "not stored as the server stores it"),
        ("completion_tokens", b"\x01\x02\x03", "cannot be read"),
        ("completion_tokens", b"\xff" * 8, "completion_tokens must be"),
        ("logprobs", b"\x00" * 12, "logprobs must be 2 numbers"),
        ("steps", b"\x01", "cannot be read"),
        ("steps", b"\x01\x02", "0 ≤ accepted ≤ drafted"),
        ("status", "done", "status must be one of"),
        ("status", "failed", "has status failed and finish reason stop"),
        ("created_at", "2025-01-01", "created_at must be"),
        ("split_key_length", 99, "split_key_length must be"),
        ("timings", '{"predicted_n":3}', "tell predicted_n 3, and it holds 2"),
        ("timings", '{"draft_n":9}', "tell draft_n 9, and it holds 2"),
        ("parameters", '{"redacted":1}', "is redacted and yet keeps"),
        ("tokenizer_fingerprint", "e" * 64, "name 2 different tokenizers"),
    ],
)
def test_a_row_that_cannot_be_so_is_named(path: Path, change: str, value: object, words: str) -> None:
    damaged(path, f"UPDATE generations SET {change} = ? WHERE id = 'secret'", value)
    done = run(path)
    assert done.exit_code == 1
    assert words in done.stdout
    assert "1 problems" in done.stdout
    assert ("secret: " in done.stdout) or change == "tokenizer_fingerprint"
    assert done.stdout.count("secret") <= 2  # its name, not what it says
    [problem] = json.loads(run(path, "--json").stdout)["problems"]
    assert words in problem["what"]


def test_totals_that_are_not_those_of_the_rows_are_told_and_right_again_in_a_merged_file(
    path: Path, tmp_path: Path
) -> None:
    damaged(path, "UPDATE totals SET rows = 7, prompt_tokens = 0 WHERE completion_tokens > 0")
    damaged(path, "UPDATE step_totals SET count = 3")
    damaged(path, "INSERT INTO totals VALUES ('gone', 'finished', 'stop', 2, 0, 0)")
    done = run(path)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "file: its totals tell 2 rows of gone / finished / stop, and it holds 0",
        "file: its totals tell 7 rows of mtp / finished / stop, and it holds 3",
        "file: its totals tell 0 prompt tokens of mtp / finished / stop, and it holds 6",
        "file: its totals tell 3 verify steps of mtp that drafted and accepted 2, 1, and it holds 2",
        "3 rows, 4 problems",
    ]
    anew = tmp_path / "anew.db"
    assert CliRunner().invoke(app, ["merge", str(anew), str(path)]).exit_code == 0
    assert run(anew).stdout == "3 rows, 0 problems\n"


def test_totals_stay_those_of_the_rows_whatever_becomes_of_them(path: Path) -> None:
    for sql in (
        "UPDATE generations SET steps = x'0100', drafter = 'student' WHERE id = 'whole'",
        "UPDATE generations SET steps = x'', completion_tokens = NULL, logprobs = NULL WHERE id = 'secret'",
        "DELETE FROM generations WHERE id = 'text'",
    ):
        damaged(path, sql)
    assert run(path).stdout == "2 rows, 0 problems\n"


def test_steps_that_are_none_leave_the_others_counted(path: Path) -> None:
    damaged(path, "UPDATE generations SET steps = x'01' WHERE id = 'secret'")
    with Store.open(path) as store:
        (acceptance,) = store.stats().acceptance
    assert (acceptance.steps, acceptance.proposed, acceptance.accepted) == (1, (1, 1), (1, 0))


def test_pages_that_do_not_fit_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "c.db", *(generation(response_text="x" * 5000) for _ in range(50)))
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 50_000)
    done = run(path)
    assert done.exit_code == 1
    assert done.stdout.count("file: ") >= 2  # the check of the whole, and where reading rows ended
    assert "malformed" in done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    """Over a backend whose tokens are bytes."""
    with running_app(capture="off") as running:
        yield running


@pytest.fixture
def verified(tmp_path: Path, server: AppServer) -> Callable[..., dict[str, Any]]:
    def verify(**fields: Any) -> dict[str, Any]:
        path = write(tmp_path / "c.db", generation(id="row", **{**SAYS, **fields}))
        done = run(path, "--server", server.url, "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.exit_code == bool(found["problems"])
        return found

    return verify


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_text": "secret"},  # what stands around it is not of the answer
        {"response_text": "A sec", "reasoning": ""},  # cut at a stop string
        {"response_text": " secret\n", "reasoning": "A"},
        {"response_text": "A secret", "completion_tokens": list(b"<|im_start|>A <|x|>secret<|im_end|>")},
        {"response_text": "grün \ufffd", "completion_tokens": list("grün ".encode() + b"\xf0\x9f")},
        {"tool_calls": [{"function": {"name": "secret"}}], "response_text": "told in other words"},
    ],
)
def test_a_server_decodes_the_tokens_to_the_text(verified: Callable[..., dict[str, Any]], fields: Any) -> None:
    found = verified(**fields)
    assert (found["decoded"], found["problems"]) == (1, [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_text": "A sacred"}, "another text"),
        ({"response_text": "A", "reasoning": "secret"}, "another text"),
        ({"tool_calls": [{"function": {"name": "other"}}]}, "another text"),
        ({"completion_tokens": [65, 999]}, "none of the server's"),
    ],
)
def test_tokens_that_say_something_else_are_a_problem(
    verified: Callable[..., dict[str, Any]], fields: Any, words: str
) -> None:
    found = verified(**fields)
    [problem] = found["problems"]
    assert problem["id"] == "row"
    assert words in problem["what"]
    assert "sec" not in problem["what"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer_fingerprint": "b" * 64}, "the server has another tokenizer"),
        ({"completion_tokens": None, "logprobs": None, "prompt_tokens": None}, "no token ids kept"),
        ({"completion_tokens": []}, "nothing generated"),
    ],
)
def test_what_cannot_be_decoded_says_why(verified: Callable[..., dict[str, Any]], fields: Any, reason: str) -> None:
    found = verified(**fields)
    assert (found["decoded"], found["problems"], found["not_decoded"]) == (0, [], {reason: 1})


def test_a_server_that_is_none_is_one_line_and_exit_code_two(path: Path) -> None:
    for url in ("http://127.0.0.1:9", "nonsense"):
        done = run(path, "--server", url)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("capture: ")
        assert done.stderr.count("\n") == 1
