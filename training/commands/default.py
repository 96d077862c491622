"""Several commands under one name, the first of which needs no name of its own.

`training NAME …` runs the first, `training NAME FURTHER …` a further one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup


class _Group(TyperGroup):
    """What begins with no command's name is the first command's, a wish for help too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and args[0] in self.commands
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])


def first_of(commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """An app to add with `add_typer(…, name=NAME)`; its help, in the list of all commands, is the first command's."""
    app = typer.Typer(cls=_Group, rich_markup_mode=None, help=next(iter(commands.values())).__doc__)
    for name, command in commands.items():
        app.command(name)(command)
    return app
