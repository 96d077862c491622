"""`training tiny`: the bundled model, from random weights to a checkpoint directory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training.commands.terminal import LedgerPath, Threads, progress

if TYPE_CHECKING:
    from training.pretraining.pretrain import Progress


class Stage(StrEnum):
    """Which part of the recipe to run."""

    a = "a"
    b = "b"
    all = "all"


def tiny(
    out: Annotated[Path, typer.Option(help="Run directory; running again continues it.")] = Path("runs/tiny"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for stage A; the schedule follows it.")] = 50.0,
    minutes_b: Annotated[float, typer.Option(min=0.1, help="Time for stage B.")] = 12.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Train exactly this many stage A steps instead.")] = None,
    stage: Annotated[Stage, typer.Option(help="a: trunk and MTP slot 0; b: MTP over 4 slots.")] = Stage.all,
    ledger: LedgerPath = None,
    threads: Threads = 1,
) -> None:
    """Train the bundled model from random weights and export it to OUT/model."""
    import torch

    from training.ledger import Ledger
    from training.pretraining import stage_b
    from training.pretraining.pretrain import Settings
    from training.pretraining.recipe import stage_a

    torch.set_num_threads(threads)
    asked = {"minutes": minutes, "minutes_b": minutes_b, "steps": steps, "stage": stage.value, "threads": threads}
    with progress() as bar, Ledger.beside(out, ledger).run("tiny", {"out": out, **asked}) as entry:
        task = bar.add_task("preparing", total=None)

        def report_a(progress: Progress) -> None:
            found = progress.losses
            entry.figures = {"trunk": found.trunk, "mtp": found.mtp, "answers": found.answers, "step": progress.step}
            text = f"stage A  trunk {found.trunk:.3f}  mtp {found.mtp:.3f}  answers {found.answers:.3f}"
            bar.update(task, completed=progress.step, total=progress.steps, description=text)

        def report_b(doing: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        if stage in (Stage.a, Stage.all):
            stage_a(out, minutes, steps, Settings(), report_a)
        if stage in (Stage.b, Stage.all):
            stage_b.stage_b(out, minutes_b, stage_b.Settings(), report_b)
