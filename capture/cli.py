"""The `capture` command: what a capture file holds, and its export. Each command is a module of capture/commands.

Starts fast: imports nothing of the model or the server.
"""

from __future__ import annotations

import os
import sys

import typer

from capture.commands.export import export
from capture.commands.list import list_
from capture.commands.merge import merge_
from capture.commands.prune import prune_
from capture.commands.redact import redact
from capture.commands.replay import replay
from capture.commands.show import show
from capture.commands.stats import stats
from capture.commands.terminal import escape
from capture.commands.verify import verify_

app = typer.Typer(
    name="capture",
    help="Look at what the server captured, and export it for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(stats)
app.command("list")(list_)
app.command()(show)
app.command()(export)
app.command("prune")(prune_)
app.command()(redact)
app.command("merge")(merge_)
app.command("verify")(verify_)
app.command()(replay)


def main() -> None:
    """Entry point of the console script."""
    # Python has none for one that was closed, and those who print count on one.
    sys.stdout, sys.stderr = (
        stream or open(os.devnull, "w")  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="capture")
    except OSError as error:  # a path that can be none, or no room for what is printed
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"capture: {escape(f'{where}{error.strerror}')}", err=True)
        sys.stdout = None  # nor is there for what is left of it
        sys.exit(2)


if __name__ == "__main__":
    main()
