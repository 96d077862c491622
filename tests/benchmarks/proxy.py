"""What a proxy costs: ours, and litellm's where there is one, before the same fast upstream, in turns.

`python -m tests.benchmarks.proxy --litellm VENV/bin/litellm`, with `litellm[proxy]` installed in a virtual environment
of its own. Added time to first token: one request at a time, through each proxy and directly. Throughput: as many
streams at once as `--streams`, of an upstream that sends every token by itself and as fast as it can. Ours captures
every answer, as it does in service. Ratios only mean something on a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from serve.server import bind
from serve.server import url as url_of
from tests.servers import running_process

MODEL = "bench"
START_SECONDS = 180.0
LAST = b"0\r\n\r\n"

console = Console()


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"proxy benchmark: {message}\n")
    raise typer.Exit(2)


# The upstream


def _chunk(*choices: dict[str, Any], **more: Any) -> bytes:
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    data = b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def _choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
# Not twice the same in a row: litellm takes a hundred of those for a model that has lost its way.
TOKENS = [_chunk(_choice({"content": f" token{number}"})) for number in range(10)]
END = _chunk(_choice({}, "stop"))
DONE = b"e\r\ndata: [DONE]\n\n\r\n" + LAST
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}).encode()


async def _upstream(listener: socket.socket) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    known = b"/models" in head.split(b"\r\n")[0]
                    status, body = (b"200 OK", MODELS) if known else (b"404 Not Found", b"{}")
                    kind = b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
                    writer.write(b"HTTP/1.1 " + status + kind + body)
                    continue
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(length))
                tokens = asked.get("max_tokens") or 1
                writer.write(HEAD)
                for token in islice(cycle(TOKENS), tokens):
                    writer.write(token)
                    await writer.drain()
                    await asyncio.sleep(0)  # each by itself, every stream in turn
                writer.write(END)
                if (asked.get("stream_options") or {}).get("include_usage"):
                    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
                    writer.write(_chunk(usage=usage))
                writer.write(DONE)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    await server.serve_forever()


def _run_upstream(listener: socket.socket) -> None:
    asyncio.run(_upstream(listener))


@contextmanager
def upstream() -> Iterator[str]:
    """A server that answers every chat with `max_tokens` tokens, in a process of its own."""
    with bind("127.0.0.1", 0) as listener:
        process = multiprocessing.get_context("fork").Process(target=_run_upstream, args=(listener,), daemon=True)
        process.start()
        try:
            yield url_of(listener)
        finally:
            process.kill()
            process.join()


# The proxies


@contextmanager
def litellm(command: Path, url: str, directory: Path) -> Iterator[str]:
    """litellm's proxy before the upstream."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = directory / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n"
        f"      model: openai/{MODEL}\n      api_base: {url}/v1\n      api_key: none\n"
        # Neither proxy asks for a key here: both listen to this machine alone.
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"
    )
    output = (directory / "litellm.log").open("w")
    arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    try:
        process = subprocess.Popen([str(command), *arguments], stdout=output, stderr=output, cwd=directory)
    except OSError as error:
        fail(f"{command} cannot be run: {error.strerror}")
    try:
        base, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not _answers(f"{base}/health/liveliness"):
            if process.poll() is not None or time.monotonic() > deadline:
                fail(f"litellm does not start: {Path(output.name).read_text()[-1000:]}")
            time.sleep(0.5)
        yield base
    finally:
        process.terminate()
        process.wait()
        output.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


# The client


@dataclass
class Client:
    """One connection to one server, kept alive."""

    url: str
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    async def open(self) -> Client:
        where = urlsplit(self.url)
        self.reader, self.writer = await asyncio.open_connection(where.hostname, where.port)
        return self

    async def ask(self, tokens: int) -> float:
        """Seconds to the first token of a stream of so many."""
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
        began = time.perf_counter()
        self.writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        received = bytearray()
        first = None
        while not received.endswith(LAST):
            piece = await self.reader.read(65536)
            received += piece
            if first is None and b'" token' in received:
                first = time.perf_counter() - began
            if not piece:
                break
        said = received.count(b'" token')
        if first is None or said != tokens or b"[DONE]" not in received:
            fail(f"{self.url} answered {said} of {tokens} tokens: {bytes(received[-300:])!r}")
        return first


