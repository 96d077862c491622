"""What the commands share of the terminal: progress on stderr, figures on stdout, the options they all have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def progress() -> Progress:
    """A bar on stderr: description, done of total, time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors)
