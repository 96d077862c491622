"""Law L2 from outside: what a server says depends on no drafter, no draft length and no restart, down to the bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.answers import Answer, whole
from tests.checkpoints import Checkpoint, has_tiny, random_small, tiny, without_mtp
from tests.servers import ProcessServer, running_process, serve_command

PLAIN: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": 0}
TRUNCATED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.001}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("What is a list?", {"temperature": 0}),
    ("How do I open a file?", {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}),
    ("What is a list?", {**PLAIN, "seed": 1}),
    ("What does zip() do? " * 20, {**PLAIN, "seed": 2, "chat_template_kwargs": {"enable_thinking": True}}),
    ("What is a set?", {**TRUNCATED, "seed": 3}),
    ("What is a set?", {**PLAIN, "seed": 4, "stop": ["e", "\n"]}),
)
CHECKPOINTS = [random_small, *([tiny] if has_tiny else [])]


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Checkpoint:
    made: Checkpoint = request.param()
    return made


def ask_everything(folder: Path, checkpoint: Checkpoint, *flags: str) -> Mapping[str, Any]:
    """A fresh server's answers to everything in ASKED, its rows' bits, and what it says of itself."""
    with running_process(serve_command(checkpoint, *flags), folder / "capture.db") as server:
        answers = [
            whole(server.openai, content, **more, max_tokens=64, logprobs=True, top_logprobs=1)
            for content, more in ASKED
        ]
        return {
            "said": [answer.said for answer in answers],
            "bits": bits(server, answers),
            "timings": [answer.timings for answer in answers],
            "fingerprint": server.http.get("/version").json()["system_fingerprint"],
        }


def bits(server: ProcessServer, answers: list[Answer]) -> list[tuple[bytes, ...]]:
    rows = {row.id: row for row in server.rows()}
    found = [rows[answer.row_id] for answer in answers]
    return [(row.prompt_tokens.tobytes(), row.completion_tokens.tobytes(), row.logprobs.tobytes()) for row in found]


@pytest.fixture(scope="module")
def two_drafts(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What the server says by default."""
    return ask_everything(tmp_path_factory.mktemp("reference"), model)


def test_drafts_are_both_accepted_and_rejected(two_drafts: Mapping[str, Any]) -> None:
    drafted = sum(timings["draft_n"] for timings in two_drafts["timings"])
    accepted = sum(timings["draft_n_accepted"] for timings in two_drafts["timings"])
    assert 0.05 * drafted < accepted < 0.95 * drafted
    assert all(len(timings["draft_n_per_pos"]) <= 2 for timings in two_drafts["timings"])


@pytest.mark.parametrize(
    ("flags", "drafter", "slots"),
    [
        # What these two would show, the others do too, on the way to more.
        pytest.param("", "mtp", 2, id="another start", marks=pytest.mark.slow),
        pytest.param("--draft-tokens 0", "mtp", 0, id="no drafts", marks=pytest.mark.slow),
        pytest.param("--draft-tokens 5", "mtp", 5, id="five drafts"),
        pytest.param("--drafter none", "none", 0, id="no drafter"),
    ],
)
def test_a_server_started_otherwise_says_the_same(
    two_drafts: Mapping[str, Any], model: Checkpoint, tmp_path: Path, flags: str, drafter: str, slots: int
) -> None:
    other = ask_everything(tmp_path, model, *flags.split())
    assert other["said"] == two_drafts["said"]
    assert other["bits"] == two_drafts["bits"]
    assert other["fingerprint"] == two_drafts["fingerprint"]
    assert max(len(timings["draft_n_per_pos"]) for timings in other["timings"]) == slots
    assert {timings["drafter"] for timings in other["timings"]} == {drafter}


def test_a_trunk_shipped_without_its_head_says_the_same(
    two_drafts: Mapping[str, Any], model: Checkpoint, tmp_path: Path
) -> None:
    headless = ask_everything(tmp_path, without_mtp(model), "--drafter", "none")
    assert headless["bits"] == two_drafts["bits"]
    assert headless["fingerprint"] == two_drafts["fingerprint"]
