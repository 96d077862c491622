"""The `capture` command: what a capture file holds, and its export. A thin shell over store.py and export.py.

Starts fast: imports nothing of the model or the server. Stored text reaches the terminal only as escaped plain text.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from capture.export import FINISHED_ONLY, SHARD_BYTES, NothingToExportError, default_folder, export_npz
from capture.records import CaptureError, Generation, Status, to_json
from capture.store import Acceptance, Store, default_path, file_error

app = typer.Typer(
    name="capture",
    help="Look at what the server captured, and export it for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

CapturePath = Annotated[
    Path | None,
    typer.Option(
        "--capture",
        metavar="PATH",
        envvar="DRAFTLOOP_CAPTURE",
        help="The capture file. Without it: draftloop/capture.db under $XDG_DATA_HOME, or ~/.local/share.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@app.command()
def stats(capture: CapturePath = None, as_json: AsJson = False) -> None:
    """Count rows and tokens, and show acceptance per draft slot."""
    with _opened(capture) as store:
        found = store.stats()
    if as_json:
        figures = [_acceptance_figures(acceptance) for acceptance in found.acceptance]
        typer.echo(json.dumps({**asdict(found), "acceptance": figures}))
        return
    facts = Table.grid(padding=(0, 2))
    facts.add_row("file", _plain(str(store.path)))
    facts.add_row("size", f"{found.file_bytes / 1e6:.1f} MB")
    facts.add_row("rows", str(found.rows))
    for name, counts in (
        ("status", found.by_status),
        ("finish reason", found.by_finish_reason),
        ("drafter", found.by_drafter),
    ):
        facts.add_row(name, _plain(", ".join(f"{value} {count}" for value, count in counts.items()) or "-"))
    facts.add_row("prompt tokens", str(found.prompt_tokens))
    facts.add_row("completion tokens", str(found.completion_tokens))
    facts.add_row("first", found.first or "-")
    facts.add_row("last", found.last or "-")
    console = _console()
    console.print(facts)
    if found.acceptance:
        console.print(_acceptance_table(found.acceptance))


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many rows.")] = 20,
    status: Annotated[Status | None, typer.Option("--status", help="Only rows of this status.")] = None,
    capture: CapturePath = None,
    as_json: AsJson = False,
) -> None:
    """List the newest rows, newest first."""
    with _opened(capture) as store:
        rows = list(store.list(limit, status=status))
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
            _plain(row.id),
            row.created_at[:19] + "Z",
            row.status,
            _plain(row.finish_reason or "-"),
            _plain(row.drafter),
            _count(row.prompt_tokens),
            _count(row.completion_tokens),
            _plain(row.preview),
        )
    _console().print(table)


@app.command()
def show(
    generation_id: Annotated[str, typer.Argument(metavar="ID", help="A row's id, its start, or a response's id.")],
    capture: CapturePath = None,
    as_json: AsJson = False,
) -> None:
    """Print one row."""
    wanted = generation_id.removeprefix("chatcmpl-")
    if not wanted:
        raise typer.BadParameter("give an id or the start of one")
    with _opened(capture) as store:
        row = store.get(wanted)
    if as_json:
        typer.echo(json.dumps(to_json(row)))
    else:
        _show(row, _console())


@app.command()
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
    with _opened(capture) as store, _progress() as progress:
        total = sum(n for _, n in store.groups(["status"], where=None if include_unfinished else FINISHED_ONLY))
        task = progress.add_task("exporting", total=total)
        result = export_npz(
            store,
            folder,
            include_unfinished=include_unfinished,
            shard_bytes=shard_bytes,
            on_row=lambda: progress.advance(task),
        )
    typer.echo(result.folder)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app(prog_name="capture")


@contextmanager
def _opened(path: Path | None) -> Iterator[Store]:
    """The store, with every expected failure turned into one line on stderr and an exit code."""
    path = path or default_path()
    try:
        if str(path) == "off":
            raise CaptureError("capture is off (DRAFTLOOP_CAPTURE=off): name a file with --capture")
        with Store.open(path) as store:
            yield store
    except NothingToExportError as error:
        _fail(str(error), 1)
    except CaptureError as error:
        _fail(str(error), 2)
    except sqlite3.Error as error:
        _fail(str(file_error(path, error)), 2)


def _fail(message: str, code: int) -> None:
    typer.echo(f"capture: {_escape(message)}", err=True)
    raise typer.Exit(code)


def _console() -> Console:
    # Into a pipe or a file nothing is wrapped or cut to a terminal's width.
    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show(row: Generation, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    drafted, accepted = (sum(step[i] for step in row.steps) for i in (0, 1))
    for name, value in (
        ("id", row.id),
        ("created", row.created_at),
        ("status", row.status if row.finish_reason is None else f"{row.status} ({row.finish_reason})"),
        ("error", row.error),
        ("model", row.model),
        ("build", row.build),
        ("weights", row.weights_fingerprint),
        ("tokenizer", row.tokenizer_fingerprint),
        ("chat template", row.template_fingerprint),
        ("drafter", f"{row.drafter} {row.drafter_fingerprint}".strip()),
        ("client", row.client),
        ("seed", row.seed),
        ("parameters", json.dumps(row.parameters, ensure_ascii=False)),
        ("timings", json.dumps(row.timings, ensure_ascii=False)),
        ("tokens", f"{_length(row.prompt_tokens)} prompt, {_length(row.completion_tokens)} completion"),
        ("drafts", f"{accepted} of {drafted} accepted in {len(row.steps)} verify steps"),
    ):
        if value is not None:
            facts.add_row(name, _plain(str(value)))
    console.print(facts)
    sections = {
        "request": json.dumps(row.request, ensure_ascii=False, indent=2),
        "reasoning": row.reasoning,
        "answer": row.response_text,
        "tool calls": json.dumps(row.tool_calls, ensure_ascii=False, indent=2) if row.tool_calls else "",
    }
    for name, text in sections.items():
        if text:
            console.print()
            console.print(Text(name, style="bold"))
            console.print(Text(_escape(text, keep="\n\t")), soft_wrap=True)


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
            _plain(found.drafter), str(found.steps), length, *(f"{surv:.3f} ({a}/{p})" for surv, a, p in slots)
        )
    return table


def _plain(text: str) -> Text:
    return Text(_escape(text))


def _escape(text: str, keep: str = "") -> str:
    """Control, formatting and line-breaking characters as \\x1b or \\u202e; joiners of scripts and emoji stay."""

    def safe(character: str) -> bool:
        if character in keep or character in "\u200c\u200d":
            return True
        return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}

    return "".join(c if safe(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _length(tokens: Any) -> str:
    return _count(None if tokens is None else len(tokens))


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)


if __name__ == "__main__":
    main()