async def first_tokens(url: str, requests: int) -> list[float]:
    client = await Client(url).open()
    times = [await client.ask(2) for _ in range(requests)]
    client.writer.close()
    return times


async def throughput(url: str, streams: int, tokens: int) -> float:
    """Tokens a second of so many streams at once."""
    clients = [await Client(url).open() for _ in range(streams)]
    began = time.perf_counter()
    await asyncio.gather(*(client.ask(tokens) for client in clients))
    seconds = time.perf_counter() - began
    for client in clients:
        client.writer.close()
    return streams * tokens / seconds


@dataclass
class Figures:
    """Of one way to the upstream, over all rounds."""

    first: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def report(self, direct: Figures) -> dict[str, float]:
        p50, p99 = (float(np.percentile(self.first, p)) for p in (50, 99))
        d50, d99 = (float(np.percentile(direct.first, p)) for p in (50, 99))
        return {
            "ttft_p50_ms": 1e3 * p50,
            "ttft_p99_ms": 1e3 * p99,
            "added_p50_ms": 1e3 * (p50 - d50),
            "added_p99_ms": 1e3 * (p99 - d99),
            "tokens_per_s": statistics.median(self.rates),
        }


def measure(ways: dict[str, str], rounds: int, requests: int, streams: int, tokens: int) -> dict[str, Figures]:
    """Each way in turn, in every round, after a warm-up."""
    found: defaultdict[str, Figures] = defaultdict(Figures)

    async def warm_up() -> None:
        for url in ways.values():
            await first_tokens(url, 20)
            await throughput(url, streams, 10)

    asyncio.run(warm_up())
    for _ in track(range(rounds), "Measuring", console=console, transient=True):
        for name, url in ways.items():
            found[name].first += asyncio.run(first_tokens(url, requests))
            found[name].rates.append(asyncio.run(throughput(url, streams, tokens)))
    return found


def table(reports: dict[str, dict[str, float]], streams: int) -> Table:
    rows = Table()
    rows.add_column("way")
    for title in ("first token p50, ms", "p99", "added p50, ms", "p99", f"tokens/s, {streams} streams"):
        rows.add_column(title, justify="right")
    for name, one in reports.items():
        names = ("ttft_p50_ms", "ttft_p99_ms", "added_p50_ms", "added_p99_ms")
        rows.add_row(name, *(f"{one[key]:.2f}" for key in names), f"{one['tokens_per_s']:.0f}")
    return rows


def main(
    litellm_path: Annotated[Path | None, typer.Option("--litellm", help="litellm's command, to compare with.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    requests: Annotated[int, typer.Option(min=1, help="For the first token, each round.")] = 200,
    streams: Annotated[int, typer.Option(min=1, help="At once.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Of each stream.")] = 256,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Tell what each proxy adds to the first token's time, and how many tokens a second pass it."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(upstream())
        command = [sys.executable, "-c", "from serve.cli import main; main()", "--upstream", url]
        ours = stack.enter_context(running_process(command, directory / "capture.db", START_SECONDS))
        ways = {"direct": url, "draftloop": ours.url}
        if litellm_path is None:
            console.print("litellm is not measured: --litellm says where it is")
        else:
            ways["litellm"] = stack.enter_context(litellm(litellm_path.absolute(), url, directory))
        found = measure(ways, rounds, requests, streams, tokens)
        kept = ours.rows()
    if any(row.status != "finished" for row in kept):
        fail("not every answer was captured as finished")
    reports = {name: figures.report(found["direct"]) for name, figures in found.items()}
    console.print(table(reports, streams))
    if "litellm" in reports:
        ratio = ratios(found["draftloop"].rates, found["litellm"].rates)
        console.print(
            f"draftloop / litellm, tokens/s: {ratio[1]:.2f} [{ratio[0]:.2f} … {ratio[2]:.2f} over the rounds]"
        )
    if json_path is not None:
        about = {"rounds": rounds, "requests": requests, "streams": streams, "tokens": tokens}
        json_path.write_text(json.dumps({**about, "ways": reports}, indent=2) + "\n", encoding="utf-8")


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Least, median and most of the rounds' ratios: both sides of one were measured next to each other."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return each[0], statistics.median(each), each[-1]


if __name__ == "__main__":
    typer.run(main)
