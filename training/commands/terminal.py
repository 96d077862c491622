"""What the commands share of the terminal: progress on stderr, figures on stdout, the options they all have."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

errors = Console(stderr=True)
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Model = Annotated[str, typer.Option(help="tiny, a checkpoint directory, or a Hub id.")]
LedgerPath = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        envvar="DRAFTLOOP_LEDGER",
        help="The file that every run is written to; default ledger.jsonl beside what is made.",
        show_default=False,
    ),
]


def write_json(path: Path, told: Any) -> None:
    """Raises TrainingError where it cannot be written."""
    from capture.export_folder import put_down
    from training.errors import TrainingError

    text = json.dumps(told, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_down(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM as what Ctrl-C is, so that what was begun is taken back or put down in order."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def progress() -> Progress:
    """A bar on stderr: description, done of total, time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors)
