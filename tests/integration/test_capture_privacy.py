"""What a client keeps out of the capture file, and what its operator does: neither text nor tokens reach the disk."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capture.changing import changing
from capture.cli import app
from capture.migrations import MIGRATIONS, upgrade
from capture.redact import PLACEHOLDER, Redactor, redactor
from capture.redact_rows import redact_rows
from capture.store import Store
from capture.writer import CaptureWriter
from serve.settings import load
from tests.capture_rows import generation, write
from tests.fake_backend import Script
from tests.servers import CHAT, ROOT, clean_environment, rows

HEADER = "X-Draftloop-Capture"
SECRET = "alice@example.com"
SAYS = Script(pieces=(b"Ask ", b"bob@", b"example.com", b" about it."), thought=(b"carol@example.com",))
ENDPOINTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": f"I am {SECRET}"}]},
    "/v1/completions": {"prompt": f"I am {SECRET}"},
    "/v1/responses": {"input": f"I am {SECRET}"},
}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
everywhere = pytest.mark.parametrize("endpoint", ENDPOINTS)


def on_disk(path: Path) -> bytes:
    """Every byte of the capture file and of what lies beside it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()) if file.is_file())


@both
@everywhere
def test_a_client_opts_out_by_any_spelling_and_leaves_only_a_count(serve, endpoint, stream):
    server = serve(SAYS)
    asked = {**ENDPOINTS[endpoint], "stream": stream}
    outs = [
        *(({HEADER: value}, {}) for value in ("off", "false", "0", "Off", "FALSE", "on, off")),
        ([(HEADER, "on"), (HEADER, "off")], {}),
        ({}, {"store": False}),
        ({HEADER: "on"}, {"store": False}),
        ({HEADER: "off"}, {"store": True}),
    ]
    for headers, fields in outs:
        answer = server.http.post(endpoint, json={**asked, **fields}, headers=headers)
        assert answer.status_code == 200
        assert "bob@" in answer.text
    assert server.rows() == []
    assert b"example.com" not in on_disk(server.capture)
    assert server.metric("capture_generations_total", status="opted_out") == len(outs)
    for headers, fields in [({}, {}), ({HEADER: "on"}, {}), ({HEADER: "TRUE"}, {"store": True}), ({HEADER: "1"}, {})]:
        assert server.http.post(endpoint, json={**asked, **fields}, headers=headers).status_code == 200
    assert len(server.rows()) == 4


@everywhere
def test_a_word_nobody_understands_is_refused_rather_than_captured(serve, endpoint):
    server = serve()
    for value in ("no", "", "off, no"):
        answer = server.http.post(endpoint, json=ENDPOINTS[endpoint], headers={HEADER: value})
        assert answer.status_code == 400
        assert HEADER in answer.json()["error"]["message"]
    assert server.rows() == []


@both
@everywhere
def test_what_the_operator_redacts_never_reaches_the_disk(serve, tmp_path, endpoint, stream):
    (tmp_path / "patterns").write_text("# ours\nproject \\w+, \\w{3}\n")
    server = serve(SAYS, redact="email", redact_file=tmp_path / "patterns", capture=tmp_path / "kept" / "capture.db")
    asked = {
        **ENDPOINTS[endpoint],
        "stream": stream,
        "seed": 5,
        "user": SECRET,
        "metadata": {"owner": SECRET, "note": "project blue, now"},
    }
    answer = server.http.post(endpoint, json=asked)
    assert answer.status_code == 200
    assert "bob@" in answer.text  # the client gets what was said
    (row,) = server.rows()
    assert row.response_text.endswith(f"Ask {PLACEHOLDER} about it.")
    assert row.request["user"] == row.client == PLACEHOLDER
    assert row.request["metadata"] == {"owner": PLACEHOLDER, "note": PLACEHOLDER}
    assert (row.prompt_tokens, row.completion_tokens, row.logprobs, row.seed) == (None, None, None, None)
    assert "seed" not in row.request
    assert row.redacted >= 5
    assert row.timings["predicted_n"] > 0
    kept = on_disk(server.capture)
    assert b"example.com" not in kept
    assert b"blue" not in kept
    assert server.metric("capture_redacted_total") == 1
    assert server.metric("capture_generations_total", status="finished") == 1


def test_a_row_without_a_match_is_stored_whole(serve):
    server = serve(redact="email")
    server.chat("Hi")
    (row,) = server.rows()
    assert (row.redacted, row.seed is None, len(row.completion_tokens)) == (0, False, 10)
    assert server.metric("capture_redacted_total") == 0


def test_what_cannot_be_redacted_is_not_stored(serve, monkeypatch):
    server = serve(redact="email")
    monkeypatch.setattr(Redactor, "generation", lambda *_: 1 / 0)
    assert server.chat().status_code == 200
    assert server.rows() == []
    assert server.metric("capture_failures_total") == 1


