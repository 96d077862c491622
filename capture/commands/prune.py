"""`capture prune`: old rows go. Knows how limits are spelled; what goes is retention.py's to say."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, CapturePath, DryRun, escape, named, progress
from capture.filters import EVERY_ROW, Filters, moment
from capture.retention import Limits, prune, size
from capture.store import Store


@filtered
def prune_(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Rows older than this go: 30d, or an ISO time.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", metavar="N", min=0, help="The oldest go until so many rows are left.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="The oldest go until the rows take no more: 500MB, 10GB."),
    ] = None,
    dry_run: DryRun = False,
    capture: CapturePath = None,
    as_json: AsJson = False,
    chosen: Filters = EVERY_ROW,
) -> None:
    """Delete rows for good, oldest first; of the limits given, each is kept. Safe while a server writes.

    The options that choose rows say which may go; without a limit, all of those go.
    """
    with named(capture) as path:
        limits = Limits(
            before=None if older_than is None else moment(older_than),
            max_rows=max_rows,
            max_bytes=None if max_bytes is None else size(max_bytes),
        )
        with Store.open(path) as store:
            total = store.count(chosen)
        with progress() as shown:
            task = shown.add_task("pruning", total=total)
            done = prune(path, limits=limits, chosen=chosen, dry_run=dry_run, on_rows=lambda n: shown.advance(task, n))
    if as_json:
        typer.echo(json.dumps({**asdict(done), "backups": [str(copy) for copy in done.backups], "dry_run": dry_run}))
        return
    went = "would go" if dry_run else "deleted"
    about = "about " if dry_run else ""
    typer.echo(f"{done.rows} rows, {about}{done.bytes / 1e6:.1f} MB, {went}; {done.rows_left} left")
    for copy in done.backups:
        typer.echo(f"capture: {escape(str(copy))}, a copy made by an upgrade, is as it was", err=True)
