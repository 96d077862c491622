"""`training`: a thin shell over the package's documented functions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)


class Stage(StrEnum):
    """Which part of the recipe to run."""

    a = "a"
    b = "b"
    all = "all"


@app.callback()
def root() -> None:
    """Train drafters, and the small model that comes with draftloop."""


@app.command()
def tiny(
    out: Annotated[Path, typer.Option(help="Run directory; running again continues what it holds.")] = Path(
        "runs/tiny"
    ),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for stage A; the schedule is made to fit.")] = 50.0,
    minutes_b: Annotated[float, typer.Option(min=0.1, help="Time for stage B.")] = 12.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Train exactly this many stage A steps instead.")] = None,
    stage: Annotated[
        Stage, typer.Option(help="a: trunk and MTP slot 0; b: MTP over 4 slots on own answers.")
    ] = Stage.all,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Train the bundled model from random weights and export it to OUT/model."""
    import torch

    from training.pretrain import Progress, Settings
    from training.tiny import stage_a

    torch.set_num_threads(threads)
    with _bar() as bar:
        if stage in (Stage.a, Stage.all):
            task = bar.add_task("stage A", total=None)

            def report(progress: Progress) -> None:
                found = progress.losses
                text = f"stage A  trunk {found.trunk:.3f}  mtp {found.mtp:.3f}  answers {found.answers:.3f}"
                bar.update(task, completed=progress.step, total=progress.steps, description=text)

            stage_a(out, minutes, steps, Settings(), report)


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def main() -> None:
    """Entry point: errors made on purpose are one line on stderr and exit code 1."""
    from backend.interface import BackendError
    from training.pretrain import TrainingError
    from training.sources import SourceError

    try:
        app()
    except (BackendError, SourceError, TrainingError) as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
