"""Captured requests asked again, to see what a server's drafters make of them: who drafted, how well, how long it took.

Knows rows and the bodies of the server's endpoints; knows nothing of drafters but their names.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from capture.export import split_of
from capture.filters import Filters
from capture.records import Generation
from capture.replay import CHAT, TEXT, endpoint, request_of
from capture.server import Server, ServerError, Version
from capture.store import Store

UNUSED = ("logprobs", "top_logprobs")  # what costs time and says nothing about drafts


@dataclass(frozen=True)
class Ask:
    """A request as it was captured, with all that was in effect: whoever drafts, its answer is the same."""

    id: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Served:
    """What became of one request. `steps`: its verify steps, those without a draft too; `accepted`: drafts accepted in
    them; `digest` is of the answer's token ids."""

    id: str
    drafter: str
    steps: int
    accepted: int
    tokens: int
    digest: str


@dataclass(frozen=True)
class Traffic:
    """Requests served one after another, so many at a time, and the seconds they took together."""

    served: tuple[Served, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(one.tokens for one in self.served) / self.seconds


def held_out_asks(store: Store, version: Version, limit: int) -> list[Ask]:
    """The newest held-out rows of this server's model as requests, at most `limit`, oldest first.

    Each question once, the last time it was asked: figures of several answers to one would not be several figures.
    """
    where = "status = 'finished' AND weights_fingerprint = ? AND tokenizer_fingerprint = ?"
    found: dict[str, Ask] = {}
    for row in store.iterate(where=where, arguments=[version.weights, version.tokenizer]):
        if not _askable(row, version) or split_of(row) != "held_out":
            continue
        path, body = request_of(row, version)
        body = {name: value for name, value in body.items() if name not in UNUSED}
        known = json.dumps({**body, "seed": None}, sort_keys=True)
        found.pop(known, None)
        found[known] = Ask(row.id, path, body)
    return list(found.values())[-limit:]


def drive(server: Server, asks: Sequence[Ask], concurrency: int, report: Callable[[int], None]) -> Traffic:
    """Ask for all, so many at a time. Raises as `Server.post` does: what was answered before is not to fail now."""
    begun = time.perf_counter()
    served: list[Served] = []
    with ThreadPoolExecutor(concurrency) as pool:
        running = [pool.submit(_ask, server, ask) for ask in asks]
        try:
            for one in running:
                served.append(one.result())
                report(len(served))
        finally:
            for waiting in running:
                waiting.cancel()
    return Traffic(tuple(served), time.perf_counter() - begun)


def captured_since(store: Store, moment: str, version: Version) -> list[Served]:
    """What the server's own clients were served since a `created_at`, as far as it was captured."""
    where, arguments = Filters(since=moment).sql()
    rows = store.iterate(
        where=f"({where}) AND status = 'finished' AND weights_fingerprint = ?", arguments=[*arguments, version.weights]
    )
    return [_of_row(row) for row in rows]


def _askable(row: Generation, version: Version) -> bool:
    if row.redacted or row.seed is None or row.prompt_tokens is None or row.completion_tokens is None:
        return False
    # Of several choices the first: the answer to the others would hold them all.
    return (
        len(row.completion_tokens) > 1
        and endpoint(row.request) in (CHAT, TEXT)
        and not row.parameters.get("choice", 0)
        and len(row.prompt_tokens) + len(row.completion_tokens) <= version.max_model_len
    )


def _ask(server: Server, ask: Ask) -> Served:
    told = server.post(ask.path, ask.body)
    try:
        times = told["timings"]
        ids = [int(token) for token in told["choices"][0]["token_ids"]]
        drafted, accepted = times["draft_n_per_pos"], int(times["draft_n_accepted"])
        return Served(
            id=ask.id,
            drafter=str(times["drafter"]),
            # Every step gives its accepted drafts and one token more, but a last one that ends with a draft.
            steps=max(int(drafted[0]) if drafted else 0, len(ids) - 1 - accepted),
            accepted=accepted,
            tokens=len(ids),
            digest=hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        )
    except (LookupError, TypeError, ValueError):
        raise ServerError(f"{server.url} does not tell what its drafters did: its answers have no timings") from None


def _of_row(row: Generation) -> Served:
    count = 0 if row.completion_tokens is None else len(row.completion_tokens)
    return Served(row.id, row.drafter, len(row.steps), sum(accepted for _, accepted in row.steps), count, "")
