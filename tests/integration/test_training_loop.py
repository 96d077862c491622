"""The loop in small, for real: a server's captured answers become a drafter, and the drafter that server's default.

A student of a few steps is no faster than the head it learned from, so that both ends of the gate are met here: one
that asks for no gain lets it in, the one that asks for any takes it out again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.checkpoints import tiny
from tests.servers import ROOT, ProcessServer, clean_environment, running_process, serve_command
from training.cli import app
from training.ledger import Ledger
from training.loop import loop
from training.loop_stages import LoopOptions, NotEnoughError
from training.stages import read_json

STAGES = ["export", "hot-vocab", "extract", "distill", "evaluate", "promote"]
THINGS = ("list", "set", "string", "file", "loop", "class", "module", "tuple", "number", "function")
ASKS = (
    "What is a {}?",
    "How do I use a {}?",
    "Write a {}.",
    "Explain a {} to me.",
    "Why a {}?",
    "Show a {} in Python.",
)
SMALL: dict[str, Any] = {
    "hot_rows": 512,
    "steps": 8,
    "ce_steps": 2,
    "tokens_per_step": 256,
    "threads": 1,
    "requests": 8,
    "fewest_requests": 2,
    "pairs": 4,
    "min_gain": 0.0,
}


def ask(server: ProcessServer, count: int = 60) -> None:
    """Short answers, greedy and sampled."""
    questions = [question.format(thing) for thing in THINGS for question in ASKS][:count]

    def one(number: int) -> None:
        more = {"temperature": 0.7 * (number % 2), "seed": number, "max_tokens": 40}
        told = server.chat(questions[number], chat_template_kwargs={"enable_thinking": False}, **more)
        told.raise_for_status()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProcessServer]:
    work = tmp_path / "work"
    work.mkdir()
    command = serve_command(tiny(), "--draft-tokens", "4", "--drafter-dir", str(work))
    with running_process(command, tmp_path / "capture.db") as started:
        yield started


def options(server: ProcessServer, **more: Any) -> LoopOptions:
    assert server.capture
    return LoopOptions(server.url, server.capture.parent / "work", capture=server.capture, **{**SMALL, **more})


def arguments(given: LoopOptions) -> list[str]:
    names = {"fewest_requests": "fewest"}
    told = [("server", given.server), ("workdir", given.workdir), ("capture", given.capture)]
    told += [(names.get(name, name), getattr(given, name)) for name in SMALL]
    return [text for name, value in told for text in (f"--{name.replace('_', '-')}", str(value))]


def active(server: ProcessServer) -> str:
    told = server.http.get("/v1/drafters").json()
    assert told["canary"] is None
    return str(told["active"])


def test_captured_answers_become_the_servers_drafter_and_a_slower_one_is_taken_out(server: ProcessServer) -> None:
    ledger = Ledger(server.capture.parent / "ledger.jsonl")  # type: ignore[union-attr]
    ask(server, 8)
    with pytest.raises(NotEnoughError, match="not enough captured yet"):
        loop(options(server), ledger)
    ask(server)
    before = server.chat("What is a list?", temperature=0, max_tokens=24).json()["choices"]

    def interrupt(doing: str, done: int, total: int) -> None:
        if doing.startswith("distill: ") and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(options(server), ledger, interrupt)
    ask(server, 1)  # what comes while a turn is under way is the next one's
    found = loop(options(server), ledger)
    assert [stage.name for stage in found.stages] == STAGES
    assert [stage.name for stage in found.stages if stage.skipped] == STAGES[:3]
    assert found.promoted, found.verdict["reason"]
    assert active(server) == found.verdict["candidate"]
    assert server.chat("What is a list?", temperature=0, max_tokens=24).json()["choices"] == before

    rows = read_json(found.stages[4].folder / "evaluation.json")
    assert rows
    assert [row["name"] for row in rows["rows"]] == ["mtp", "hot_vocab", "student"]
    outcomes = [(run.command, run.outcome) for run in ledger.read()[0]]
    assert outcomes == [
        *[("export", "ok"), ("export", "ok"), ("hot-vocab", "ok"), ("extract", "ok"), ("distill", "failed")],
        *[("distill", "ok"), ("evaluate", "ok"), ("promote", "ok")],
    ]

    given = arguments(options(server))
    planned = CliRunner().invoke(app, ["loop", *given, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert "captured answers of this model" in planned.output
    assert active(server) == found.verdict["candidate"]

    # The row that came meanwhile is another turn; a gate that asks for a gain has the student out again.
    gated = [*given[:-1], "1.0"]
    assert given[-2:] == ["--min-gain", "0.0"]
    told = CliRunner().invoke(app, ["loop", *gated, "--steps", "4", "--ledger", str(ledger.path)])
    assert told.exit_code == 1, told.output
    assert "not promoted" in told.output
    last = ledger.read()[0][-1]
    assert (last.command, last.outcome) == ("promote", "negative")
    assert active(server) != last.figures["candidate"]
    assert read_json(options(server).workdir / "round.json")["finished"]  # type: ignore[index]

    page = CliRunner().invoke(app, ["report", str(ledger.path), "-o", str(ledger.path.with_suffix(".html"))])
    assert page.exit_code == 0, page.output
    assert "negative" in ledger.path.with_suffix(".html").read_text()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_student(server: ProcessServer) -> None:
    """kill -9 as each stage begins and, again, while it is under way; the student's bits are those of an even run."""
    ask(server)
    given = arguments(options(server))
    command = [sys.executable, "-m", "training.cli", "loop", *given]
    workdir = options(server).workdir
    killed = 0
    for stage in STAGES:
        for wait in (0.0, 0.7):
            process = subprocess.Popen(
                command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            while process.poll() is None and not list(workdir.glob(f"{stage}-*")):
                time.sleep(0.02)
            time.sleep(wait)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
            process.wait()
    assert killed >= len(STAGES)
    told = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    made = Path(told.stdout.strip().splitlines()[-1])
    assert active(server).startswith("student-")
    even = loop(replace(options(server), workdir=workdir / "even"), Ledger(workdir / "even.jsonl"))
    headers = [json.loads((folder / "config.json").read_text()) for folder in (made, even.checkpoint)]
    assert headers[0]["weights_sha256"] == headers[1]["weights_sha256"]
