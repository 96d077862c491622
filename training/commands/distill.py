"""`training distill`: from an extraction to a student's checkpoint, or to the native MTP block's own better weights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, Model, Threads, progress
from training.commands.widths import Widths, widths_of

if TYPE_CHECKING:
    from training.distill import Plan


class Goal(StrEnum):
    """What learns."""

    student = "student"
    mtp = "mtp"


class Reinforce(StrEnum):
    """The second stage's loss."""

    ce = "ce"
    acceptance = "acceptance"


class Start(StrEnum):
    """A student's first weights."""

    principal = "principal"
    slice = "slice"
    random = "random"


class Resume(StrEnum):
    """What to make of a run that OUT already holds."""

    auto = "auto"
    must = "must"
    never = "never"


def distill(
    data: Annotated[Path, typer.Argument(metavar="FORCED", help="The directory that `training extract` made.")],
    hot_vocab: Annotated[
        Path | None, typer.Option(help="The student's ids, as `training hot-vocab` chose them.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The checkpoint's directory; running again continues it.")] = Path(
        "student"
    ),
    model: Model = "tiny",
    target: Annotated[Goal, typer.Option(help="student, or mtp: the model's own MTP block.")] = Goal.student,
    preset: Annotated[str, typer.Option(help="sv (head at the model's width) or sv-slim (at the student's own).")] = (
        "sv"
    ),
    width: Widths = None,
    initialise: Annotated[Start, typer.Option(help="Where a student's first weights come from.")] = Start.principal,
    steps: Annotated[int | None, typer.Option(min=0, help="Of distillation. Default: by the model's size.")] = None,
    ce_steps: Annotated[int | None, typer.Option(min=0, help="Of reinforcement after it. Default: likewise.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(min=1, help="Of all processes. Default: likewise.")] = None,
    window: Annotated[int, typer.Option(min=16, help="Longer documents are cut into windows of so many tokens.")] = 512,
    slots: Annotated[int, typer.Option(min=1, max=8, help="Draft slots to train for.")] = 4,
    discount: Annotated[float, typer.Option(min=0, max=1, help="Weight of slot j: discount^j.")] = 0.8,
    alpha: Annotated[
        float, typer.Option(min=0, max=1, help="The trunk's share of the teacher; the native head's is the rest.")
    ] = 1.0,
    alpha_start: Annotated[
        float | None, typer.Option(min=0, max=1, help="At the first step, going straight to --alpha. Default: it.")
    ] = None,
    targets: Annotated[
        bool, typer.Option("--targets", help="The native head's share from what `training targets` made in FORCED.")
    ] = False,
    reinforce: Annotated[Reinforce, typer.Option(help="ce: the document's tokens; acceptance: Σ min(p, q).")] = (
        Reinforce.ce
    ),
    visited: Annotated[
        float, typer.Option(min=0, max=1, help="By how much slots behind a miss of its own weigh less.")
    ] = 0.0,
    noise: Annotated[float, typer.Option(min=0, help="On the hidden states, of their own size.")] = 0.0,
    lr: Annotated[float | None, typer.Option(min=0, help="AdamW's rate. Default: by the student's width.")] = None,
    ce_lr: Annotated[float | None, typer.Option(min=0, help="Of reinforcement. Default: where --lr ended.")] = None,
    head_lr: Annotated[float, typer.Option(min=0, help="Factor of the rate for the head's rows.")] = 0.3,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps. Default: 2 % of them, 500 at most.")] = None,
    ema: Annotated[float, typer.Option(min=0, max=1, help="Of the weights that are evaluated and kept.")] = 0.999,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between walks; 0: only at the end. Default: 12 in all.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps between states. Default: as walks.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data's order, of noise and of random weights.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    resume: Annotated[Resume, typer.Option(help="auto: continue what OUT holds; must; never.")] = Resume.auto,
    name: Annotated[str | None, typer.Option(help="Of the drafter. Default: OUT's own.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take.")] = False,
    ledger: LedgerPath = None,
    threads: Threads = 1,
) -> None:
    """Train a student to draft what the model says, and keep what drafts best along held-out answers.

    `torchrun -m training.cli distill …` runs it in several processes, with the same result as in one.
    """
    import os

    import torch

    from training.distill import DistillOptions, plan
    from training.distill import distill as run
    from training.learning import figures_of
    from training.ledger import Ledger

    torch.set_num_threads(threads)
    options = DistillOptions(
        data=data,
        hot_vocab=hot_vocab,
        out=out,
        model=model,
        target=target.value,
        preset=preset,
        widths=widths_of(width),
        initialise=initialise.value,
        steps=steps,
        ce_steps=ce_steps,
        tokens_per_step=tokens_per_step,
        window=window,
        slots=slots,
        discount=discount,
        alpha=alpha,
        alpha_start=alpha_start,
        targets=targets,
        reinforce=reinforce.value,
        visited=visited,
        noise=noise,
        lr=lr,
        ce_lr=ce_lr,
        head_lr=head_lr,
        warmup=warmup,
        ema=ema,
        evaluate_every=evaluate_every,
        save_every=save_every,
        seed=seed,
        device=device,
        resume=resume.value,
        name=name,
    )
    if dry_run:
        Console().print(_table(plan(options)))
        return
    if int(os.environ.get("RANK", "0")):
        run(options)
        return
    inputs = [data, *([] if hot_vocab is None else [hot_vocab]), *([data / "targets.json"] if targets else [])]
    with Ledger.beside(out, ledger).run("distill", options, inputs) as entry, progress() as bar:
        task = bar.add_task("loading", total=None)
        run(options, lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total))
        entry.figures, entry.fingerprints = figures_of(out)
        entry.seeds = {"distill": seed}
        entry.made(out)
    typer.echo(out)


def _table(found: Plan) -> Table:
    table = Table("figure", "value")
    for name, value in found.rows():
        table.add_row(name, value)
    return table
