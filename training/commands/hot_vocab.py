"""`training hot-vocab`: from exported shards to the ids that a drafter's head is cut to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import Model, progress

if TYPE_CHECKING:
    from training.hot_vocab import Built


def hot_vocab(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="EXPORT", help="Directories that `capture export` made, or npz shards.")
    ],
    size: Annotated[int, typer.Option(min=1, help="How many token ids; special tokens are always among them.")],
    model: Model = "tiny",
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("hot_vocab.safetensors"),
) -> None:
    """Choose the ids a drafter's head is cut to: the model's most frequent own tokens, as captured."""
    from backend.models.hub import resolve_model
    from backend.text.tokenizer import ChatTokenizer
    from training.data import find_shards
    from training.hot_vocab import build

    shards = find_shards(inputs)
    tokenizer = ChatTokenizer.load(resolve_model(model))
    with progress() as bar:
        task = bar.add_task("counting", total=len(shards))
        built = build(shards, tokenizer, size, lambda done: bar.update(task, completed=done))
    built.hot.save(out)
    Console().print(_table(built))
    typer.echo(out)


def _table(built: Built) -> Table:
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
