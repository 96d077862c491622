"""What capture costs and how far it carries: served tokens with it and without, the writer, exports, stats.

`python -m tests.benchmarks.capture serve`, `writer`, `export` or `stats`; each has `--help`. `serve` takes turns
between a server that captures and one that does not. The others make their files from rows of one size, with as many
tokens as asked for. Ratios only mean something on a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from capture.filters import Filters
from capture.records import COLUMNS, Generation, new_id, to_row, utc_now
from capture.store import Store
from capture.writer import CaptureWriter, Synchronous
from tests.capture_rows import generation
from tests.checkpoints import tiny
from tests.servers import CHAT, running_process, serve_command

PROMPT, ANSWER = 400, 200  # tokens
TEMPLATES = 64  # rows that differ in all but their ids
OFF = "off"
FORMATS = ("npz", "jsonl", "parquet")
# Runs in a process of its own: the peak of its memory is the export's.
EXPORT = """
import json, re, sys, time
from pathlib import Path
from capture.export_jsonl import export_jsonl
from capture.export_npz import export_npz
from capture.export_parquet import export_parquet
from capture.store import Store
formats = {"npz": export_npz, "jsonl": export_jsonl, "parquet": export_parquet}
memory = lambda name: int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3
base = memory("VmRSS")
began = time.perf_counter()
with Store.open(Path(sys.argv[1])) as store:
    result = formats[sys.argv[3]](store, Path(sys.argv[2]), shard_bytes=int(sys.argv[4]))
seconds = time.perf_counter() - began
peak = memory("VmHWM") - base
size = sum(shard.bytes for shard in result.shards)
print(json.dumps({"seconds": seconds, "bytes": size, "documents": result.documents, "peak": peak}))
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)
console = Console()
Size = Annotated[int, typer.Option(min=1)]


