"""`training hot-vocab`: from exported shards to the ids that a drafter's head is cut to, and to a list that grew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, Model, progress

if TYPE_CHECKING:
    from backend.drafters.hot_vocab import Coverage, Header
    from training.hot_vocab import Built, Grown

Inputs = Annotated[
    list[Path], typer.Argument(metavar="EXPORT", help="Directories that `capture export` made, or npz shards.")
]
Out = Annotated[Path, typer.Option(help="The safetensors file to write.")]


def hot_vocab(
    inputs: Inputs,
    size: Annotated[int, typer.Option(min=1, help="How many token ids; special tokens are always among them.")],
    spare: Annotated[int, typer.Option(min=0, help="How many of them, the least used, growth may replace first.")] = 0,
    model: Model = "tiny",
    out: Out = Path("hot_vocab.safetensors"),
    ledger: LedgerPath = None,
) -> None:
    """Choose the ids a drafter's head is cut to: the model's most frequent own tokens, as captured.

    `training hot-vocab grow` later adds to such a list what it turned out to lack.
    """
    from backend.models.hub import resolve_model
    from backend.text.tokenizer import ChatTokenizer
    from training.data import find_shards
    from training.hot_vocab import build
    from training.ledger import Ledger

    asked = {"size": size, "spare": spare, "model": model, "out": out}
    with progress() as bar, Ledger.beside(out, ledger).run("hot-vocab", asked, inputs) as entry:
        shards = find_shards(inputs)
        tokenizer = ChatTokenizer.load(resolve_model(model))
        task = bar.add_task("counting", total=len(shards))
        built = build(shards, tokenizer, size, lambda done: bar.update(task, completed=done), spare=spare)
        built.hot.save(out)
        entry.figures, entry.fingerprints = built.as_json(), {"tokenizer": tokenizer.fingerprint}
        entry.made(out)
    _print(_of_built(built), built.hot.header)
    typer.echo(out)


def grow(
    parent: Annotated[Path, typer.Argument(metavar="HOT", help="The list to grow; it stays as it is.")],
    inputs: Inputs,
    add: Annotated[
        int | None, typer.Option(min=1, help="At most so many ids; as many as there are spare ones unless given.")
    ] = None,
    model: Model = "tiny",
    out: Annotated[Path | None, typer.Option(help="The file to write, HOT's name and a number unless given.")] = None,
    ledger: LedgerPath = None,
) -> None:
    """Add the ids that the model's own tokens hold most often and the list does not: in the place of spare ones first.

    The new file names the list it grew from. Drafters made for the old one keep to it.
    """
    from backend.drafters.hot_vocab import HotVocab
    from backend.models.hub import resolve_model
    from backend.text.tokenizer import ChatTokenizer
    from training.data import find_shards
    from training.hot_vocab import grow as run
    from training.ledger import Ledger

    asked = {"add": add, "model": model, "out": out}
    with progress() as bar, Ledger.beside(out or parent, ledger).run("hot-vocab", asked, [parent, *inputs]) as entry:
        shards = find_shards(inputs)
        tokenizer = ChatTokenizer.load(resolve_model(model))
        hot = HotVocab.load(parent, tokenizer.fingerprint, tokenizer.vocab_size)
        task = bar.add_task("counting", total=len(shards))
        grown = run(hot, shards, tokenizer, lambda done: bar.update(task, completed=done), most=add)
        generation = grown.hot.header.generation
        out = out or parent.with_name(f"{parent.stem.removesuffix(f'.{generation - 1}')}.{generation}{parent.suffix}")
        grown.hot.save(out)
        entry.figures, entry.fingerprints = grown.as_json(), {"tokenizer": tokenizer.fingerprint}
        entry.made(out)
    _print(_of_grown(grown), grown.hot.header)
    typer.echo(out)


def _of_built(built: Built) -> dict[str, str]:
    return {
        "documents counted": str(built.documents),
        "documents in several shards, counted once": str(built.repeated),
        "size": str(built.hot.size),
        "distinct tokens seen": str(built.distinct),
        "filled with unused ids": str(built.filled),
    }


def _of_grown(grown: Grown) -> dict[str, str]:
    return {
        "size": str(grown.hot.size),
        "added": f"{len(grown.added)} ids, {sum(grown.added.values())} own tokens",
        "spare ids that turned out to be used": str(len(grown.kept)),
        "grown from": (grown.hot.header.parent or "")[:12],
        "coverage of train own tokens before": _share(grown.before),
    }


def _print(figures: dict[str, str], header: Header) -> None:
    """Figures of the list, then how far it carries over the held-out documents."""
    table = Table("figure", "value")
    more = {"coverage of train own tokens": header.train, "coverage of held-out own tokens": header.held_out}
    for name, value in (figures | {name: _share(found) for name, found in more.items()}).items():
        table.add_row(name, value)
    if header.spare:
        table.add_row("spare ids left", str(len(header.spare)))
    console = Console()
    console.print(table)
    if not header.held_out.tokens:
        return
    slots = range(len(header.reach[0].runs))
    kinds = Table("held out", "n", "tokens", "listed", *(f"next {j + 1}" for j in slots), "cap", pad_edge=False)
    for reach in header.reach:
        shares = (reach.own.share, *(run.share for run in reach.runs), reach.chain_cap)
        cells = ("n/a" if share is None else f"{share:.4f}" for share in shares)
        kinds.add_row(reach.kind, str(reach.documents), str(reach.own.tokens), *cells)
    console.print(kinds)
    console.print(
        f"Kinds by {header.kinds}; shares of their own tokens. next j: the j tokens after an anchor are all listed. "
        "cap: the chain acceptance that no drafter with this list can pass."
    )


def _share(found: Coverage) -> str:
    return f"{'n/a' if found.share is None else f'{found.share:.4f}'} (n = {found.tokens})"
