"""`--draft-tokens auto` against every fixed draft length, with drafts that are accepted at a given rate.

`python -m tests.benchmarks.auto`. The drafts are scripted (the answer is known beforehand, a share of the tokens made
wrong), but the checkpoint's own MTP head is computed and paid for. Asserts nothing about figures.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from backend.drafters.protocol import Choose, Drafter, Proposal
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from backend.engine.memory import Memory
from backend.engine.sampling import SamplingParams
from backend.interface import BackendError
from backend.loading import MOST_DRAFTS, Loaded, LocalOptions, load
from tests.decoding import Job, Request

RATES = (0.95, 0.6, 0.2, 0.0)  # acceptance of a draft, given those before it
FIXED = (0, 1, 2, 3, 4, 8)
AUTO, PLAIN, NONE = "auto", "K = 0", "no drafter"
PROMPTS = ("How do I count the words of a text in Python?", "Explain what os.path.join returns.")
GREEDY = SamplingParams(temperature=0)

Prompt = tuple[int, ...]


@dataclass
class Script:
    """A sequence: the real head's state, what is still to come of its answer."""

    head: Any
    ahead: list[int]


class Scripted:
    """Proposes the known answer with tokens wrong at a given rate, having run the real head for as many slots."""

    name, fingerprint = "scripted", "scripted"

    def __init__(self, head: RecursiveDrafter, answers: dict[Prompt, Prompt], rate: float, vocab: int) -> None:
        self._head, self._answers, self._rate, self._vocab = head, answers, rate, vocab
        self._random = random.Random(0)
        self.block = head.block

    def attach(self, memory: Memory) -> None:
        """The head is attached already."""

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> Script:
        return Script(self._head.new_state(prompt, pages), list(self._answers[tuple(prompt)]))

    def resume(self, state: Script, boundary: int, known: bool) -> None:
        self._head.resume(state.head, boundary, known)

    def prefill(self, state: Script, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        self._head.prefill(state.head, tokens, hidden, start, valid)

    def observe(self, state: Script, tokens: Sequence[int], hidden: Tensor) -> None:
        self._head.observe(state.head, tokens, hidden)
        del state.ahead[: len(tokens)]

    def propose(self, states: Sequence[Script], counts: Sequence[int], choose: Choose) -> Proposal:
        real = self._head.propose([state.head for state in states], counts, choose)
        drafts = [[self._draft(token) for token in state.ahead[: max(counts)]] for state in states]
        return Proposal(torch.tensor(drafts).to(real.tokens.device), counts)

    def _draft(self, token: int) -> int:
        return token if self._random.random() < self._rate else (token + 1) % self._vocab


def answer(loaded: Loaded, prompt: Prompt, tokens: int, drafter: Drafter | None, lengths: DraftLength) -> Job:
    """A sequence that has its first token."""
    loaded.loop.speculation.lengths = lengths
    job = Job(loaded.loop, Request(prompt, GREEDY, tokens), drafter)
    loaded.loop.add(job.sequence)
    while not job.sequence.decoding:
        loaded.loop.turn()
    return job


def seconds_per_token(loaded: Loaded, job: Job) -> float:
    """Of its verify steps, which give every token but the first."""
    began = time.perf_counter()
    loaded.loop.finish()
    return (time.perf_counter() - began) / (len(job.sequence.tokens) - 1)


@dataclass(frozen=True)
class Measured:
    """Of one rate: seconds a token of each way, a figure a round; mean draft length of the steps of auto."""

    seconds: dict[str, list[float]]
    mean_length: float

    def over(self, name: str, base: str) -> float:
        """Median over the rounds of the ratio of two ways' times, so that what slows a whole round down cancels."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True))

    @property
    def best(self) -> str:
        return min((name for name in self.seconds if name not in (AUTO, NONE)), key=lambda name: self.over(name, PLAIN))


@torch.inference_mode()
def measure(loaded: Loaded, answers: dict[Prompt, Prompt], rate: float, rounds: int, learning: int) -> Measured:
    """Every way over every prompt, once a round, in changing order; `learning`: steps auto has had before."""
    head = loaded.default
    assert isinstance(head, RecursiveDrafter)
    drafter = Scripted(head, answers, rate, loaded.vocab)
    ways: dict[str, DraftLength] = {f"K = {k}": FixedDraftLength(k) for k in FIXED if k <= MOST_DRAFTS}
    ways[AUTO] = AutoDraftLength(MOST_DRAFTS)
    ways[NONE] = FixedDraftLength(0)  # at K = 0 a drafter still keeps up with what is emitted
    drafters = {name: None if name == NONE else drafter for name in ways}
    tokens = len(next(iter(answers.values())))
    steps = 0
    while steps < learning:
        for prompt in answers:
            job = answer(loaded, prompt, tokens, drafter, ways[AUTO])
            loaded.loop.finish()
            steps += len(job.sequence.steps)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    drafted: list[int] = []
    for turn in range(rounds + 1):
        names = list(ways)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        taken = dict.fromkeys(names, 0.0)
        for prompt in answers:
            for name in names:
                job = answer(loaded, prompt, tokens, drafters[name], ways[name])
                taken[name] += seconds_per_token(loaded, job) / len(answers)
                if tuple(job.sequence.tokens) != answers[prompt]:
                    raise RuntimeError(f"{name} changed the answer")
                if name == AUTO:
                    drafted += [step.drafted for step in job.sequence.steps]
        for name in ways if turn else ():
            seconds[name].append(taken[name])
    return Measured(seconds, statistics.mean(drafted))


@torch.inference_mode()
def known_answers(loaded: Loaded, tokens: int) -> dict[Prompt, Prompt]:
    """The greedy answer to each prompt, of so many tokens whatever they are."""
    answers = {}
    for content in PROMPTS:
        asked = loaded.tokenizer.encode_chat([{"role": "user", "content": content}], {"enable_thinking": False})
        job = answer(loaded, asked.ids, tokens, None, FixedDraftLength(0))
        loaded.loop.finish()
        answers[asked.ids] = tuple(job.sequence.tokens)
    return answers


def table(measured: dict[float, Measured], title: str) -> Table:
    """Time a token of each way over that of K = 0, and of auto over the best."""
    made = Table(title=title, caption=f"time a token over that of {PLAIN}: medians of the rounds' ratios")
    made.add_column("acceptance", justify="right")
    names = list(next(iter(measured.values())).seconds)
    for name in (*names, "best", "auto / best", "mean K of auto"):
        made.add_column(name, justify="right")
    for rate, figures in measured.items():
        over = [f"{figures.over(name, PLAIN):.3f}" for name in names]
        best = figures.best
        made.add_row(f"{rate:.0%}", *over, best, f"{figures.over(AUTO, best):.3f}", f"{figures.mean_length:.1f}")
    return made


def main(
    model: Annotated[str, typer.Option(help="tiny, a checkpoint directory, or a Hugging Face id.")] = "tiny",
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 7,
    learning: Annotated[int, typer.Option(min=0, help="Verify steps auto has had before it is measured.")] = 400,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    figures: Annotated[Path | None, typer.Option("--json", help="Also write every round's figures here.")] = None,
) -> None:
    """Measure at each rate of acceptance."""
    console = Console()
    try:
        loaded = load(LocalOptions(model=model, device=device, threads=threads, prefix_cache=False, max_num_seqs=1))
    except BackendError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    with Progress(console=console, transient=True) as progress:
        answers = known_answers(loaded, tokens)
        measured = {
            rate: measure(loaded, answers, rate, rounds, learning)
            for rate in progress.track(RATES, description="rates")
        }
    console.print(table(measured, f"{model}, torch {torch.__version__}, {threads} thread(s), {rounds} rounds"))
    if figures:
        written = {
            "model": model,
            "threads": threads,
            "tokens": tokens,
            "learning": learning,
            "torch": torch.__version__,
            "rates": {
                str(rate): {
                    "seconds_per_token": found.seconds,
                    "best": found.best,
                    "auto_over_best": found.over(AUTO, found.best),
                    "auto_over_plain": found.over(AUTO, PLAIN),
                    "mean_length": found.mean_length,
                }
                for rate, found in measured.items()
            },
        }
        figures.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
