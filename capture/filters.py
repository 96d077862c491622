"""Which rows of a capture file: one value that every command and function takes, as an SQL condition.

Knows the columns and how people write times; knows nothing of what is done with the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from capture.records import STATUSES, CaptureError, Status, storable, timestamp

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
DURATION = re.compile(rf"(\d+(?:\.\d+)?)([{''.join(UNITS)}])")
# Completion tokens: of the ids, and where a row keeps none, as the server counted them.
COMPLETION = "coalesce(length(completion_tokens) / 4, json_extract(timings, '$.predicted_n'), 0)"


class FilterError(CaptureError):
    """A filter that means nothing."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Rows that answer to all of these; of several values in one field, to any of them (to every tag).

    A tag is a key and a value of the request's `metadata`. Times are `created_at` values, as `moment` makes them.
    """

    since: str | None = None  # captured then or later
    until: str | None = None  # captured before then
    models: Sequence[str] = ()
    drafters: Sequence[str] = ()
    finish: Sequence[str] = ()
    status: Sequence[Status] = ()
    tags: Sequence[tuple[str, str]] = ()
    min_tokens: int = 0  # of the completion
    clients: Sequence[str] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.status) - set(STATUSES):
            raise FilterError(f"{min(unknown)!r} is no status: {', '.join(STATUSES)}")
        if self.min_tokens < 0:
            raise FilterError("no row has fewer than 0 tokens")

    def __bool__(self) -> bool:
        """Whether any row might be left out."""
        return self != Filters()

    def sql(self) -> tuple[str, list[Any]]:
        """A condition over the columns of `generations`, and its arguments."""
        conditions = list(self._conditions())
        where = " AND ".join(condition for condition, _ in conditions) or "true"
        given = (argument for _, arguments in conditions for argument in arguments)
        return where, [storable(argument) if isinstance(argument, str) else argument for argument in given]

    def _conditions(self) -> Iterator[tuple[str, Sequence[Any]]]:
        if self.since is not None:
            yield "created_at >= ?", [self.since]
        if self.until is not None:
            yield "created_at < ?", [self.until]
        for column, wanted in (
            ("model", self.models),
            ("drafter", self.drafters),
            ("finish_reason", self.finish),
            ("status", self.status),
            ("client", self.clients),
        ):
            if wanted:
                yield f"{column} IN ({', '.join('?' * len(wanted))})", wanted
        for tag in self.tags:
            yield (
                "EXISTS (SELECT 1 FROM json_each(request, '$.metadata') AS tag "
                "WHERE tag.key = ? AND CAST(tag.value AS TEXT) = ?)",
                tag,
            )
        if self.min_tokens:
            yield f"{COMPLETION} >= ?", [self.min_tokens]


EVERY_ROW = Filters()


def moment(text: str) -> str:
    """The `created_at` of an ISO time (UTC where it names no zone), or of so long ago: 90s, 30m, 12h, 7d, 2w.

    Raises FilterError.
    """
    text = text.strip()
    try:
        if DURATION.fullmatch(text):
            return timestamp(datetime.now(UTC) - duration(text))
        time = datetime.fromisoformat(text)
        return timestamp(time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC))
    except (ValueError, OverflowError, FilterError):
        raise FilterError(f"{text!r} is no time; one is like 2025-01-31T12:00, or 7d or 12h ago") from None


def duration(text: str) -> timedelta:
    """90s, 30m, 12h, 7d, 2w. Raises FilterError."""
    try:
        if found := DURATION.fullmatch(text.strip()):
            return timedelta(**{UNITS[found[2]]: float(found[1])})
    except OverflowError:
        pass  # longer than any file is old
    raise FilterError(f"{text!r} is no duration; one is like 12h, 7d or 2w")


def tag(text: str) -> tuple[str, str]:
    """KEY=VALUE. Raises FilterError."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise FilterError(f"{text!r} is no KEY=VALUE")
    return key, value
