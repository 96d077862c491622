"""Decoding, start-up and capture as ratios: what is compared runs in turn, round by round, in one run on one machine.

`python -m tests.benchmarks.decode`. Asserts nothing and keeps nothing; absolute figures are this machine's, today.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from backend.engine.draft_length import FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence
from backend.engine.speculation import Speculation
from backend.interface import BackendError, Step
from backend.loading import Loaded, LocalOptions, load
from backend.models.hub import resolve_model
from backend.text.answer import AnswerText
from tests.checkpoints import Checkpoint, has_tiny, random_small, tiny
from tests.servers import CHAT, MODEL, ROOT, ProcessServer, clean_environment, running_process, serve_command

PROMPTS = (
    "What does json.dumps do?",
    "How do I count the words of a text in Python?",
    "Write a short function that reverses a list.",
    "Explain what os.path.join returns.",
    "What is the difference between a list and a tuple?",
    "Show the signature of subprocess.run and what it is for.",
)
SLOTS = range(5)  # draft lengths K
REFERENCE = "transformers"


@dataclass(frozen=True)
class Spread:
    """Median and range of one figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1])

    def __str__(self) -> str:
        digits = 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f}\n[dim]{self.least:.{digits}f} – {self.most:.{digits}f}[/]"


def ratio(rounds: list[float], base: list[float]) -> Spread:
    """Of figures taken in the same round, so that what slows a whole round down cancels."""
    return Spread.of(one / other for one, other in zip(rounds, base, strict=True))


@dataclass(frozen=True)
class Answer:
    """Tokens after an answer's first, the seconds they took, and the verify steps that gave them."""

    tokens: int
    seconds: float
    steps: tuple[Step, ...] = ()


def draftloop_answer(loaded: Loaded, draft_tokens: int, tokens: int, prompt: tuple[int, ...]) -> Answer:
    """Greedy, by the engine's own loop."""
    memory = loaded.loop.speculation.memory
    speculation = Speculation(loaded.runner, memory, FixedDraftLength(draft_tokens))
    loop = Loop(speculation, Scheduler(memory, 1, None))
    sequence = Sequence(
        id="benchmark",
        prompt=prompt,
        sampler=Sampler(SamplingParams(temperature=0), loaded.vocab, prompt),
        max_tokens=tokens,
        eos_ids=loaded.tokenizer.eos_ids,
        text=AnswerText(loaded.tokenizer.text_bytes, ()),
        alternatives=0,
        on_emission=lambda emission: None,
        drafter=loaded.default if draft_tokens else None,
    )
    loop.add(sequence)
    loop.finish()
    if sequence.first_token_at is None or sequence.finished_at is None or sequence.finish == "error":
        raise BackendError("the engine gave no answer; its log says why")
    return Answer(len(sequence.tokens) - 1, sequence.finished_at - sequence.first_token_at, tuple(sequence.steps))


class Clock:
    """A streamer for `generate`: when each token came. The prompt is put first, as one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def transformers_answer(model: Any, tokens: int, prompt: tuple[int, ...]) -> Answer:
    """Greedy, by `generate` with its cache."""
    ids, clock = torch.tensor([prompt], device=model.device), Clock()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=clock)
    _, first, *rest = clock.times
    return Answer(len(rest), (rest[-1] if rest else first) - first)


def transformers_model(directory: Path, loaded: Loaded) -> Any:
    """The same weights, in the dtype and on the device of ours."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    runner = loaded.runner
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=runner.dtype).to(runner.device).eval()
    eos = sorted(loaded.tokenizer.eos_ids)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=eos[0])
    return model


@dataclass(frozen=True)
class Decoding:
    """Tokens per second of each way to decode, a figure a round; acceptance length per draft length.

    `tokens`: those counted in one round at K = 0, over all prompts.
    """

    tokens: int
    rates: dict[str, list[float]]
    acceptance_lengths: dict[str, float]


@torch.inference_mode()
def measure_decoding(directory: Path, options: LocalOptions, tokens: int, rounds: int, progress: Progress) -> Decoding:
    """Every way over every prompt, once a round, the first round unmeasured. Raises BackendError."""
    loaded = load(options)
    ways = {f"K = {count}": partial(draftloop_answer, loaded, count, tokens) for count in SLOTS}
    ways[REFERENCE] = partial(transformers_answer, transformers_model(directory, loaded), tokens)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    lengths: dict[str, float] = {}
    for turn in progress.track(range(rounds + 1), description="decoding"):
        answers: dict[str, list[Answer]] = {name: [] for name in ways}
        for content in PROMPTS:
            prompt = loaded.tokenizer.encode_chat([{"role": "user", "content": content}], {"enable_thinking": False})
            for name, answer in ways.items():
                answers[name].append(answer(prompt.ids))
        for name, given in answers.items() if turn else ():
            rates[name].append(sum(a.tokens for a in given) / max(sum(a.seconds for a in given), 1e-9))
            steps = [step for a in given for step in a.steps]
            if steps:
                lengths[name] = 1 + sum(step.accepted for step in steps) / len(steps)
    return Decoding(sum(a.tokens for a in answers["K = 0"]), rates, lengths)


