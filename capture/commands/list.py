"""`capture list`: the newest rows, one a line. Knows how a summary is laid out."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, CapturePath, console, count, opened, plain
from capture.filters import EVERY_ROW, Filters


@filtered
def list_(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many rows.")] = 20,
    capture: CapturePath = None,
    as_json: AsJson = False,
    chosen: Filters = EVERY_ROW,
) -> None:
    """List the newest rows, newest first."""
    with opened(capture) as store:
        rows = list(store.list(limit, chosen))
    if as_json:
        for row in rows:
            typer.echo(json.dumps(asdict(row)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "created", "status", "finish", "drafter"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("prompt", "completion"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("answer", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(
            plain(row.id),
            plain(row.created_at[:19] + "Z"),
            plain(row.status),
            plain(row.finish_reason or "-"),
            plain(row.drafter),
            count(row.prompt_tokens),
            count(row.completion_tokens),
            plain(row.preview),
        )
    console().print(table)