def test_patterns_are_a_flag_each_or_a_line_each_of_the_variable(monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_REDACT", "email\n\na{2,3}\n")
    assert load().redact == ("email", "a{2,3}")
    assert load(redact=["b{2,3}", "key"]).redact == ("b{2,3}", "key")


def test_a_pattern_that_is_none_is_one_line_and_exit_code_two():
    command = [sys.executable, "-m", "tests.fake_backend", "--port", "0", "--capture", "off"]
    refused = subprocess.run(
        [*command, "--redact", "email", "--redact", "("],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == "serve: '(' is no regular expression: missing ), unterminated subpattern at position 0\n"


IDS = [7_777_001, 7_777_002, 7_777_003, 7_777_004]
ID_BYTES = b"".join(token.to_bytes(4, "little") for token in IDS)


def telling(number: int, **fields: Any) -> Any:
    """A row that tells the secret in its text, and in its token ids."""
    told = f"{number}: {SECRET} "
    asked = {"messages": [{"role": "user", "content": told * 200}], "seed": 123_456_789}
    return generation(response_text=told * 20, request=asked, completion_tokens=IDS, logprobs=[], **fields)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["redact", *map(str, arguments)])


def test_old_rows_are_redacted_out_of_the_file_its_log_and_its_copies(tmp_path):
    path = write(tmp_path / "c.db", *(telling(n) for n in range(50)))
    with changing(path) as db:
        db.execute("PRAGMA secure_delete = OFF")
        db["generations"].delete_where("rowid % 3 > 0")  # free pages, with text in them
        upgrade(db, path, [*MIGRATIONS, lambda db: None])  # the copy an upgrade makes
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    writer = CaptureWriter(path)  # holds the file open, as a server does: its log stays
    writer.start()
    for n in range(20):
        writer.submit(telling(n, id=f"late-{n}")).result(10)
    writer.submit(generation(id="clean")).result(10)
    copy = tmp_path / f"c.db.v{len(MIGRATIONS)}.bak"
    for file in (path, tmp_path / "c.db-wal", copy):
        assert SECRET.encode() in file.read_bytes()
    would = run("--capture", path, "--dry-run", "email", "--json")
    before = rows(path)
    assert json.loads(would.stdout)["rows"] == len(before) - 1 == 36
    assert copy.exists()
    done = run("--capture", path, "email")
    assert done.exit_code == 0, done.output
    assert f"{36 * 220} matches in 36 rows redacted" in done.stdout
    assert str(copy) in done.stdout
    left = on_disk(path)
    assert SECRET.encode() not in left
    assert ID_BYTES not in left
    assert b"123456789" not in left
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.db", "c.db-shm", "c.db-wal"]
    writer.submit(generation(id="after")).result(10)
    assert writer.close(10)
    found = {row.id: row for row in rows(path)}
    assert len(found) == len(before) + 1
    for row in before:
        if row.id == "clean":
            assert found[row.id].completion_tokens.tolist() == row.completion_tokens.tolist()
        else:
            assert found[row.id].redacted == 220
            assert found[row.id].response_text == row.response_text.replace(SECRET, PLACEHOLDER)
            assert found[row.id].completion_tokens is found[row.id].seed is None
    assert "0 matches in 0 rows" in run("--capture", path, "email").stdout


@pytest.mark.parametrize("name", ["c[1].db", "*.db", "folder/link.db"])
def test_the_copy_of_an_upgrade_is_found_whatever_the_file_is_called(tmp_path, name):
    real = write(tmp_path / name.replace("folder/link", "real"), telling(1))
    other = tmp_path / "another.db.v1.bak"
    other.touch()
    path = tmp_path / name
    if path != real:
        path.parent.mkdir()
        path.symlink_to(real)
    with changing(path) as db:
        upgrade(db, path, [*MIGRATIONS, lambda db: None])
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    older = path.with_name(f"{path.name}.v0.bak")  # links once had their own
    older.write_text(SECRET)
    for asked in {path, real}:
        assert f"{real}.v{len(MIGRATIONS)}.bak" in run("--capture", asked, "--dry-run", "email").stdout
    assert run("--capture", path, "email").exit_code == 0
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert other.exists()


def test_only_chosen_rows_are_redacted(tmp_path):
    path = write(tmp_path / "c.db", telling(1, id="a", client="x"), telling(2, id="b", client="y"))
    assert run("--capture", path, "--client", "x", "email").exit_code == 0
    assert [bool(row.redacted) for row in rows(path)] == [True, False]


def test_two_redactions_at_once_lose_nothing_of_each_other(tmp_path):
    both = [generation(id=f"{n:03}", response_text="one two " * 50) for n in range(300)]
    path = write(tmp_path / "c.db", *both)
    made = [redactor([word]) for word in ("one", "two")]
    threads = [threading.Thread(target=redact_rows, args=(path, one)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.response_text for row in rows(path)} == {f"{PLACEHOLDER} {PLACEHOLDER} " * 50}
    assert {row.redacted for row in rows(path)} == {100}


def test_a_read_that_holds_the_log_is_said_and_the_next_run_empties_it(tmp_path, monkeypatch):
    monkeypatch.setattr("capture.changing.LOG_SECONDS", 0.1)
    path = write(tmp_path / "c.db", *(telling(n) for n in range(5)))
    with Store.open(path) as store, store.snapshot():
        assert store.count() == 5
        done = run("--capture", path, "email")
    assert done.exit_code == 2
    assert "run this again" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run("--capture", path, "email").exit_code == 0
    assert SECRET.encode() not in on_disk(path)


def test_a_copy_that_cannot_be_removed_is_said(tmp_path):
    path = write(tmp_path / "c.db", telling(1))
    copy = tmp_path / "c.db.v1.bak"
    copy.mkdir()
    done = run("--capture", path, "email")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert str(copy) in done.stderr


def test_a_redacted_row_trains_nothing(tmp_path):
    path = write(tmp_path / "c.db", telling(1), generation(id="clean"))
    assert run("--capture", path, "email").exit_code == 0
    for form in ("npz", "jsonl"):
        out = tmp_path / form
        done = CliRunner().invoke(app, ["export", "--to", form, "--capture", str(path), "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert json.loads((out / "manifest.json").read_text())["counts"]["documents"] == 1


@pytest.mark.parametrize("arguments", [["("], ["a*"], ["--redact-file", "none"]])
def test_a_pattern_that_cannot_be_used_changes_nothing(tmp_path, arguments):
    path = write(tmp_path / "c.db", telling(1))
    done = run("--capture", path, *arguments)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert run("--capture", path).exit_code == 2
    assert rows(path)[0].redacted == 0
