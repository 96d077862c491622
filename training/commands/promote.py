"""`training promote`: a trained drafter to a running server, kept there only if it serves faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, progress, terminable

if TYPE_CHECKING:
    from training.promote import Verdict

ServerUrl = Annotated[str, typer.Option("--server", metavar="URL", help="The running server, http://127.0.0.1:8000.")]
CaptureFile = Annotated[
    Path | None,
    typer.Option("--capture", help="The server's capture file; default as for `capture`.", show_default=False),
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="DRAFTLOOP_CLIENT_KEY", help="What the server asks of its clients.")
]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-key", envvar="DRAFTLOOP_OPERATOR_KEY", help="What it asks of its operator, if another."),
]
MinGain = Annotated[
    float, typer.Option("--min-gain", min=0.0, help="What the ratio of speeds must exceed with its whole interval.")
]

Requests = Annotated[int, typer.Option("--requests", min=1, help="Held-out captured requests to try it on, at most.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, max=256, help="Requests at a time.")]
Canary = Annotated[float, typer.Option("--canary", min=0.01, max=1.0, help="Share of requests it has while on trial.")]
Wait = Annotated[float, typer.Option("--wait", min=0.0, help="Seconds on trial with the server's own clients too.")]
Pairs = Annotated[int, typer.Option("--pairs", min=2, help="Blocks of all requests under each, in turn.")]


def promote(
    server: ServerUrl,
    drafter: Annotated[Path, typer.Option(help="The checkpoint's directory.", exists=True, file_okay=False)],
    server_path: Annotated[
        str | None, typer.Option(help="The same directory as the server sees it, where that is elsewhere.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the server is to call it.", show_default=False)] = None,
    capture: CaptureFile = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    requests: Requests = 64,
    fewest: Annotated[int, typer.Option(min=1, help="Fewer than so many decide nothing.")] = 8,
    concurrency: Concurrency = 1,
    canary: Canary = 0.5,
    wait: Wait = 0.0,
    pairs: Pairs = 6,
    min_gain: MinGain = 1.0,
    min_acceptance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Of its first slot, below which the server refuses it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' draws.")] = 0,
    ledger: LedgerPath = None,
) -> None:
    """Load a drafter into a running server, try it on captured requests, and make it the default if it is faster.

    Otherwise, or if this is interrupted, the server is left as it was. Exit code 1 where it was not promoted. Nothing
    that is asked here is captured.
    """
    from training.ledger import Ledger
    from training.promote import PromoteOptions
    from training.promote import promote as run

    options = PromoteOptions(
        server=server,
        drafter=drafter,
        server_path=server_path,
        name=name,
        capture=capture,
        api_key=api_key,
        admin_key=admin_key,
        requests=requests,
        fewest_requests=fewest,
        concurrency=concurrency,
        canary=canary,
        wait=wait,
        pairs=pairs,
        min_gain=min_gain,
        min_acceptance=min_acceptance,
        seed=seed,
    )
    book = Ledger.beside(drafter, ledger)
    with terminable(), progress() as bar, book.run("promote", options, [drafter]) as entry:
        task = bar.add_task("asking", total=None)
        verdict = run(
            options, lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)
        )
        entry.figures, entry.seeds = verdict.as_json(), {"promote": seed}
        if not verdict.promoted:
            entry.negative(verdict.reason)
    show(verdict)
    if not verdict.promoted:
        raise typer.Exit(1)


def show(verdict: Verdict) -> None:
    """The figures as tables, the decision as the last line."""
    console = Console()
    if verdict.buckets:
        table = Table("batch", "steps", "τ", "ms a step", "ratio", title=f"{verdict.candidate} / {verdict.incumbent}")
        for one in verdict.buckets:
            table.add_row(
                str(one.batch),
                f"{one.candidate_steps} / {one.incumbent_steps}",
                f"{one.candidate_tau:.3f} / {one.incumbent_tau:.3f}",
                f"{1000 * one.candidate_seconds:.3f} / {1000 * one.incumbent_seconds:.3f}",
                f"{one.ratio:.3f}",
            )
        console.print(table)
    if verdict.blocks:
        table = Table("pair", verdict.candidate, verdict.incumbent, "ratio", title="tokens/s")
        for i, (ours, theirs) in enumerate(verdict.blocks, start=1):
            table.add_row(str(i), f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}")
        console.print(table)
    what = "promoted" if verdict.promoted else "not promoted"
    typer.echo(f"{verdict.candidate}: {what}: {verdict.reason}")