def templates(prompt: int, answer: int) -> list[Generation]:
    """Rows of this many tokens, with text, steps and parameters to match."""
    random = np.random.default_rng(0)
    words = np.array(["list", "value", "return", "a", "the", "of", "(", ")", "tuple", "=", "def", "in"])

    def text(count: int) -> str:
        return " ".join(words[random.integers(0, len(words), count)])

    return [
        generation(
            prompt_tokens=random.integers(0, 200_000, prompt),
            completion_tokens=random.integers(0, 200_000, answer),
            logprobs=-random.random(answer),
            steps=[(3, int(accepted)) for accepted in random.integers(0, 4, max(1, answer * 2 // 5))],
            request={"messages": [{"role": "user", "content": text(prompt * 3 // 4)}]},
            response_text=text(answer * 3 // 4),
            parameters={f"parameter_{i}": i / 7 for i in range(12)},
            timings={f"timing_{i}": i / 7 for i in range(16)},
            drafter=("mtp", "none", "student")[i % 3],
        )
        for i in range(TEMPLATES)
    ]


def fresh(rows: list[Generation]) -> Iterator[Generation]:
    """The rows for ever, each time with ids of their own."""
    for row in itertools.cycle(rows):
        yield replace(row, id=new_id(), created_at=utc_now())


def build(path: Path, count: int, prompt: int, answer: int) -> float:
    """A file of so many rows, written in one go; its size in MB."""
    writer = CaptureWriter(path, synchronous="NORMAL")
    writer.start()
    assert writer.close(60)
    stored = [to_row(row) for row in templates(prompt, answer)]
    names = ", ".join(COLUMNS)
    with Store.open(path, readonly=False) as store:
        rows = (
            tuple({**row, "id": new_id(), "created_at": utc_now()}[name] for name in COLUMNS)
            for row in itertools.islice(itertools.cycle(stored), count)
        )
        chosen = track(rows, "building", count, console=console, transient=True)
        with store._db.conn as connection:
            connection.executemany(
                f"INSERT INTO generations ({names}) VALUES ({', '.join('?' * len(COLUMNS))})", chosen
            )
    return path.stat().st_size / 1e6


@app.command()
def serve(
    restarts: Annotated[int, typer.Option(min=1, help="Of every server: two of one kind differ too.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of each server.")] = 6,
    streams: Size = 8,
    requests: Annotated[int, typer.Option(min=1, help="Of one round.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 128,
    synchronous: Annotated[Literal["FULL", "NORMAL"], typer.Option(case_sensitive=False)] = "FULL",
) -> None:
    """Tokens a second, and CPU time a token, of a server that captures over those of one that does not.

    A second one that does not tells what a ratio of equals looks like here.
    """
    body = {
        "messages": [{"role": "user", "content": "What is a list?"}],
        "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
    }  # fmt: skip
    flags = ["--max-num-seqs", str(streams), "--draft-tokens", "3", "--capture-synchronous", synchronous]
    command = serve_command(tiny(), *flags)
    rates: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)  # CPU milliseconds per 1,000 tokens
    rows = 0
    for _ in track(range(restarts), "serving", console=console, transient=True):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            files = {OFF: Path("off"), "off again": Path("off"), "on": Path(folder) / "capture.db"}
            servers = {name: running.enter_context(running_process(command, file)) for name, file in files.items()}
            for server in servers.values():
                asyncio.run(_rate(server.url, body, streams, streams))
            for turn in range(rounds):
                for name in [*servers][turn % 3 :] + [*servers][: turn % 3]:
                    pid = servers[name].process.pid
                    began = _cpu_seconds(pid)
                    rates[name].append(asyncio.run(_rate(servers[name].url, body, requests, streams)))
                    costs[name].append(1e6 * (_cpu_seconds(pid) - began) / (requests * tokens))
            rows += len(servers["on"].rows())
    _table(
        f"{restarts} × {rounds} rounds of {requests} answers of {tokens} tokens, {streams} at a time, {synchronous}; "
        f"{rows} rows",
        ("capture", "tokens/s", "to off", "CPU ms per 1,000 tokens", "to off", "CPU µs a row"),
        [
            (
                name,
                f"{statistics.median(rates[name]):.0f}",
                _range(_to_off(rates, name, operator.truediv)),
                f"{statistics.median(costs[name]):.1f}",
                _range(_to_off(costs, name, operator.truediv)),
                f"{statistics.median(_to_off(costs, name, operator.sub)) * tokens:.0f}",
            )
            for name in servers
        ],
    )


def _to_off(figures: dict[str, list[float]], name: str, compare: Callable[[float, float], float]) -> list[float]:
    """Round by round, compared to that of the server that does not capture."""
    return [compare(one, off) for one, off in zip(figures[name], figures[OFF], strict=True)]


def _cpu_seconds(pid: int) -> float:
    """User and system time of all of a process' threads, to the nanosecond; Linux alone."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid makes it, which Python does not have


async def _rate(url: str, body: dict[str, Any], requests: int, streams: int) -> float:
    """Answered tokens a second."""
    waiting = iter(range(requests))
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            for _ in waiting:
                async with client.stream("POST", CHAT, json=body) as response:
                    response.raise_for_status()
                    async for _ in response.aiter_bytes():
                        pass

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(streams)))
    return requests * int(body["max_tokens"]) / (time.perf_counter() - began)


@app.command()
def writer(
    rows: Size = 5000, at_once: Annotated[int, typer.Option(min=1, help="Answers that end together.")] = 32,
    prompt: Size = PROMPT, answer: Size = ANSWER, folder: Path | None = None,
) -> None:  # fmt: skip
    """Rows a second that are committed: each waited for, so many together waited for, and all queued at once."""
    made = templates(prompt, answer)
    table: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for synchronous in ("FULL", "NORMAL"):
            for name, size in (("one at a time", 1), (f"{at_once} at a time", at_once), ("all at once", rows)):
                count = min(rows, 500 * size)
                path = Path(place) / f"{synchronous}-{size}.db"
                seconds = _write(path, list(itertools.islice(fresh(made), count)), size, synchronous)
                table.append((synchronous, name, f"{count / seconds:.0f}", f"{1e3 * seconds * size / count:.2f}"))
    title = f"rows of {prompt} + {answer} tokens"
    _table(title, ("synchronous", "committed", "rows/s", "ms a commit"), table)


def _write(path: Path, rows: list[Generation], size: int, synchronous: Synchronous) -> float:
    writer = CaptureWriter(path, synchronous=synchronous)
    writer.start()
    try:
        began = time.perf_counter()
        for start in range(0, len(rows), size):
            done: list[Future[None]] = [writer.submit(row) for row in rows[start : start + size]]
            for future in done:
                future.result(120)
        return time.perf_counter() - began
    finally:
        assert writer.close(120)


@app.command()
def export(
    rows: Size = 100_000, prompt: Size = PROMPT, answer: Size = ANSWER,
    shard_bytes: Annotated[int, typer.Option(min=1)] = 16_000_000, folder: Path | None = None,
) -> None:  # fmt: skip
    """MB a second of each format, and the peak of its memory beside that for a tenth of the rows."""
    table: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        sizes = {
            count: build(Path(place) / f"{count}.db", count, prompt, answer) for count in (max(1, rows // 10), rows)
        }
        for name in FORMATS:
            small, large = (_export(Path(place) / f"{count}.db", name, shard_bytes) for count in sizes)
            table.append(
                (
                    name,
                    f"{large['bytes'] / 1e6 / large['seconds']:.0f}",
                    f"{large['documents'] / large['seconds']:.0f}",
                    f"{large['bytes'] / 1e6:.0f}",
                    f"{small['peak']:.0f}",
                    f"{large['peak']:.0f}",
                    f"{large['peak'] / max(small['peak'], 1):.2f}",
                )
            )
    title = f"{rows} rows of {prompt} + {answer} tokens, {sizes[rows]:.0f} MB; shards of {shard_bytes / 1e6:.0f} MB"
    heads = ("format", "MB/s", "rows/s", "MB", "peak MB, a tenth", "peak MB, all", "ratio")
    _table(title, heads, table)


def _export(path: Path, name: str, shard_bytes: int) -> dict[str, float]:
    out = path.with_suffix(f".{name}")
    run = [sys.executable, "-c", EXPORT, str(path), str(out), name, str(shard_bytes)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    for file in out.iterdir():
        file.unlink()
    found: dict[str, float] = json.loads(done.stdout)
    return found


@app.command()
def stats(rows: Size = 1_000_000, prompt: Size = PROMPT, answer: Size = ANSWER, folder: Path | None = None) -> None:
    """Seconds of `Store.stats` over so many rows, and over a tenth; also of a choice of rows, which are read."""
    chosen = Filters(since="2000-01-01T00:00:00.000000Z")
    table: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for count in (max(1, rows // 10), rows):
            path = Path(place) / f"{count}.db"
            size = build(path, count, prompt, answer)
            with Store.open(path) as store:
                whole = _median(store.stats, 5)
                every = _median(lambda store=store: store.stats(chosen), 1)  # type: ignore[misc]
            table.append((str(count), f"{size:.0f}", f"{whole:.4f}", f"{every:.2f}"))
            path.unlink()
    _table(f"rows of {prompt} + {answer} tokens", ("rows", "MB", "stats, s", "stats --since, s"), table)


def _median(call: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} [{min(ratios):.3f} … {max(ratios):.3f}]"


def _table(title: str, heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    app()