@dataclass(frozen=True)
class Start:
    """Seconds, a figure a round."""

    first_token: list[float]
    imports: list[float]


def measure_start(command: list[str], rounds: int, place: Path, progress: Progress) -> Start:
    """From starting the process to the first streamed text; the imports alone in a process of their own."""
    start = Start([], [])
    for turn in progress.track(range(rounds), description="starting"):
        began = time.perf_counter()
        with running_process(command, place / f"start-{turn}.db", seconds=600) as server:
            next(stream(server, PROMPTS[0], tokens=8))
            start.first_token.append(time.perf_counter() - began)
            server.stop()
        began = time.perf_counter()
        imports = [sys.executable, "-c", "import torch, transformers"]
        subprocess.run(imports, check=True, cwd=ROOT, env=clean_environment())
        start.imports.append(time.perf_counter() - began)
    return start


def measure_capture(command: list[str], tokens: int, rounds: int, place: Path, progress: Progress) -> dict[str, Any]:
    """Tokens per second of whole streamed answers, by a server that captures and one that does not, in turn."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with ExitStack() as stack:
        paths = {"on": place / "capture.db", "off": Path("off")}
        servers = {
            name: stack.enter_context(running_process(command, path, seconds=600)) for name, path in paths.items()
        }
        for turn in progress.track(range(rounds + 1), description="capturing"):
            taken = {name: [0, 0.0] for name in servers}
            for number, content in enumerate(PROMPTS):
                for name in sorted(servers, reverse=bool((turn + number) % 2)):
                    began = time.perf_counter()
                    *_, usage = stream(servers[name], content, tokens)
                    taken[name][0] += usage["completion_tokens"]
                    taken[name][1] += time.perf_counter() - began
            for name, (count, seconds) in taken.items() if turn else ():
                rates[name].append(count / seconds)
        for server in servers.values():
            server.stop()
    return rates


def stream(server: ProcessServer, content: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Each delta that carries text, then the usage, of one greedy answer."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.http.stream("POST", CHAT, json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"]:
                delta = chunk["choices"][0]["delta"]
                if delta.get("content") or delta.get("reasoning_content"):
                    yield delta
            elif chunk.get("usage"):
                yield chunk["usage"]


def decoding_table(decoding: Decoding) -> Table:
    rates = decoding.rates
    table = Table(
        title=f"Greedy decoding of {len(PROMPTS)} prompts",
        caption=f"tokens after each answer's first: {decoding.tokens} a round",
    )
    for column in ("", "tok/s", "× K = 0", f"× {REFERENCE}", "τ"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, rounds in rates.items():
        length = decoding.acceptance_lengths.get(name)
        table.add_row(
            name,
            str(Spread.of(rounds)),
            str(ratio(rounds, rates["K = 0"])),
            str(ratio(rounds, rates[REFERENCE])),
            f"{length:.2f}" if length else "",
        )
    return table


def pair_table(title: str, unit: str, rows: Mapping[str, list[float]]) -> Table:
    """Two rows, the second of which is what the first is measured against."""
    (name, rounds), (base, base_rounds) = rows.items()
    table = Table(title=title)
    for column in ("", unit, "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row(name, str(Spread.of(rounds)), str(ratio(rounds, base_rounds)))
    table.add_row(base, str(Spread.of(base_rounds)), "1")
    return table


def main(
    model: Annotated[
        str | None, typer.Option(help="tiny, a checkpoint directory, or a Hugging Face id. Unset: tiny, else random.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, of every process.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    figures: Annotated[Path | None, typer.Option("--json", help="Also write every round's figures here.")] = None,
) -> None:
    """Measure decoding, start-up and capture. Figures: median over the rounds, with least and most."""
    console = Console()
    try:
        if model is None:
            checkpoint = tiny() if has_tiny else random_small()
        else:
            checkpoint = Checkpoint(model, resolve_model(model), thinks=False)
        options = LocalOptions(model=str(checkpoint.directory), device=device, threads=threads)
        console.print(f"model {checkpoint.name}, torch {torch.__version__}, {threads} thread(s), device {device}")
        with Progress(console=console, transient=True) as progress, tempfile.TemporaryDirectory() as place:
            decoding = measure_decoding(checkpoint.directory, options, tokens, rounds, progress)
            command = serve_command(checkpoint, "--threads", str(threads), "--device", device)
            start = measure_start(command, rounds, Path(place), progress)
            capture = measure_capture(command, tokens, rounds, Path(place), progress)
    except BackendError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    console.print(decoding_table(decoding))
    starts = {"process start to first streamed token": start.first_token, "import torch, transformers": start.imports}
    console.print(pair_table("Start", "seconds", starts))
    captures = {f"capture {name}": rates for name, rates in capture.items()}
    console.print(pair_table("One client at a time over HTTP, K = 2", "tok/s", captures))
    if figures:
        written = {"model": checkpoint.name, "tokens": tokens, "threads": threads, "torch": torch.__version__}
        written |= {"decoding": asdict(decoding), "start": asdict(start), "capture": capture}
        figures.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
