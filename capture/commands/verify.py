"""`capture verify`: whether a file is sound. Knows how what was found is told."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, CapturePath, escape, opened, progress
from capture.filters import EVERY_ROW, Filters
from capture.server import Server
from capture.verify import verify


@filtered
def verify_(
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="A running server: token ids are decoded there, and compared."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="CAPTURE_API_KEY", help="What the server asks of its clients.")
    ] = None,
    capture: CapturePath = None,
    as_json: AsJson = False,
    chosen: Filters = EVERY_ROW,
) -> None:
    """Check the file as SQLite does, decode every row, and compare what has to agree, also its totals with its rows.

    Totals that are wrong are counted anew in a file that this one is merged into.
    Exit code 1 where something is wrong, 2 where the file, or the server, cannot be read at all.
    """
    with (
        opened(capture) as store,
        nullcontext() if server is None else Server(server, api_key) as asked,
        progress() as shown,
    ):
        task = shown.add_task("verifying", total=None)  # to count them first might fail, and say less than this
        found = verify(store, chosen=chosen, server=asked, on_row=lambda: shown.advance(task))
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        for problem in found.problems:
            typer.echo(escape(f"{problem.id or 'file'}: {problem.what}"))
        typer.echo(f"{found.rows} rows, {len(found.problems)} problems")
        if server is not None:
            typer.echo(f"{found.decoded} decoded to their text")
        for reason, count in found.not_decoded.items():
            typer.echo(f"{count} not decoded: {reason}")
    if found.problems:
        raise typer.Exit(1)
