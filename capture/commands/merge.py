"""`capture merge`: files of several replicas into one. Knows how what came of it is told."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, escape, named, progress
from capture.filters import EVERY_ROW, Filters
from capture.merge import merge


@filtered
def merge_(
    into: Annotated[Path, typer.Argument(metavar="INTO", help="The file that gets the rows; may be a new one.")],
    sources: Annotated[list[Path], typer.Argument(metavar="FROM", help="The files whose rows are copied.")],
    as_json: AsJson = False,
    chosen: Filters = EVERY_ROW,
) -> None:
    """Copy rows of other capture files into one, each id once. Exit code 1 where an id has other content there."""
    with named(into) as path, progress() as shown:
        task = shown.add_task("merging", total=None)
        results = merge(path, sources, chosen=chosen, on_rows=lambda n: shown.advance(task, n))
    for done in results:
        if as_json:
            typer.echo(json.dumps({**asdict(done), "source": str(done.source)}))
            continue
        source = escape(str(done.source))
        typer.echo(f"{source}: {done.copied} copied, {done.known} there already, {len(done.conflicts)} in conflict")
        for generation_id in done.conflicts:
            kept = f"{escape(generation_id)} is there with other content and stays as it is there"
            typer.echo(f"capture: {source}: {kept}", err=True)
    if any(done.conflicts for done in results):
        raise typer.Exit(1)
