"""The options that choose rows, the same for every command: the fields of `Filters`.

Knows how they are spelled; what they mean stands in capture/filters.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from capture.commands.terminal import escape
from capture.filters import FilterError, Filters, moment, tag
from capture.records import STATUSES

_AGO = "an ISO time (UTC where it names no zone), or so long ago: 7d, 12h, 30m."
# By field: the values' type, the option, what stands for a value, and the help.
_OPTIONS: dict[str, tuple[Any, str, str | None, str]] = {
    "since": (str | None, "--since", "TIME", f"Only rows captured since {_AGO}"),
    "until": (str | None, "--until", "TIME", f"Only rows captured before {_AGO}"),
    "models": (list[str] | None, "--model", "NAME", "Only rows of this model."),
    "drafters": (list[str] | None, "--drafter", "NAME", "Only rows of this drafter."),
    "finish": (list[str] | None, "--finish", "REASON", "Only rows with this finish reason."),
    "status": (list[str] | None, "--status", "|".join(STATUSES), "Only rows of this status."),
    "tags": (list[str] | None, "--tag", "KEY=VALUE", "Only rows with this in the metadata of their request."),
    "min_tokens": (int | None, "--min-tokens", "N", "Only rows with at least so many generated tokens."),
    "clients": (list[str] | None, "--client", "NAME", "Only rows of this client."),
}


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose rows; what they choose is its argument `chosen`.

    Of an option given several times, any value fits (of --tag: all of them have to).
    """
    by_name = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [p.replace(kind=by_name) for p in own if p.name != "chosen"]
    for name, (kind, flag, metavar, text) in _OPTIONS.items():
        option = typer.Option(flag, metavar=metavar, help=text, show_default=False)
        parameters.append(inspect.Parameter(name, by_name, default=None, annotation=Annotated[kind, option]))

    @wraps(command)
    def with_filters(**given: Any) -> None:
        wanted = {name: given.pop(name) for name in _OPTIONS}
        command(**given, chosen=_filters(**{name: value for name, value in wanted.items() if value or value == ""}))

    with_filters.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_filters.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_filters


def _filters(*, tags: Sequence[str] = (), **given: Any) -> Filters:
    try:
        given |= {name: moment(given[name]) for name in ("since", "until") if name in given}
        return Filters(**given, tags=tuple(tag(text) for text in tags))
    except FilterError as error:
        raise typer.BadParameter(escape(str(error))) from None
