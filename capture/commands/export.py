"""`capture export`: rows out for training. Knows the options of the formats, not the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from capture.commands.terminal import CapturePath, opened, progress
from capture.export import FINISHED_ONLY, SHARD_BYTES, default_folder, export_npz


def export(
    to: Annotated[Literal["npz"], typer.Option("--to", help="The format.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where; default ./draftloop-export-<UTC time>.")
    ] = None,
    include_unfinished: Annotated[
        bool, typer.Option("--include-unfinished", help="Also rows that failed or were cancelled.")
    ] = False,
    shard_bytes: Annotated[
        int, typer.Option("--shard-bytes", min=1, help="Largest size of a shard; one document may exceed it.")
    ] = SHARD_BYTES,
    capture: CapturePath = None,
) -> None:
    """Export rows as training shards, and print the folder. Exit code 1 where there is nothing to export."""
    folder = out or default_folder(Path())
    with opened(capture) as store, progress() as shown:
        total = sum(n for _, n in store.groups(["status"], where=None if include_unfinished else FINISHED_ONLY))
        task = shown.add_task("exporting", total=total)
        result = export_npz(
            store,
            folder,
            include_unfinished=include_unfinished,
            shard_bytes=shard_bytes,
            on_row=lambda: shown.advance(task),
        )
    typer.echo(result.folder)
