"""`training report`: what all runs came to, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    ledgers: Annotated[list[Path], typer.Argument(metavar="LEDGER", help="Ledgers, ledger.jsonl or whatever it is.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Draw runs as one HTML page that needs no network: acceptance, learning curves, coverage, speed, every run.

    Needs matplotlib, which comes with the extra `train`.
    """
    from training.report import report as run

    typer.echo(run(ledgers, out))
