"""`training extract`: captured answers through the model again, their hidden states into shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from training.commands.terminal import LedgerPath, Model, progress

MaxGB = Annotated[
    float | None,
    typer.Option("--max-gb", min=0, help="Refuse to write more gigabytes (10⁹ bytes).", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")]
_NAMES = {
    "same_build": "this build",
    "other_build": "another build",
    "unknown_build": "one of several builds",
    "no_logprobs": "without logprobs",
}


def extract(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="EXPORT", help="Directories that `capture export` made, or npz shards.")
    ],
    model: Model = "tiny",
    out: Annotated[Path, typer.Option(help="The folder to write; running again continues it.")] = Path("forced"),
    hot_vocab: Annotated[
        Path | None, typer.Option(help="Also tell how likely its ids are together.", show_default=False)
    ] = None,
    max_gb: MaxGB = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")] = False,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto (bfloat16), bfloat16 or float32.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; as `serve` chooses them unless given.", show_default=False)
    ] = None,
    ledger: LedgerPath = None,
) -> None:
    """Force captured answers through the model and keep its hidden states, which drafters are trained on.

    What was captured under this very build must come out with the same logprobs, bit for bit; for other builds the
    difference is told.
    """
    from training.extract import ExtractOptions, plan, read_manifest
    from training.extract import extract as run
    from training.ledger import Ledger
    from training.shards import told

    options = ExtractOptions(
        inputs=tuple(inputs),
        model=model,
        out=out,
        hot_vocab=hot_vocab,
        max_gb=max_gb,
        device=device,
        dtype=dtype,
        threads=threads,
    )
    if dry_run:
        planned = plan(options)
        Console().print(
            f"{planned.documents} documents, {planned.tokens} tokens: "
            f"{told(planned.bytes)} at most, in {len(planned.shards)} shards"
        )
        return
    read = [*inputs, *([hot_vocab] if hot_vocab else [])]
    with progress() as bar, Ledger.beside(out, ledger).run("extract", options, read) as entry:
        task = bar.add_task("reading", total=None)
        run(options, lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total))
        manifest = read_manifest(out)
        entry.figures = {name: manifest[name] for name in ("counts", "gate")}
        entry.fingerprints = {**manifest["fingerprints"], "d2t": manifest["d2t_sha256"]}
        entry.made(out)
    counts = manifest["counts"]
    console = Console()
    console.print(
        f"{counts['documents']} documents ({counts['held_out_documents']} held out), {counts['tokens']} tokens, "
        f"{counts['answer_tokens']} of them generated; {told(counts['bytes'])}"
    )
    console.print(_gate(manifest["gate"]))
    typer.echo(out)


def _gate(gate: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("captured under", "documents", "tokens", "differing", "largest", "mean", "greedy alike")
    for why, name in _NAMES.items():
        found = gate[why]
        if found["documents"]:
            greedy = f"{found['greedy_agreeing']} of {found['greedy_tokens']}" if found["greedy_tokens"] else "n/a"
            apart = ("n/a", "n/a") if found["mean"] is None else (f"{found['largest']:.2e}", f"{found['mean']:.2e}")
            counts = (found["documents"], found["tokens"], found["differing"])
            table.add_row(name, *map(str, counts), *apart, greedy)
    return table
