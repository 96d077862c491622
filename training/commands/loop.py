"""`training loop`: from captured answers to a faster server, in one command that can be run again and again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.commands.promote import (
    AdminKey,
    ApiKey,
    Canary,
    CaptureFile,
    Concurrency,
    MinGain,
    Pairs,
    Requests,
    ServerUrl,
    Wait,
)
from training.commands.terminal import LedgerPath, Model, progress, terminable
from training.commands.widths import Widths, widths_of

if TYPE_CHECKING:
    from training.loop_plan import LoopPlan
    from training.loop_stages import Round


def loop(
    server: ServerUrl,
    workdir: Annotated[
        Path, typer.Option(help="Where everything is made; the server's --drafter-dir has to hold it.")
    ] = Path("draftloop-work"),
    capture: CaptureFile = None,
    model: Model = "tiny",
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    hot_rows: Annotated[
        int | None, typer.Option(min=1, help="Ids the student drafts; 32768, or half of a small vocabulary.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="sv or sv-slim; by how many ids it drafts.")] = None,
    width: Widths = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Of distillation; by the model's size.")] = None,
    ce_steps: Annotated[int | None, typer.Option(min=0, help="Of reinforcement after it.")] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0, max=1, help="The trunk's share of the teacher; the rest is its own head's.")
    ] = None,
    tokens_per_step: Annotated[int | None, typer.Option(min=1, help="By the model's size.")] = None,
    name: Annotated[str, typer.Option(help="What the drafters are called, before their hash.")] = "student",
    max_gb: Annotated[float | None, typer.Option(min=0, help="Of hidden states on disk, at most.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=8, help="Draft tokens trained and judged.")] = 4,
    requests: Requests = 64,
    fewest: Annotated[int, typer.Option(min=1, help="Held-out documents below which nothing is trained.")] = 8,
    concurrency: Concurrency = 1,
    canary: Canary = 0.5,
    wait: Wait = 0.0,
    pairs: Pairs = 6,
    min_gain: MinGain = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32, as the server's.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, as the server's; by the model's size.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of training, intervals and noise.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what it would take, and do nothing.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again whenever there are new own tokens enough.")] = False,
    min_new_tokens: Annotated[int, typer.Option(min=1, help="So many, with --watch.")] = 100_000,
    poll: Annotated[float, typer.Option(min=0.1, help="Seconds between looks, with --watch.")] = 60.0,
    ledger: LedgerPath = None,
) -> None:
    """Train a drafter on what a server has captured, and make it that server's default if it serves faster.

    Export, hot vocabulary, extraction, distillation, evaluation, promotion. What is done is not done again while its
    inputs stay as they are; killed anywhere, it goes on from there. Exit code 1 where the drafter was not promoted.
    """
    from training.ledger import Ledger
    from training.loop import loop as run
    from training.loop import watch as keep_watching
    from training.loop_plan import plan_loop
    from training.loop_stages import LoopOptions

    options = LoopOptions(
        server=server,
        workdir=workdir,
        model=model,
        capture=capture,
        api_key=api_key,
        admin_key=admin_key,
        hot_rows=hot_rows,
        preset=preset,
        widths=widths_of(width),
        steps=steps,
        ce_steps=ce_steps,
        alpha=alpha,
        tokens_per_step=tokens_per_step,
        name=name,
        max_gb=max_gb,
        slots=slots,
        requests=requests,
        fewest_requests=fewest,
        concurrency=concurrency,
        canary=canary,
        wait=wait,
        pairs=pairs,
        min_gain=min_gain,
        device=device,
        dtype=dtype,
        threads=threads,
        seed=seed,
    )
    book = Ledger.beside(workdir / "ledger.jsonl", ledger)
    if dry_run:
        _print_plan(plan_loop(options, book))
        return
    with terminable(), progress() as bar:
        task = bar.add_task("looking", total=None)

        def report(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total)

        def turn() -> Round:
            with book.run("loop", options) as entry:
                found = run(options, book, report)
                entry.figures = found.as_json()
                if not found.promoted:
                    entry.negative(str(found.verdict["reason"]))
            bar.console.print(_told(found), markup=False, highlight=False, soft_wrap=True)
            return found

        if watch:
            keep_watching(options, min_new_tokens, poll, turn, report)
        found = turn()
    typer.echo(found.checkpoint)
    if not found.promoted:
        raise typer.Exit(1)


def _told(found: Round) -> str:
    done = ", ".join(stage.name for stage in found.stages if not stage.skipped) or "nothing: all was done before"
    what = "promoted" if found.promoted else "not promoted"
    return f"done: {done}\n{found.verdict['candidate']}: {what}: {found.verdict['reason']}"


def _print_plan(plan: LoopPlan) -> None:
    captured = plan.captured
    figures = Table("figure", "value")
    for name, value in (
        ("captured answers of this model", f"{captured.rows:,}"),
        ("tokens of them, of their prompts", f"{captured.completion_tokens:,}, {captured.prompt_tokens:,}"),
        ("held out, about", f"{plan.held_out:,}"),
        ("weights of the student", f"{plan.student_parameters:,}"),
        ("goes on with a turn that was not finished", "yes" if plan.continues else "no"),
    ):
        figures.add_row(name, value)
    stages = Table("stage", "disk", "time")
    for one in plan.stages:
        taken = "seconds" if one.seconds is None else _how(one.measured, one.seconds)
        stages.add_row(one.stage, f"{one.bytes / 1e6:,.1f} MB", taken)
    taken = _how(all(one.measured for one in plan.stages), plan.seconds)
    stages.add_row("all", f"{plan.bytes / 1e6:,.1f} of {plan.free_bytes / 1e6:,.0f} MB free", taken)
    console = Console()
    console.print(figures, stages)


def _how(measured: bool, seconds: float) -> str:
    return f"{'about' if measured else 'at least'} {_time(seconds)}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
