"""`training evaluate`: drafters side by side over the same documents, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, Model, progress, write_json

if TYPE_CHECKING:
    from training.evaluate.evaluation import Evaluation, Row
    from training.evaluate.figures import Figure


def evaluate(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[EXPORT]...",
            help="Directories that `capture export` or `training extract` made, or npz shards. Several are told of as "
            "classes, too.",
        ),
    ] = None,
    model: Model = "tiny",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="mtp, prediction, hot_vocab:FILE or a student's directory; again for each. Differences are to the "
            "first. Default: mtp.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=8, help="Draft tokens a step.")] = 4,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Also draft from every so many positions, whatever was accepted.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out/--all", help="The held-out documents alone, or those of training too.")
    ] = True,
    most: Annotated[int | None, typer.Option(min=1, help="At most so many documents.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A file of fixed text to draft along; again for each.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' draws and the sampled figures' noise.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the JSON to this file.")] = None,
    ledger: LedgerPath = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; as `serve` chooses unless given.", show_default=False)
    ] = None,
) -> None:
    """Compare drafters on answers the model gave: what each would have had accepted, exactly as the server counts it.

    Documents that repeat themselves, or that this build would not say again, are counted and set apart.
    """
    from training.evaluate.evaluation import EvaluateOptions
    from training.evaluate.evaluation import evaluate as run
    from training.ledger import Entry, Ledger

    options = EvaluateOptions(
        data=tuple(inputs or ()),
        text=tuple(text or ()),
        model=model,
        drafters=tuple(drafter or ("mtp",)),
        slots=slots,
        every=stride,
        held_out=held_out,
        most=most,
        seed=seed,
        threads=threads,
    )
    book = Ledger.beside(out, ledger) if out else Ledger(ledger) if ledger else None
    recorded = book.run("evaluate", options, [*options.data, *options.text]) if book else nullcontext(Entry())
    with progress() as bar, recorded as entry:
        task = bar.add_task("loading", total=None)
        found = run(
            options, lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)
        )
        entry.figures, entry.fingerprints = found.as_json(), dict(found.fingerprints)
        entry.seeds = {"evaluate": seed}
    if out is not None:
        write_json(out, found.as_json())
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)


def _print(found: Evaluation) -> None:
    from training.evaluate.overlap import GRAM

    console = Console()
    if found.rows:
        apart = ", ".join(f"{count} {reason}" for reason, count in found.set_apart.items()) or "none"
        known = f", {found.known} of them with {GRAM} tokens in a row of a training answer" if found.known else ""
        console.print(f"{found.documents} documents{known}, {found.tokens} generated tokens; set apart: {apart}")
        console.print(_walks(found.rows))
    for title, rows in (("anchors in these documents", found.rows), ("anchors in fixed texts", found.texts)):
        strides = [(row.name, "all", row.stride) for row in rows if row.stride]
        depths = [
            (row.name, depth, figures["stride"]) for row in rows for depth, figures in row.by.get("depth", {}).items()
        ]
        if strides:
            console.print(_strides(title, [*strides, *depths]))
            sampled = [one for one in strides if one[2].get("beta")]
            if sampled:
                console.print(_sampled(title, sampled))


def _walks(rows: Sequence[Row]) -> Table:
    from training.evaluate.evaluation import NEW

    table = Table("drafter", "weights read", "steps", "surv by slot", "chain", "τ", "τ over the first's", title="walks")
    for row in rows:
        over = _told(row.difference["tau"]) if row.difference else ""
        told = [(row.name, f"{row.parameters_read:,}", row.walk or {}, over)]
        if new := row.by.get("training", {}).get(NEW):
            told.append(("  answers new to training", "", new["walk"], ""))
        for name, read, walk, difference in told:
            table.add_row(
                name,
                read,
                str(walk["steps"]),
                _shares(walk["surv"]),
                _told(walk["chain"]),
                _told(walk["tau"]),
                difference,
            )
    return table


def _strides(title: str, found: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Table:
    table = Table(
        "drafter", "depth", "anchors", "hit by slot", "surv", "next 1, 2, … in its list", "chain", "τ", title=title
    )
    for name, depth, figures in found:
        table.add_row(
            name,
            depth,
            str(figures["anchors"]),
            _shares(figures["hit"]),
            _shares(figures["surv"]),
            _shares(figures["run"]) if "run" in figures else "1",
            _told(figures["chain"]),
            _told(figures["tau"]),
        )
    return table


def _sampled(title: str, found: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Table:
    table = Table("drafter", "T", "n", "Σ min(p, q) by slot", "coupled", "p(its list)", title=f"{title}, sampled")
    for name, _, figures in found:
        for temperature, betas in figures["beta"].items():
            coupled = _shares(figures["coupled"][temperature])
            mass = _shares(figures["mass"]) if "mass" in figures else "1"
            table.add_row(name, temperature, str(betas[0].n), _shares(betas), coupled, mass)
    return table


def _shares(figures: Sequence[Figure]) -> str:
    return " ".join("n/a" if figure.value is None else f"{figure.value:.3f}" for figure in figures)


def _told(figure: Figure) -> str:
    """With its interval."""
    return "n/a" if figure.value is None else f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"
