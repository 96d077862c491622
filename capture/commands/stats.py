"""`capture stats`: the file in figures. Knows how they are laid out, not how they are counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, CapturePath, console, opened, plain
from capture.filters import EVERY_ROW, Filters
from capture.store import Acceptance


@filtered
def stats(capture: CapturePath = None, as_json: AsJson = False, chosen: Filters = EVERY_ROW) -> None:
    """Count rows and tokens, and show acceptance per draft slot."""
    with opened(capture) as store:
        found = store.stats(chosen)
    if as_json:
        figures = [_acceptance_figures(acceptance) for acceptance in found.acceptance]
        typer.echo(json.dumps({**asdict(found), "acceptance": figures}))
        return
    facts = Table.grid(padding=(0, 2))
    facts.add_row("file", plain(str(store.path)))
    facts.add_row("size", f"{found.file_bytes / 1e6:.1f} MB")
    facts.add_row("rows", str(found.rows))
    for name, counts in (
        ("status", found.by_status),
        ("finish reason", found.by_finish_reason),
        ("drafter", found.by_drafter),
    ):
        facts.add_row(name, plain(", ".join(f"{value} {count}" for value, count in counts.items()) or "-"))
    facts.add_row("prompt tokens", str(found.prompt_tokens))
    facts.add_row("completion tokens", str(found.completion_tokens))
    facts.add_row("first", plain(found.first or "-"))
    facts.add_row("last", plain(found.last or "-"))
    screen = console()
    screen.print(facts)
    if found.acceptance:
        screen.print(_acceptance_table(found.acceptance))


def _acceptance_figures(found: Acceptance) -> dict[str, Any]:
    return {
        **asdict(found),
        "surv": found.surv,
        "draft_acceptance": found.draft_acceptance,
        "acceptance_length": found.acceptance_length,
    }


def _acceptance_table(acceptance: tuple[Acceptance, ...]) -> Table:
    """One line a drafter: verify steps, acceptance length, and surv of each slot over its denominator."""
    table = Table(title="acceptance per draft slot (slots 0 … s accepted / slot s proposed)", title_justify="left")
    table.add_column("drafter")
    for column in ("verify steps", "acceptance length"):
        table.add_column(column, justify="right")
    for slot in range(max(len(found.proposed) for found in acceptance)):
        table.add_column(f"slot {slot}", justify="right")
    for found in acceptance:
        length = "-" if found.acceptance_length is None else f"{found.acceptance_length:.3f}"
        slots = zip(found.surv, found.accepted, found.proposed, strict=True)
        table.add_row(
            plain(found.drafter), str(found.steps), length, *(f"{surv:.3f} ({a}/{p})" for surv, a, p in slots)
        )
    return table
