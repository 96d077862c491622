"""The whole loop: captured answers in, a drafter out, and into the running server if it is faster than what runs there.

When a turn is taken, over which rows, and what one would take; what is done in it, `training.loop_stages` knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capture.server import Server, Version
from capture.store import Store
from training.errors import TrainingError
from training.ledger import ON_PURPOSE, Ledger
from training.loop_stages import LoopOptions, NotEnoughError, Report, Round, Stages
from training.stages import MARKER, locked, read_json, write_json

ROUND = "round.json"


@dataclass(frozen=True)
class Captured:
    """What a capture file holds of a model: finished rows that keep their tokens, and when the newest row came."""

    rows: int = 0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    newest: str = ""

    @classmethod
    def of(cls, path: Path, version: Version) -> Captured:
        where = "status = 'finished' AND completion_tokens IS NOT NULL AND weights_fingerprint = ?"
        columns = ["length(completion_tokens) / 4", "coalesce(length(prompt_tokens), 0) / 4"]
        with Store.open(path) as store, store.snapshot():
            lengths = store.groups(columns, where=where, arguments=[version.weights])
            newest = next((row.created_at for row in store.list(1)), "")
        return cls(
            rows=sum(count for _, count in lengths),
            completion_tokens=sum(count * completion for (completion, _), count in lengths),
            prompt_tokens=sum(count * prompt for (_, prompt), count in lengths),
            newest=newest,
        )


def loop(options: LoopOptions, ledger: Ledger, report: Report = lambda doing, done, total: None) -> Round:
    """One turn, from what is captured now; or, where one was killed before it ended, the rest of that one.

    Raises TrainingError where there are not yet answers enough, whatever a stage raises, and before anything is made
    what distillation would.
    """
    options.distillation_settled()
    with locked(options.workdir):
        version = server_version(options)
        begun = _begun(options, version)
        stages = Stages(options, ledger, version, report)
        try:
            found = stages.all(begun["captured"])
        except NotEnoughError:  # the next turn is to look at what is there then
            write_json(options.workdir / ROUND, {**begun, "finished": True})
            raise
        write_json(options.workdir / ROUND, {**begun, "finished": True})
        return found


def watch(
    options: LoopOptions,
    min_new_tokens: int,
    poll_seconds: float,
    turn: Callable[[], Any],
    report: Report = lambda doing, done, total: None,
) -> None:
    """`turn` now, and again whenever so many new own tokens were captured since the last one; until it is interrupted.

    What a turn, or the server, refuses is told to `report`, and waited out. Raises TrainingError for what distillation
    would refuse however long one waits.
    """
    options.distillation_settled()
    while True:
        try:
            done = read_json(options.workdir / ROUND) or {}
            now = Captured.of(options.capture_path, server_version(options)).completion_tokens
            new = now - int(done.get("captured", {}).get("completion_tokens", 0)) if done.get("finished") else now
            if (not done.get("finished") and (done or now)) or new >= min_new_tokens:
                turn()
            else:
                report("waiting for new own tokens", max(new, 0), min_new_tokens)
        except ON_PURPOSE as error:
            report(f"waiting: {error}", 0, 1)
        time.sleep(poll_seconds)


def server_version(options: LoopOptions) -> Version:
    with Server(options.server, options.api_key) as server:
        return server.version()


def _begun(options: LoopOptions, version: Version) -> dict[str, Any]:
    """The turn's data: an unfinished one's, if it has come as far as its export, else all there is now."""
    source = {"capture": str(options.capture_path.resolve()), "weights": version.weights}
    left = read_json(options.workdir / ROUND)
    if left and not left.get("finished") and left.get("source") == source and _exported(options, left["captured"]):
        return left
    captured = Captured.of(options.capture_path, version)
    if not captured.rows:
        raise TrainingError(f"{options.capture_path} holds no finished answer of the model at {options.server} yet")
    begun = {
        "source": source,
        "captured": asdict(captured),
        "finished": False,
    }
    write_json(options.workdir / ROUND, begun)
    return begun


def _exported(options: LoopOptions, captured: dict[str, Any]) -> bool:
    markers = (read_json(path) for path in options.workdir.glob(f"export-*/{MARKER}"))
    return any(told and told["inputs"]["captured"] == captured for told in markers)
