"""`--width FIELD=VALUE`: the widths of a student where they are not its preset's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

Widths = Annotated[
    list[str] | None,
    typer.Option(
        "--width",
        metavar="FIELD=VALUE",
        help="A width in place of the preset's, as d_inner=1024; again for each.",
    ),
]


def widths_of(given: Sequence[str] | None) -> dict[str, Any]:
    """Fields of `StudentConfig`. Raises typer's BadParameter for what is no FIELD=VALUE."""
    found: dict[str, Any] = {}
    for one in given or ():
        name, _, value = one.partition("=")
        if not value:
            raise typer.BadParameter(f"{one!r} is not FIELD=VALUE", param_hint="--width")
        found[name] = int(value) if value.isdecimal() else value
    return found
