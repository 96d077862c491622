"""What a sampler costs beside the step it ends: rows of logits as wide as the 0.8B's, all ways in turn, in one run.

`python -m tests.benchmarks.sampling`. Asserts nothing and keeps nothing; absolute figures are this machine's, today.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from backend.interface import Grammar
from backend.text.grammar import GrammarCompiler
from tests import qwen_tokenizer

VOCAB, HEAD, HIDDEN = 248_077, 248_320, 1024
CARD = SamplingParams(temperature=0.7, top_p=0.95, top_k=20, seed=1)
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.1, "repetition_penalty": 1.05}
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "T 0.7, top_p 0.95, top_k 20": CARD,
    "the same with penalties, 2,000 tokens before": SamplingParams(0.7, 0.95, 20, seed=1, **PENALTIES),  # type: ignore[arg-type]
    "T 1": SamplingParams(seed=1),
    "T 1, top_p 0.95": SamplingParams(top_p=0.95, seed=1),
    "T 1, min_p 0.05": SamplingParams(min_p=0.05, seed=1),
}
GRAMMAR = "greedy inside a JSON string"
STEP = "the step"


def sampler(params: SamplingParams) -> Sampler:
    """With an answer of 2,000 tokens behind it."""
    made = Sampler(params, VOCAB)
    for token in torch.randint(VOCAB, (2000,), generator=torch.Generator().manual_seed(0)).tolist():
        made.accept(token)
    return made


def json_sampler() -> Sampler:
    """Where nearly all of the vocabulary may come next."""
    tokenizer = qwen_tokenizer.loaded()
    matcher = GrammarCompiler(tokenizer).matcher(Grammar("json_object"))
    made = Sampler(SamplingParams(temperature=0, stop_token_ids=tokenizer.eos_ids), VOCAB, (), matcher)
    for token in tokenizer.plain('{"text": "The'):
        made.accept(token)
    return made


def logits(rows: int, spread: float) -> torch.Tensor:
    """[1, rows, HEAD]: `spread` 2.5 puts the best some 11 above the mean, about where a model is undecided."""
    return torch.randn(1, rows, HEAD, generator=torch.Generator().manual_seed(1)) * spread


def choosing(way: Sampler, rows: torch.Tensor) -> Callable[[], object]:
    """A verify whose drafts are all right, so that no row is spared."""
    count = rows.shape[1]
    drafts = torch.empty(1, 0, dtype=torch.int64)
    for row in range(count - 1):
        drafts = SamplerBatch([way], [2000]).verify(rows[:, : row + 1], drafts)
    return lambda: SamplerBatch([way], [2000]).verify(rows, drafts)


def head_step() -> Callable[[], object]:
    """The 0.8B's own head for one token, in bfloat16: a part of the step, so that a whole one takes longer."""
    weight = torch.randn(HEAD, HIDDEN, dtype=torch.bfloat16)
    hidden = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    return lambda: F.linear(hidden, weight)


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds, a figure a round; the first two rounds are not measured."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in track(range(rounds + 2), description="choosing", transient=True):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn > 1:
                taken[name].append((time.perf_counter() - began) * 1e3)
    return taken


def main(
    step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a decode step. Unset: the head's, measured.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a verify, all accepted.")] = 1,
    spread: Annotated[float, typer.Option(min=0, help="Standard deviation of the logits.")] = 2.5,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 31,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    figures: Annotated[Path | None, typer.Option("--json", help="Also write every round's figures here.")] = None,
) -> None:
    """Measure each sampler. Figures: medians; the ratio is (step + sampler) / (step + greedy) of the same round."""
    torch.set_num_threads(threads)
    console = Console()
    block = logits(rows, spread)
    ways = {name: choosing(sampler(params), block) for name, params in WAYS.items()}
    ways[GRAMMAR] = choosing(json_sampler(), block)
    if step_ms is None:
        ways[STEP] = head_step()
    with torch.inference_mode():
        taken = measure(ways, rounds)
    steps = taken.get(STEP, [step_ms or 0.0] * rounds)
    source = (
        "given"
        if step_ms is not None
        else f"F.linear of one row by [{HEAD}, {HIDDEN}] in bfloat16; a whole step is longer"
    )
    table = Table(
        title=f"{rows} row(s) of {VOCAB:,} tokens", caption=f"step {statistics.median(steps):.1f} ms: {source}"
    )
    for column in ("", "ms", "× greedy, with the step"):
        table.add_column(column, justify="right")
    for name in [*WAYS, GRAMMAR]:
        ratios = [(s + t) / (s + g) for s, t, g in zip(steps, taken[name], taken["greedy"], strict=True)]
        table.add_row(name, f"{statistics.median(taken[name]):.2f}", f"{statistics.median(ratios):.3f}")
    console.print(table)
    if figures:
        written = {
            "rows": rows,
            "spread": spread,
            "threads": threads,
            "torch": torch.__version__,
            "ms": {**taken, STEP: steps},
        }
        figures.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
