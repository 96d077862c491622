"""Figures of the whole file, kept by SQLite itself as rows come and go, so that no row has to be read for them.

Knows the columns they are made of; knows nothing of what the figures mean. Whatever changes rows need not know of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlite_utils import Database

# Rows and tokens by what a row is, and verify steps by their two bytes: drafted and accepted.
TABLES = (
    "CREATE TABLE totals (drafter TEXT, status TEXT, finish_reason TEXT, rows INTEGER, prompt_tokens INTEGER, "
    "completion_tokens INTEGER, PRIMARY KEY (drafter, status, finish_reason)) WITHOUT ROWID",
    "CREATE TABLE step_totals (drafter TEXT, step BLOB, count INTEGER, PRIMARY KEY (drafter, step)) WITHOUT ROWID",
)
COUNTED = ("drafter", "status", "finish_reason", "prompt_tokens", "completion_tokens", "steps")
# As many numbers from 0 as a row has steps. A trigger can neither recurse nor call what a program brings along.
_STEPS = "json_each('[' || replace(hex(zeroblob(length({0}.steps) / 2 - 1)), '00', '0,') || '0]')"


def create(db: Database) -> None:
    """Make the tables, count what rows there are, and have SQLite count from now on."""
    for table in TABLES:
        db.execute(table)
    db.execute(_add_rows("generations", "+", "FROM generations"))
    db.execute(_add_steps("generations", "+", "generations,"))
    new = [_add_rows("new", "+", ""), _add_steps("new", "+", "")]
    old = [_add_rows("old", "-", ""), _add_steps("old", "-", "")]
    for name, event, changes in (
        ("count_new", "INSERT", new),
        ("count_gone", "DELETE", old),
        ("count_changed", f"UPDATE OF {', '.join(COUNTED)}", [*old, *new]),
    ):
        db.execute(f"CREATE TRIGGER {name} AFTER {event} ON generations BEGIN {'; '.join(changes)}; END")


def _add_rows(row: str, sign: str, source: str) -> str:
    kept = [f"{sign}coalesce(length({row}.{name}) / 4, 0)" for name in ("prompt_tokens", "completion_tokens")]
    what = f"{row}.drafter, {row}.status, coalesce({row}.finish_reason, 'none'), {sign}1, {', '.join(kept)}"
    return (
        f"INSERT INTO totals SELECT {what} {source} WHERE true "
        "ON CONFLICT DO UPDATE SET rows = rows + excluded.rows, "
        "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
        "completion_tokens = completion_tokens + excluded.completion_tokens"
    )


def _add_steps(row: str, sign: str, source: str) -> str:
    return (
        f"INSERT INTO step_totals SELECT {row}.drafter, substr({row}.steps, 2 * key + 1, 2), {sign}count(*) "
        f"FROM {source} {_STEPS.format(row)} WHERE length({row}.steps) > 0 GROUP BY 1, 2 "
        "ON CONFLICT DO UPDATE SET count = count + excluded.count"
    )


def rows_by(db: Database, column: str) -> dict[str, int]:
    """Rows by drafter, status or finish reason."""
    return dict(db.execute(f"SELECT {column}, sum(rows) FROM totals GROUP BY 1 HAVING sum(rows) > 0"))


def tokens(db: Database) -> tuple[int, int]:
    """Tokens of all prompts, and of all completions, whose ids are kept."""
    query = "SELECT coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0) FROM totals"
    prompt, completion = db.execute(query).fetchone()
    return prompt, completion


def steps(db: Database) -> Iterator[tuple[str, int, int, int]]:
    """Drafter, tokens drafted, tokens accepted, and how many verify steps were so."""
    query = "SELECT drafter, step, count FROM step_totals WHERE count > 0 AND length(step) = 2"
    for drafter, step, count in db.execute(query):
        yield drafter, step[0], step[1], count


def differences(db: Database) -> Iterator[str]:
    """What the totals say that the rows, all of them read for it, do not. Both as of one moment in a transaction."""
    kept = "SELECT drafter, status, finish_reason, rows, prompt_tokens, completion_tokens FROM totals"
    sizes = [f"sum(coalesce(length({name}) / 4, 0))" for name in ("prompt_tokens", "completion_tokens")]
    held = f"drafter, status, coalesce(finish_reason, 'none'), count(*), {', '.join(sizes)} FROM generations"
    for key, told, found in _unequal(db, kept, f"SELECT {held} GROUP BY 1, 2, 3", 3):
        for name, one, other in zip(("rows", "prompt tokens", "completion tokens"), told, found, strict=True):
            if one != other:
                yield f"its totals tell {one} {name} of {' / '.join(key)}, and it holds {other}"
    kept = "SELECT drafter, step, count FROM step_totals"
    held = f"drafter, substr(steps, 2 * key + 1, 2), count(*) FROM generations, {_STEPS.format('generations')}"
    query = f"SELECT {held} WHERE length(steps) > 0 GROUP BY 1, 2"
    for (drafter, step), (one,), (other,) in _unequal(db, kept, query, 2):
        what = f"verify steps of {drafter} that drafted and accepted {', '.join(map(str, step))}"
        yield f"its totals tell {one} {what}, and it holds {other}"


def _unequal(db: Database, kept: str, held: str, keys: int) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """Each key, with its figures as kept and as held, where they are not equal; the figures of no row are all 0."""
    told, found = ({tuple(row[:keys]): tuple(row[keys:]) for row in db.execute(query)} for query in (kept, held))
    for key in sorted(told.keys() | found.keys()):
        zeros = (0,) * len(told.get(key) or found[key])
        if told.get(key, zeros) != found.get(key, zeros):
            yield key, told.get(key, zeros), found.get(key, zeros)
