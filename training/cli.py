"""`training`: a thin shell over the package's documented functions.

Heavy imports wait inside the command that needs them, so that help and errors are quick.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

if TYPE_CHECKING:
    from training.hot_vocab import Built
    from training.judge import Judgement
    from training.pretrain import Progress

app = typer.Typer(
    name="training",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console(stderr=True)


class Stage(StrEnum):
    """Which part of the recipe to run."""

    a = "a"
    b = "b"
    all = "all"


Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]


@app.callback()
def root() -> None:
    """Train drafters, and the small model that comes with draftloop."""


@app.command()
def tiny(
    out: Annotated[Path, typer.Option(help="Run directory; running again continues it.")] = Path("runs/tiny"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for stage A; the schedule follows it.")] = 50.0,
    minutes_b: Annotated[float, typer.Option(min=0.1, help="Time for stage B.")] = 12.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Train exactly this many stage A steps instead.")] = None,
    stage: Annotated[Stage, typer.Option(help="a: trunk and MTP slot 0; b: MTP over 4 slots.")] = Stage.all,
    threads: Threads = 1,
) -> None:
    """Train the bundled model from random weights and export it to OUT/model."""
    import torch

    from training import stage_b
    from training.pretrain import Settings
    from training.tiny import stage_a

    torch.set_num_threads(threads)
    with _bar() as bar:
        task = bar.add_task("preparing", total=None)

        def report_a(progress: Progress) -> None:
            found = progress.losses
            text = f"stage A  trunk {found.trunk:.3f}  mtp {found.mtp:.3f}  answers {found.answers:.3f}"
            bar.update(task, completed=progress.step, total=progress.steps, description=text)

        def report_b(doing: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        if stage in (Stage.a, Stage.all):
            stage_a(out, minutes, steps, Settings(), report_a)
        if stage in (Stage.b, Stage.all):
            stage_b.stage_b(out, minutes_b, stage_b.Settings(), report_b)


@app.command()
def judge(
    model: Annotated[str, typer.Option(help="tiny, a checkpoint directory, or a Hub id.")] = "tiny",
    prompts: Annotated[int, typer.Option(min=1, help="How many held-out conversations.")] = 48,
    out: Annotated[Path | None, typer.Option(help="Also write figures and answers to this JSON file.")] = None,
    threads: Threads = 1,
) -> None:
    """Let a model answer held-out prompts, greedily and at 0.7; print acceptance per slot and repetition."""
    from backend.models.hub import resolve_model
    from training.judge import held_out_conversations
    from training.judge import judge as run

    resolve_model(model)  # a wrong name should not wait for the corpus
    temperatures = (0.0, 0.7)
    with _bar() as bar:
        task = bar.add_task("answering", total=prompts * len(temperatures))
        found = run(
            model,
            held_out_conversations(prompts),
            temperatures,
            threads=threads,
            report=lambda done: bar.update(task, completed=done),
        )
    Console().print(_judgement_table(found))
    if out is not None:
        out.write_text(json.dumps([one.as_json() for one in found], indent=2) + "\n", encoding="utf-8")


@app.command("hot-vocab")
def hot_vocab(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="EXPORT", help="Directories that `capture export` made, or npz shards.")
    ],
    size: Annotated[int, typer.Option(min=1, help="How many token ids; special tokens are always among them.")],
    model: Annotated[str, typer.Option(help="tiny, a checkpoint directory, or a Hub id: whose tokenizer.")] = "tiny",
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("hot_vocab.safetensors"),
) -> None:
    """Choose the ids a drafter's head is cut to: the model's most frequent own tokens, as captured."""
    from backend.models.hub import resolve_model
    from backend.text.tokenizer import ChatTokenizer
    from training.hot_vocab import build, find_shards

    shards = find_shards(inputs)
    tokenizer = ChatTokenizer.load(resolve_model(model))
    with _bar() as bar:
        task = bar.add_task("counting", total=len(shards))
        built = build(shards, tokenizer, size, lambda done: bar.update(task, completed=done))
    built.hot.save(out)
    Console().print(_hot_vocab_table(built))
    typer.echo(out)


def _hot_vocab_table(built: Built) -> Table:
    header = built.hot.header
    table = Table("figure", "value")
    for name, value in (
        ("documents counted", built.documents),
        ("documents in several shards, counted once", built.repeated),
        ("size", built.hot.size),
        ("distinct tokens seen", built.distinct),
        ("filled with unused ids", built.filled),
    ):
        table.add_row(name, str(value))
    for name, found in (("train", header.train), ("held-out", header.held_out)):
        share = "n/a" if found.share is None else f"{found.share:.4f}"
        table.add_row(f"coverage of {name} own tokens", f"{share} (n = {found.tokens})")
    return table


def _judgement_table(found: list[Judgement]) -> Table:
    table = Table("figure", *(f"T = {one.temperature:g}" for one in found))
    table.add_row("answers", *(str(one.answers) for one in found))
    table.add_row("tokens", *(str(one.tokens) for one in found))
    for slot in range(len(found[0].surv)):
        table.add_row(f"surv {slot}", *(f"{one.surv[slot]:.3f}" for one in found))
    table.add_row("acceptance length τ", *(f"{one.tau:.2f}" for one in found))
    for slot in range(len(found[0].surv)):
        table.add_row(f"surv {slot}, looping answers left out", *(f"{one.surv_steady[slot]:.3f}" for one in found))
    table.add_row("τ, looping answers left out", *(f"{one.tau_steady:.2f}" for one in found))
    table.add_row("distinct 4-grams", *(f"{one.distinct:.3f}" for one in found))
    table.add_row("looping answers", *(str(one.looping) for one in found))
    table.add_row("unfinished answers", *(str(one.unfinished) for one in found))
    return table


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def main() -> None:
    """Entry point: errors made on purpose are one line on stderr and exit code 2."""
    from backend.interface import BackendError
    from training.pretrain import TrainingError
    from training.sources import SourceError

    try:
        app()
    except (BackendError, SourceError, TrainingError) as error:
        console.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
