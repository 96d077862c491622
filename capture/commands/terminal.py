"""What every command shares towards its user: options, errors as one line, and stored text made harmless.

Knows terminals; knows no command. Stored text reaches one only as escaped plain text.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from capture.export import NothingToExportError
from capture.records import CaptureError
from capture.store import Store, default_path, file_error

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
RESPONSES = ("chatcmpl-", "cmpl-", "resp_")  # what the ids of responses begin with, before a row's id
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


@contextmanager
def opened(path: Path | None) -> Iterator[Store]:
    """The store of the file to read, with every expected failure as `named` has it."""
    with named(path) as file, Store.open(file) as store:
        yield store


@contextmanager
def named(path: Path | None) -> Iterator[Path]:
    """The file that is meant, with every expected failure turned into one line on stderr and an exit code."""
    path = Path(os.path.expanduser(path or default_path()))
    try:
        if str(path) == "off":
            raise CaptureError("capture is off (DRAFTLOOP_CAPTURE=off): name a file with --capture")
        yield path
    except NothingToExportError as error:
        fail(str(error), 1)
    except CaptureError as error:
        fail(str(error), 2)
    except sqlite3.Error as error:
        fail(str(file_error(path, error)), 2)
    except OverflowError:
        fail("a number is larger than the file can hold", 2)


def row_id(given: str) -> str:
    """Of a row's id, its start, or the id of a response."""
    for prefix in RESPONSES:
        given = given.removeprefix(prefix)
    if not given:
        raise typer.BadParameter("give an id or the start of one", param_hint="ID")
    return given


def fail(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr."""
    typer.echo(f"capture: {escape(message)}", err=True)
    raise typer.Exit(code)


def console() -> Console:
    """Standard output, printing text as it stands; into a pipe or a file nothing is cut to a terminal's width."""
    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, emoji=False, width=width)


def progress() -> Progress:
    """A bar on stderr while it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def plain(text: str) -> Text:
    """Stored text on one line of a table."""
    return Text(escape(text))


def escape(text: str, keep: str = "") -> str:
    """Control, formatting and line-breaking characters as \\x1b or \\u202e; joiners of scripts and emoji stay."""

    def safe(character: str) -> bool:
        if character in keep or character in "\u200c\u200d":
            return True
        return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}

    return "".join(c if safe(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def length(tokens: Any) -> str:
    """The number of token ids, or a dash where none were kept."""
    return count(None if tokens is None else len(tokens))


def count(number: int | None) -> str:
    """A number, or a dash where it is not known."""
    return "-" if number is None else str(number)
