"""Watching: a turn when there is enough that is new, none before, and what is refused is waited out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.capture_rows import generation, write
from tests.fake_backend import FINGERPRINTS
from tests.servers import AppServer, running_app
from training.errors import TrainingError
from training.ledger import Ledger
from training.loop import ROUND, Captured, loop, watch
from training.loop_plan import plan_loop
from training.loop_stages import LoopOptions
from training.stages import read_json, write_json


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with running_app(capture=tmp_path_factory.mktemp("served") / "served.db") as started:
        yield started


def answers(path: Path, count: int, **fields: Any) -> Path:
    """Rows of five own tokens each."""
    given = {"weights_fingerprint": FINGERPRINTS.weights, "completion_tokens": range(5), "logprobs": None}
    return write(path, *(generation(**(given | fields)) for _ in range(count)))


def turns(options: LoopOptions, least: int, looks: int, turn: Callable[[], Any]) -> tuple[int, list[str]]:
    """How many turns so many looks take, and what was said meanwhile."""
    taken, said = 0, []
    left = looks

    def counted() -> None:
        nonlocal taken
        taken += 1
        look()
        turn()

    def look() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    def report(doing: str, done: int, total: int) -> None:
        said.append(f"{doing} {done}/{total}")
        look()

    with pytest.raises(KeyboardInterrupt):
        watch(options, least, 0.0, counted, report)
    return taken, said


def test_only_finished_answers_of_the_served_model_count(server: AppServer, tmp_path: Path) -> None:
    path = answers(tmp_path / "c.db", 3)
    answers(path, 2, weights_fingerprint="other")
    answers(path, 2, status="failed")
    answers(path, 1, completion_tokens=None, logprobs=None)
    version = _version(server)
    found = Captured.of(path, version)
    assert (found.rows, found.completion_tokens, found.prompt_tokens) == (3, 15, 9)
    answers(path, 1)
    assert Captured.of(path, version) != found


def test_a_turn_is_taken_at_once_and_then_when_enough_is_new(server: AppServer, tmp_path: Path) -> None:
    options = LoopOptions(server.url, tmp_path, capture=answers(tmp_path / "c.db", 2))

    def finish() -> None:
        now = Captured.of(options.capture_path, _version(server))
        write_json(tmp_path / ROUND, {"captured": {"completion_tokens": now.completion_tokens}, "finished": True})

    assert turns(options, 10, 3, finish)[0] == 1
    taken, said = turns(options, 10, 3, finish)
    assert taken == 0
    assert said[0] == "waiting for new own tokens 0/10"
    answers(options.capture_path, 1)
    assert turns(options, 10, 2, finish)[1][0] == "waiting for new own tokens 5/10"
    answers(options.capture_path, 1)
    assert turns(options, 10, 2, finish)[0] == 1


def test_an_unfinished_turn_is_gone_on_with_whatever_is_new(server: AppServer, tmp_path: Path) -> None:
    options = LoopOptions(server.url, tmp_path, capture=answers(tmp_path / "c.db", 2))
    write_json(tmp_path / ROUND, {"captured": {"completion_tokens": 10}, "finished": False})
    assert turns(options, 1000, 1, lambda: None)[0] >= 1


def test_no_turn_is_taken_before_there_is_an_answer(server: AppServer, tmp_path: Path) -> None:
    path = answers(tmp_path / "c.db", 3, weights_fingerprint="other")
    options = LoopOptions(server.url, tmp_path, capture=path)
    taken, said = turns(options, 10, 3, lambda: None)
    assert (taken, said[0]) == (0, "waiting for new own tokens 0/10")
    answers(path, 1)
    assert turns(options, 10, 1, lambda: None)[0] > 0


def test_what_a_turn_refuses_is_told_and_waited_out(server: AppServer, tmp_path: Path) -> None:
    options = LoopOptions(server.url, tmp_path, capture=answers(tmp_path / "c.db", 2))

    def refuse() -> None:
        raise TrainingError("no room")

    taken, said = turns(options, 1, 4, refuse)
    assert taken > 1
    assert said[0] == "waiting: no room 0/1"


def test_nothing_captured_is_said_and_leaves_no_turn_begun(server: AppServer, tmp_path: Path) -> None:
    path = answers(tmp_path / "c.db", 1, weights_fingerprint="other")
    with pytest.raises(TrainingError, match="holds no finished answer of the model at"):
        loop(LoopOptions(server.url, tmp_path / "work", capture=path), Ledger(tmp_path / "ledger"))
    assert read_json(tmp_path / "work" / ROUND) is None


def _version(server: AppServer) -> Any:
    from capture.server import Server

    with Server(server.url) as asked:
        return asked.version()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "a b"}, "'a b' cannot be a drafter's name"),
        ({"name": "../a"}, "cannot be a drafter's name"),
        ({"name": "a" * 65}, "cannot be a drafter's name"),
        ({"name": "mtp"}, "a student cannot be named 'mtp'"),
        ({"preset": "huge"}, "no such student: .*huge"),
        ({"widths": {"d_inner": "wide"}}, "no such student: d_inner"),
        ({"widths": {"depth": 2}}, "no such student: depth"),
        ({"widths": {"hot_rows": 2}}, "no such student: hot_rows"),
        ({"widths": {"intermediate_size": 10**6}}, "no such student: .* is no cut of the model's block"),
        ({"steps": 0, "ce_steps": 0}, "at least one step"),
        ({"alpha": 2.0}, "alpha is 2.0, expected 0 to 1"),
    ],
    ids=str,
)
def test_what_distillation_would_refuse_is_refused_before_anything_is_made(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    """Nor is a server asked: there is none."""
    options = replace(LoopOptions("http://127.0.0.1:9", tmp_path / "work", capture=tmp_path / "c.db"), **asked)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for refusing in (
        lambda: loop(options, ledger),
        lambda: plan_loop(options, ledger),
        lambda: watch(options, 1, 0.0, lambda: pytest.fail("a turn was taken")),
    ):
        with pytest.raises(TrainingError, match=said):
            refusing()
    assert list(tmp_path.iterdir()) == []
