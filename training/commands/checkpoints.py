"""`training evaluate checkpoints`: the distributions of several checkpoints beside their teacher's, on one set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, Model, Threads, progress

if TYPE_CHECKING:
    from training.evaluate.checkpoints import Provenance
    from training.evaluate.figures import Figure

_COLUMNS = {
    "teacher_kl": "KL on the list",
    "covered_mass": "mass in the list",
    "top1": "teacher's top 1",
    "top5": "in top 5",
    "gold_top1": "gold top 1",
}


def checkpoints(
    given: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT", help="Students' directories; also mtp and hot_vocab:FILE.")
    ],
    data: Annotated[Path, typer.Option(help="The folder that `training extract` made: one set for all of them.")],
    model: Model = "tiny",
    teacher: Annotated[
        Literal["trunk", "mtp"], typer.Option(help="Whose distributions: the trunk's, or its own head's, slot by slot.")
    ] = "trunk",
    slots: Annotated[int, typer.Option(min=1, max=8, help="Slots, each fed the document's tokens.")] = 4,
    window: Annotated[int, typer.Option(min=8, help="Tokens that a block sees at most.")] = 512,
    held_out: Annotated[
        bool, typer.Option("--held-out/--all", help="The held-out documents alone, or those of training too.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    ledger: LedgerPath = None,
    threads: Threads = 1,
) -> None:
    """Compare checkpoints with their teacher: divergence, agreement of first choices, and the document's own token.

    What training optimises. What serving gains from it is `training evaluate`'s to say.
    """
    from training.evaluate.checkpoints import CheckpointsOptions, compare_checkpoints
    from training.ledger import Ledger

    options = CheckpointsOptions(
        checkpoints=tuple(given),
        data=data,
        model=model,
        teacher=teacher,
        slots=slots,
        window=window,
        held_out=held_out,
        seed=seed,
        threads=threads,
    )
    inputs = [data, *(path for one in given if (path := Path(one.removeprefix("hot_vocab:"))).exists())]
    with progress() as bar, Ledger.beside(data, ledger).run("evaluate checkpoints", options, inputs) as entry:
        task = bar.add_task("loading", total=None)
        found = compare_checkpoints(
            options, lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)
        )
        entry.figures, entry.seeds = found.as_json(), {"evaluate": seed}
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)


def _print(found: Provenance) -> None:
    """Figures with their intervals, then how the later checkpoints differ from the first."""
    console = Console()
    console.print(
        f"{found.documents} documents, {found.tokens} generated tokens, {found.windows} windows; "
        f"teacher: {found.teacher}"
    )
    table = Table("checkpoint", "parameters read", "slot", "n", *_COLUMNS.values())
    for one in found.checkpoints:
        for j, slot in enumerate(one.slots):
            name, read = (one.checkpoint, f"{one.parameters_read:,}") if j == 0 else ("", "")
            table.add_row(name, read, str(j), str(slot.positions), *(_told(getattr(slot, key)) for key in _COLUMNS))
        table.add_section()
    console.print(table)
    if len(found.checkpoints) == 1:
        return
    over = Table("checkpoint", "slot", *_COLUMNS.values(), title=f"less {found.checkpoints[0].checkpoint}'s")
    for one in found.checkpoints:
        for j, difference in enumerate(one.differences or ()):
            over.add_row(one.checkpoint if j == 0 else "", str(j), *(_told(difference[key]) for key in _COLUMNS))
    console.print(over)


def _told(figure: Figure) -> str:
    if figure.value is None:
        return "n/a"
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"
