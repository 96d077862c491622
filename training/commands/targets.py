"""`training targets`: the native head's chain over an extraction, computed once and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from training.commands.extract import Device, MaxGB
from training.commands.terminal import LedgerPath, Model, progress


def targets(
    data: Annotated[Path, typer.Argument(metavar="FORCED", help="A folder that `training extract` made.")],
    hot_vocab: Annotated[Path, typer.Option(help="The ids whose probabilities are kept.")],
    model: Model = "tiny",
    slots: Annotated[int, typer.Option(min=1, max=8, help="Draft tokens a step.")] = 4,
    top: Annotated[int, typer.Option(min=1, help="Keep the likeliest ids of each distribution, so many.")] = 64,
    full: Annotated[bool, typer.Option("--full", help="Keep every id of the hot vocabulary instead.")] = False,
    window: Annotated[int, typer.Option(min=32, help="Tokens; longer documents are cut, with what is before.")] = 4096,
    max_gb: MaxGB = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default=False)] = None,
    ledger: LedgerPath = None,
) -> None:
    """Keep what the native MTP head's chain says of captured answers.

    Training computes it as it goes and needs none of this; it takes much room, and is for small sets and for a look.
    """
    from training.ledger import Ledger
    from training.shards import told
    from training.targets import TargetsOptions, make_targets

    options = TargetsOptions(
        data=data,
        model=model,
        hot_vocab=hot_vocab,
        slots=slots,
        top=None if full else top,
        window=window,
        max_gb=max_gb,
        device=device,
        threads=threads,
    )
    with progress() as bar, Ledger.beside(data, ledger).run("targets", options, [data, hot_vocab]) as entry:
        task = bar.add_task("loading", total=None)
        made = make_targets(
            options, lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)
        )
        manifest = json.loads(made.read_text(encoding="utf-8"))
        entry.figures, entry.fingerprints = {"counts": manifest["counts"]}, manifest["fingerprints"]
        entry.made(made)
    counts = manifest["counts"]
    Console().print(
        f"{counts['documents']} documents, {counts['rows']} base rows of {slots} slots; {told(counts['bytes'])}"
    )
    typer.echo(made)
