"""`capture redact`: text taken out of rows that are stored already. Knows how patterns are given."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, CapturePath, DryRun, escape, named, progress
from capture.filters import EVERY_ROW, Filters
from capture.redact import redactor
from capture.redact_rows import redact_rows
from capture.store import Store


@filtered
def redact(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Regular expressions, or: email, key, card, phone, ip."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--redact-file", metavar="FILE", help="Further patterns, one a line.")
    ] = None,
    dry_run: DryRun = False,
    capture: CapturePath = None,
    as_json: AsJson = False,
    chosen: Filters = EVERY_ROW,
) -> None:
    """Take what the patterns match out of stored rows, for good; token ids and seed of such a row go with it.

    The file is written anew, its log emptied, and copies made by upgrades are removed. Exports stay as they are.
    """
    with named(capture) as path:
        made = redactor(patterns or (), file)
        if made is None:
            raise typer.BadParameter("give a pattern, or a file of them", param_hint="PATTERN")
        with Store.open(path) as store:
            total = store.count(chosen)
        with progress() as shown:
            task = shown.add_task("redacting", total=total)
            done = redact_rows(path, made, chosen=chosen, dry_run=dry_run, on_rows=lambda n: shown.advance(task, n))
    if as_json:
        typer.echo(json.dumps({**asdict(done), "backups": [str(copy) for copy in done.backups], "dry_run": dry_run}))
        return
    would_be = "would be " if dry_run else ""
    typer.echo(f"{done.matches} matches in {done.rows} rows {would_be}redacted")
    for copy in done.backups:
        typer.echo(f"{escape(str(copy))}, a copy made by an upgrade, {would_be}removed")
