"""The engine's speed floor on a random checkpoint of the 0.8B's shape: ratios of what ran in turn in one process.

`python -m tests.benchmarks.engine`. K = 0 against transformers, blocks of rows against one row, streams against one,
running streams beside a long prompt, and what the prefix law's padding costs. Asserts nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from backend.engine.draft_length import FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.models.layers import products
from backend.models.weights import load_model
from backend.ops.linear import RowTile
from tests import factory
from tests.decoding import Job, Request, ScriptedDrafter, make_loop
from tests.factory import WIDTHS_08B

LAYERS = ("linear", "linear", "linear", "full")
PROMPT = tuple(range(10, 50))
GREEDY = SamplingParams(temperature=0)
STREAMS = 8


class Wrong(ScriptedDrafter):
    """Drafts of the asked length at no cost, so that a step's rows are all there is to it."""

    def __init__(self) -> None:
        super().__init__({}, 0.0, 1)

    def _guess(self, state: Any, count: int) -> list[int]:
        return [1] * count


def start(loop: Loop, drafts: int, streams: int, tokens: int) -> list[Job]:
    """So many streams of one prompt, all decoding."""
    loop.speculation.lengths = FixedDraftLength(drafts)
    wrong = Wrong() if drafts else None
    jobs = [Job(loop, Request(PROMPT, GREEDY, tokens), wrong) for _ in range(streams)]
    for job in jobs:
        loop.add(job.sequence)
    while not all(job.sequence.decoding for job in jobs):
        loop.turn()
    return jobs


def turns(loop: Loop, most: int) -> list[float]:
    """Seconds of each turn."""
    seconds: list[float] = []
    while loop.busy and len(seconds) < most:
        began = time.perf_counter()
        loop.turn()
        seconds.append(time.perf_counter() - began)
    return seconds


def stop(loop: Loop, jobs: list[Job]) -> None:
    for job in jobs:
        job.sequence.cancelled = True
    loop.finish()


def step_time(loop: Loop, drafts: int, streams: int, steps: int) -> float:
    """Median seconds of a verify step."""
    jobs = start(loop, drafts, streams, tokens=10 * steps)
    seconds = statistics.median(turns(loop, steps))
    stop(loop, jobs)
    return seconds


def transformers_step(model: Any, steps: int) -> float:
    """Seconds a token of `generate` with its cache."""
    times: list[float] = []

    class Clock:
        def put(self, value: object) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = torch.tensor([PROMPT])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 1, streamer=Clock())
    return statistics.median(np.diff(times[1:]))


@contextmanager
def unpadded(runner: Runner) -> Iterator[None]:
    """Every product with the rows it has, as an engine without the prefix law would."""
    tiles = [(product, product.tile) for product in products(runner.model)]
    for product, _ in tiles:
        product.tile = RowTile(1)
    yield
    for product, tile in tiles:
        product.tile = tile


def beside_a_prompt(loop: Loop, length: int) -> dict[str, float]:
    """Seconds of a step of four streams, of a prompt's chunks alone, and of the turns in which both ran."""
    jobs = start(loop, 0, 4, tokens=2 * length)
    undisturbed = statistics.median(turns(loop, 16))
    stop(loop, jobs)
    prompt = tuple(i % 1000 for i in range(length))

    def prefill() -> list[float]:
        job = Job(loop, Request(prompt, GREEDY, 1), None)
        loop.add(job.sequence)
        seconds: list[float] = []
        while not job.sequence.finish:
            seconds += turns(loop, 1)
        return seconds

    alone = prefill()
    jobs = start(loop, 0, 4, tokens=2 * length)
    disturbed = prefill()
    stop(loop, jobs)
    together = [undisturbed + chunk for chunk in alone]
    return {
        "undisturbed step": undisturbed,
        "chunk alone, median": statistics.median(alone),
        "disturbed p99": float(np.percentile(disturbed, 99)),
        "ratio p99": float(np.percentile([a / b for a, b in zip(disturbed, together, strict=True)], 99)),
        "ratio of p99s": float(np.percentile(disturbed, 99) / np.percentile(together, 99)),
    }


def main(
    layers: Annotated[int, typer.Option(min=4, help="Decoder layers, a multiple of 4.")] = 24,
    vocab: Annotated[int, typer.Option(min=1024, help="Rows of the head.")] = 248_320,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 7,
    steps: Annotated[int, typer.Option(min=4, help="Steps of a measurement.")] = 16,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the prompt beside running streams.")] = 8192,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    figures: Annotated[Path | None, typer.Option("--json", help="Also write all figures here.")] = None,
) -> None:
    """Measure. Figures: median over the rounds."""
    console = Console()
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    longest = prompt + 1024
    shape = replace(WIDTHS_08B, vocab=vocab, layers=LAYERS * (layers // 4), mtp=False, max_len=longest)
    with tempfile.TemporaryDirectory() as place:
        directory = factory.save(factory.build(shape), shape, Path(place) / "model", dtype=torch.bfloat16)
        runner = Runner(load_model(directory, torch.device("cpu"), torch.bfloat16, with_mtp=False).model)
        reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        reference.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        report = probe(runner)
        loop = make_loop(runner, 0, positions=longest, sequences=STREAMS)
        ways: dict[str, Callable[[], float]] = {
            "transformers": lambda: transformers_step(reference, steps),
            "1 stream, K = 0": lambda: step_time(loop, 0, 1, steps),
            **{f"1 stream, {n} rows": lambda n=n: step_time(loop, n - 1, 1, steps) for n in (2, 4, 8)},  # type: ignore[misc]
            f"{STREAMS} streams, K = 0": lambda: step_time(loop, 0, STREAMS, steps),
        }
        seconds: dict[str, list[float]] = {name: [] for name in [*ways, "1 stream, unpadded"]}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                value = way()
                if turn:
                    seconds[name].append(value)
            with unpadded(runner):
                value = step_time(loop, 0, 1, steps)
                if turn:
                    seconds["1 stream, unpadded"].append(value)
        beside = beside_a_prompt(loop, prompt)
    base = seconds["1 stream, K = 0"]
    table = Table(title=f"{layers} layers, {vocab} rows of head, bf16, {threads} threads, lawful {report.lawful}")
    for column in ("", "ms a step", "× K = 0 of 1 stream"):
        table.add_column(column, justify="right")
    for name, values in seconds.items():
        against = statistics.median(a / b for a, b in zip(values, base, strict=True))
        table.add_row(name, f"{1000 * statistics.median(values):.1f}", f"{against:.2f}")
    console.print(table)
    faster = statistics.median(a / b for a, b in zip(seconds["transformers"], base, strict=True))
    eight = statistics.median(STREAMS * b / a for a, b in zip(seconds[f"{STREAMS} streams, K = 0"], base, strict=True))
    console.print(f"K = 0 is {faster:.2f} × transformers; {STREAMS} streams give {eight:.2f} × one")
    for name, value in beside.items():
        console.print(f"{prompt} prompt tokens beside 4 streams, {name}: {value:.4f}")
    if figures:
        figures.write_text(json.dumps({"seconds": seconds, "beside": beside, "threads": threads}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
