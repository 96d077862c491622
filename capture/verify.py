"""Whether a capture file is what it should be: SQLite's own check, every row decoded, and whether rows agree.

Knows what a row's fields have to agree on; knows no tokenizer: what the token ids say, a running server is asked.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from capture.filters import EVERY_ROW, Filters
from capture.records import COLUMNS, Generation, RecordError, from_row, to_row
from capture.server import RefusedError, Server
from capture.store import Store

DETOKENIZE = "/detokenize"
MARK = re.compile(r"<\|\w+\|>")  # a special token in words: texts leave those out


@dataclass(frozen=True)
class Problem:
    """Something that should not be; `id` is the row's, None for the whole file. Says nothing of what a row says."""

    id: str | None
    what: str


@dataclass(frozen=True)
class Verified:
    """What was looked at, what is wrong, and why tokens were not compared with text, with the number of rows."""

    rows: int
    decoded: int  # rows whose tokens a server has turned into their text again
    problems: tuple[Problem, ...]
    not_decoded: dict[str, int]


def verify(
    store: Store,
    *,
    chosen: Filters = EVERY_ROW,
    server: Server | None = None,
    on_row: Callable[[], object] = lambda: None,
) -> Verified:
    """Check the file and the chosen rows; with a server also whether it decodes the rows' token ids to their text.

    Raises ServerError where the server cannot be asked.
    """
    problems = [Problem(None, what) for what in store.integrity()]
    tokenizer = None if server is None else server.version().tokenizer
    rows = decoded = 0
    reasons: Counter[str] = Counter()
    tokenizers: defaultdict[str, set[str]] = defaultdict(set)
    try:
        for stored in store.stored(chosen):
            rows += 1
            on_row()
            try:
                row = from_row(stored)
                problems += [Problem(row.id, what) for what in _wrong(row, stored)]
            except RecordError as error:
                problems.append(Problem(str(stored["id"]), str(error)))
                continue
            tokenizers[row.weights_fingerprint].add(row.tokenizer_fingerprint)
            if server is None:
                continue
            if reason := _incomparable(row, tokenizer):
                reasons[reason] += 1
            elif what := _misread(row, server):
                problems.append(Problem(row.id, what))
            else:
                decoded += 1
        problems += [Problem(None, what) for what in store.miscounted()]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        problems.append(Problem(None, f"reading stopped after {rows} rows: {error}"))
    for weights, found in tokenizers.items():
        if len(found) > 1:
            problems.append(Problem(None, f"rows of weights {weights[:12]} name {len(found)} different tokenizers"))
    return Verified(rows, decoded, tuple(problems), dict(reasons))


def _wrong(row: Generation, stored: Mapping[str, Any]) -> Iterator[str]:
    """What a row says that cannot be so."""
    if to_row(row) != {name: stored[name] for name in COLUMNS}:
        yield "is not stored as the server stores it"
    unseen = (row.prompt_tokens, row.completion_tokens, row.logprobs, row.seed)
    if row.redacted and any(kept is not None for kept in unseen):
        yield "is redacted and yet keeps token ids, logprobs or a seed"
    if (row.status == "finished") != (row.finish_reason is not None):
        yield f"has status {row.status} and finish reason {row.finish_reason}"
    drafted, accepted = (sum(step[i] for step in row.steps) for i in (0, 1))
    for name, count in (
        ("draft_n", drafted),
        ("draft_n_accepted", accepted),
        ("predicted_n", None if row.completion_tokens is None else len(row.completion_tokens)),
    ):
        told = row.timings.get(name)
        if told is not None and count is not None and told != count:
            yield f"its timings tell {name} {told}, and it holds {count}"


def _incomparable(row: Generation, tokenizer: str | None) -> str | None:
    if row.completion_tokens is None:
        return "no token ids kept"
    if row.tokenizer_fingerprint != tokenizer:
        return "the server has another tokenizer"
    if not len(row.completion_tokens):
        return "nothing generated"
    return None


def _misread(row: Generation, server: Server) -> str | None:
    """What is wrong with the text that the row's token ids are."""
    tokens = [] if row.completion_tokens is None else row.completion_tokens
    try:
        text = str(server.post(DETOKENIZE, {"tokens": [int(token) for token in tokens]})["content"])
    except RefusedError as error:
        return f"its token ids are none of the server's: {error}"
    # Around reasoning and answer there are marks, and calls are told in other words than they were made in.
    parts = [row.reasoning, *(call["function"]["name"] for call in row.tool_calls)]
    if not row.tool_calls:
        parts.append(row.response_text)
    text, at = MARK.sub("", text), 0
    for part in (MARK.sub("", part).strip() for part in parts):
        if (at := text.find(part, at)) < 0:
            return "its token ids decode to another text than it holds"
        at += len(part)
    return None
