"""`training judge`: the bundled model's answers to held-out prompts, and how its own head foresees them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, Model, Threads, progress, write_json

if TYPE_CHECKING:
    from training.pretraining.judge import Judgement


def judge(
    model: Model = "tiny",
    prompts: Annotated[int, typer.Option(min=1, help="How many held-out conversations.")] = 48,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write figures and answers to this JSON file.")
    ] = None,
    ledger: LedgerPath = None,
    threads: Threads = 1,
) -> None:
    """Let a model answer held-out prompts, greedily and at 0.7; print acceptance per slot and repetition."""
    from backend.models.hub import resolve_model
    from training.ledger import Entry, Ledger
    from training.pretraining.judge import held_out_conversations
    from training.pretraining.judge import judge as run

    resolve_model(model)  # a wrong name should not wait for the corpus
    temperatures = (0.0, 0.7)
    book = Ledger.beside(out, ledger) if out else Ledger(ledger) if ledger else None
    recorded = book.run("judge", {"model": model, "prompts": prompts}) if book else nullcontext(Entry())
    with progress() as bar, recorded as entry:
        task = bar.add_task("answering", total=prompts * len(temperatures))
        found = run(
            model,
            held_out_conversations(prompts),
            temperatures,
            threads=threads,
            report=lambda done: bar.update(task, completed=done),
        )
        entry.figures = {"judgements": [one.as_json() for one in found]}
    Console().print(_table(found))
    if out is not None:
        write_json(out, [one.as_json() for one in found])


def _table(found: list[Judgement]) -> Table:
    table = Table("figure", *(f"T = {one.temperature:g}" for one in found))
    table.add_row("answers", *(str(one.answers) for one in found))
    table.add_row("tokens", *(str(one.tokens) for one in found))
    for slot in range(len(found[0].surv)):
        table.add_row(f"surv {slot}", *(f"{one.surv[slot]:.3f}" for one in found))
    table.add_row("acceptance length τ", *(f"{one.tau:.2f}" for one in found))
    for slot in range(len(found[0].surv)):
        table.add_row(f"surv {slot}, looping answers left out", *(f"{one.surv_steady[slot]:.3f}" for one in found))
    table.add_row("τ, looping answers left out", *(f"{one.tau_steady:.2f}" for one in found))
    table.add_row("distinct 4-grams", *(f"{one.distinct:.3f}" for one in found))
    table.add_row("looping answers", *(str(one.looping) for one in found))
    table.add_row("unfinished answers", *(str(one.unfinished) for one in found))
    return table
