"""`capture export`: rows out for training. Knows the options of the formats, not the formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from capture.commands.choosing import filtered
from capture.commands.terminal import CapturePath, opened, progress
from capture.export import SHARD_BYTES, Export, Wanted
from capture.export_folder import default_folder
from capture.export_jsonl import Style, export_jsonl
from capture.export_npz import export_npz
from capture.export_parquet import export_parquet
from capture.filters import EVERY_ROW, Filters
from capture.records import CaptureError
from capture.selection import Sample


@filtered
def export(
    to: Annotated[Literal["npz", "jsonl", "parquet"], typer.Option("--to", help="The format.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where; default ./draftloop-export-<UTC time>.")
    ] = None,
    include_unfinished: Annotated[
        bool, typer.Option("--include-unfinished", help="Also rows that failed or were cancelled.")
    ] = False,
    shard_bytes: Annotated[
        int, typer.Option("--shard-bytes", min=1, help="Largest size of a shard; one document may exceed it.")
    ] = SHARD_BYTES,
    style: Annotated[
        Style | None,
        typer.Option(
            "--style",
            help="Of jsonl: messages, as TRL reads them, or id and conversations, as SpecForge and speculators do.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="N|SHARE", help="Only N of the rows, or a share like 0.1 or 10%."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Which sample: the same rows for the same seed.")] = 0,
    drop_near_duplicates: Annotated[
        bool, typer.Option("--drop-near-duplicates", help="Not rows that say nearly what an earlier one says.")
    ] = False,
    drop_loops: Annotated[
        bool, typer.Option("--drop-loops", help="Not answers in which some 8 tokens in a row stand three times.")
    ] = False,
    capture: CapturePath = None,
    chosen: Filters = EVERY_ROW,
) -> None:
    """Export rows as training shards, and print the folder. Exit code 1 where there is nothing to export."""
    folder = out or default_folder(Path())
    if style is not None and to != "jsonl":
        raise typer.BadParameter("only jsonl has styles", param_hint="--style")
    with opened(capture) as store, progress() as shown:
        wanted = Wanted(
            rows=chosen,
            include_unfinished=include_unfinished,
            sample=None if sample is None else _sample(sample, seed),
            near_duplicates=not drop_near_duplicates,
            loops=not drop_loops,
        )
        task = shown.add_task("exporting", total=store.count(chosen))
        export_to: dict[str, Callable[..., Export]] = {
            "npz": export_npz,
            "jsonl": partial(export_jsonl, style=style or "messages"),
            "parquet": export_parquet,
        }
        result = export_to[to](
            store, folder, wanted=wanted, shard_bytes=shard_bytes, on_row=lambda: shown.advance(task)
        )
    if sample is not None or drop_near_duplicates or drop_loops:
        typer.echo(f"{result.documents} documents; not exported: {str(result.skipped) or 'no row'}", err=True)
    typer.echo(result.folder)


def _sample(text: str, seed: int) -> Sample:
    try:
        return Sample.parse(text, seed)
    except ValueError:
        raise CaptureError(f"--sample takes a number of rows or a share like 0.1 or 10%, not {text!r}") from None
