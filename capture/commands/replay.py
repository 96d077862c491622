"""`capture replay`: whether a running server says again what was captured. Knows how what was found is told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from capture.commands.choosing import filtered
from capture.commands.terminal import AsJson, CapturePath, escape, fail, opened, progress, row_id
from capture.filters import EVERY_ROW, Filters
from capture.records import Generation
from capture.replay import Replay, replay_all
from capture.selection import Sample
from capture.server import Server
from capture.store import Store, UnknownGenerationError


@filtered
def replay(
    server: Annotated[str, typer.Option("--server", metavar="URL", help="The running server, http://127.0.0.1:8000.")],
    generation_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="A row's id, its start, or a response's id.", show_default=False)
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", min=1, help="Instead of one row, N of those chosen.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Which sample: the same rows for the same seed.")] = 0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="CAPTURE_API_KEY", help="What the server asks of its clients.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=256, help="Rows replayed at a time.")] = 4,
    capture: CapturePath = None,
    as_json: AsJson = False,
    chosen: Filters = EVERY_ROW,
) -> None:
    """Ask a running server for captured answers again, and compare token ids and logprobs bit by bit.

    Exit code 1 where an answer differs, 2 where none could be compared. Nothing of this is captured.
    """
    if (generation_id is None) == (sample is None):
        raise typer.BadParameter("give an ID or --sample N")
    with opened(capture) as store, Server(server, api_key) as asked, progress() as shown:
        rows: Iterable[Generation]
        if generation_id is not None:
            rows = [store.get(row_id(generation_id))]
        else:
            where, arguments = chosen.sql()
            condition, more = store.sampled(Sample(rows=sample, seed=seed), where=where, arguments=arguments)
            chosen_ids = store.groups(["id"], where=f"({where}) AND {condition}", arguments=[*arguments, *more])
            rows = _rows(store, [name for (name,), _ in chosen_ids])
        task = shown.add_task("replaying", total=sample or 1)
        found: Counter[str] = Counter()
        for one in replay_all(rows, asked, asked.version(), concurrency):
            found[one.outcome] += 1
            shown.advance(task)
            if as_json:
                typer.echo(json.dumps(asdict(one)))
            elif one.outcome != "same":
                typer.echo(escape(_told(one)))
    if not as_json:
        typer.echo(", ".join(f"{found[outcome]} {outcome}" for outcome in ("same", "different", "not compared")))
    if found["different"]:
        raise typer.Exit(1)
    if not found["same"]:
        fail("no row could be compared", 2)


def _rows(store: Store, ids: Iterable[str]) -> Iterator[Generation]:
    """One after the other: a read that lasts as long as their answers would keep the server's log from ever ending."""
    for name in ids:
        try:
            yield store.get(name)
        except UnknownGenerationError:
            continue  # gone since, as rows do that grow old


def _told(one: Replay) -> str:
    return f"{one.id}: {one.outcome}: {one.difference or one.reason}"
