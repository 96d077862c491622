"""Open-loop load on any OpenAI-compatible server: requests leave at random times, whether or not others have ended.

`python -m tests.benchmarks.serve_load --url http://127.0.0.1:8000 --rate 1 --rate 4 --json load.json`. Knows HTTP alone
and nothing of draftloop. Every latency counts from the moment a request was due, so that a server which makes its
clients wait cannot hide it. Prompts repeat: a server with a prefix cache may answer from it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PROMPTS = (
    "What does json.dumps do?",
    "How do I count the words of a text in Python?",
    "Write a short function that reverses a list.",
    "Explain what os.path.join returns.",
    "What is the difference between a list and a tuple?",
    "Show the signature of subprocess.run and what it is for.",
    "Write a regular expression that matches a date, and explain its parts.",
    "Why is a dictionary lookup fast? Answer in three sentences.",
)
PERCENTILES = (50, 90, 99)
TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")  # what a delta can bring

console = Console()


class Failed(Exception):
    """A request that got no whole answer; `str(error)` is the kind it is counted under."""


@dataclass(frozen=True)
class Answer:
    """One request's fate, in seconds after it was due."""

    sent: float
    ended: float
    error: str | None = None
    arrivals: tuple[float, ...] = ()  # of the chunks that brought text
    tokens: int | None = None  # as the server counted them

    @property
    def inter_token(self) -> float | None:
        """Mean time between two tokens, which need not arrive one by one."""
        if not self.arrivals or self.tokens is None or self.tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)


@dataclass(frozen=True)
class Load:
    """What is asked of whom. `body` is every request's, but for its messages and seed."""

    client: httpx.AsyncClient
    body: Mapping[str, Any]
    prompts: Sequence[str]
    seconds: float
    timeout: float  # seconds
    seed: int

    def requests(self, rate: float) -> Iterator[tuple[float, dict[str, Any]]]:
        """Poisson arrivals at `rate` a second: when each is due, and its body. The same for the same seed."""
        dice = random.Random(f"{self.seed} {rate}")
        due = dice.expovariate(rate)
        for number in itertools.count(self.seed):
            if due >= self.seconds:
                return
            messages = [{"role": "user", "content": dice.choice(self.prompts)}]
            yield due, {**self.body, "messages": messages, "seed": number}
            due += dice.expovariate(rate)

    async def run(self, rate: float) -> tuple[list[Answer], float]:
        """All answers of one rate, and the seconds it took: at least those in which requests arrive."""
        requests = list(self.requests(rate))
        start = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{rate:g} requests a second", total=len(requests))

            async def one(due: float, body: Mapping[str, Any]) -> Answer:
                await asyncio.sleep(start + due - time.perf_counter())
                answer = await self.ask(body, start + due)
                progress.advance(task)
                return answer

            answers = await asyncio.gather(*(one(due, body) for due, body in requests))
        return answers, max(time.perf_counter() - start, self.seconds)

    async def ask(self, body: Mapping[str, Any], due: float) -> Answer:
        sent = time.perf_counter() - due
        arrivals: list[float] = []
        tokens: int | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self.timeout):
                async for chunk in self.chunks(body):
                    if any(choice.get("delta", {}).get(text) for choice in chunk["choices"] for text in TEXTS):
                        arrivals.append(time.perf_counter() - due)
                    if usage := chunk.get("usage"):
                        tokens = usage["completion_tokens"]
        except Failed as failure:
            error = str(failure)
        except TimeoutError:
            error = "took too long"
        except httpx.HTTPError as failure:
            error = type(failure).__name__
        except (ValueError, KeyError, TypeError, AttributeError):
            error = "not OpenAI's shape"
        return Answer(sent, time.perf_counter() - due, error, tuple(arrivals), tokens)

    async def chunks(self, body: Mapping[str, Any]) -> Any:
        """The chunks of one streamed answer. Raises Failed where it is refused or cut short."""
        finished = False
        async with self.client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                raise Failed(f"HTTP {response.status_code}")
            async for line in response.aiter_lines():
                field, _, data = line.partition(":")
                if field != "data" or data.strip() == "[DONE]":
                    continue
                chunk = json.loads(data)
                if error := chunk.get("error"):
                    raise Failed(f"stream: {error.get('code') or error.get('type')}")
                finished = finished or any(choice.get("finish_reason") for choice in chunk["choices"])
                yield chunk
        if not finished:
            raise Failed("cut short")


def report(rate: float, answers: Sequence[Answer], wall: float) -> dict[str, Any]:
    """The figures of one rate, JSON-ready; a spread is None where there was nothing to measure."""
    good = [answer for answer in answers if answer.error is None]
    counted = [answer for answer in good if answer.tokens is not None]
    gaps = [b - a for answer in good for a, b in itertools.pairwise(answer.arrivals)]
    return {
        "rate": rate,
        "requests": len(answers),
        "completed": len(good),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "without_usage": len(good) - len(counted),
        "wall_s": wall,
        "requests_per_s": len(good) / wall,
        "tokens_per_s": sum(answer.tokens or 0 for answer in counted) / wall,
        "sent_late_s": spread([answer.sent for answer in answers]),
        "ttft_s": spread([answer.arrivals[0] for answer in good if answer.arrivals]),
        "inter_token_s": spread([time for answer in good if (time := answer.inter_token) is not None]),
        "chunk_gap_s": spread(gaps),
        "e2e_s": spread([answer.ended for answer in good]),
        "answer_tokens_per_s": spread([(answer.tokens or 0) / answer.ended for answer in counted], more_is_better=True),
    }


def spread(values: Sequence[float], *, more_is_better: bool = False) -> dict[str, float] | None:
    """Mean, and for each percentile p the value that p of 100 are at least as good as."""
    if not values:
        return None
    cuts = np.percentile(values, [100 - p if more_is_better else p for p in PERCENTILES])
    named = {f"p{p}": float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)}
    return {"n": len(values), "mean": float(np.mean(values)), **named}


def table(rates: Sequence[Mapping[str, Any]]) -> Table:
    rows = Table(title=f"Percentiles: {' · '.join(f'p{p}' for p in PERCENTILES)}", title_justify="left")
    rows.add_column("offered requests/s")
    for figures in rates:
        rows.add_column(f"{figures['rate']:g}", justify="right")

    def plain(name: str, key: str, digits: int) -> None:
        rows.add_row(name, *(f"{figures[key]:.{digits}f}" for figures in rates))

    def percentiles(name: str, key: str, scale: float) -> None:
        rows.add_row(
            name,
            *(
                " · ".join(f"{scale * found[f'p{p}']:.1f}" for p in PERCENTILES) if (found := figures[key]) else "-"
                for figures in rates
            ),
        )

    plain("requests sent", "requests", 0)
    rows.add_row("failed", *(str(sum(figures["errors"].values())) for figures in rates))
    plain("answers/s", "requests_per_s", 2)
    plain("tokens/s, all together", "tokens_per_s", 1)
    percentiles("tokens/s, one answer", "answer_tokens_per_s", 1)
    percentiles("first token, ms", "ttft_s", 1e3)
    percentiles("a token after the first, ms", "inter_token_s", 1e3)
    percentiles("between chunks, ms", "chunk_gap_s", 1e3)
    percentiles("whole answer, ms", "e2e_s", 1e3)
    percentiles("sent late from here, ms", "sent_late_s", 1e3)
    return rows


def main(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second; repeatable. Default: 1.")] = None,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of arrivals at each rate.")] = 30,
    prompts: Annotated[Path | None, typer.Option(help="A text file, one prompt a line. Default: built in.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, prompts and the requests' own seeds.")] = 0,
    extra: Annotated[
        str, typer.Option(help='Further fields of every request, as JSON: \'{"drafter": "none"}\'.')
    ] = "{}",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request counts as failed.")] = 600,
    api_key_env: Annotated[str | None, typer.Option(help="The variable that holds the API key.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Send requests at given rates and tell what their clients saw."""
    rates = rate or [1.0]
    if any(not 0 < one < float("inf") for one in rates):
        fail("--rate must be more than 0")
    fixed = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    body = fixed | ({} if temperature is None else {"temperature": temperature}) | read_extra(extra)
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    headers = {} if api_key_env is None else {"Authorization": f"Bearer {read_key(api_key_env)}"}

    async def measure() -> tuple[str, list[dict[str, Any]]]:
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        limits = httpx.Limits(max_connections=None)  # what waits must wait in the server, not here
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits) as client:
            name = model or await first_model(client)
            load = Load(client, {"model": name, **body}, asked, duration, timeout, seed)
            return name, [report(one, *await load.run(one)) for one in rates]

    try:
        name, figures = asyncio.run(measure())
    except httpx.InvalidURL as error:
        fail(f"{url} is no address: {error}")
    console.print(table(figures))
    for one in figures:
        for kind, count in sorted(one["errors"].items()):
            console.print(f"at {one['rate']:g} a second, {count} of {one['requests']} failed: {kind}", markup=False)
        if one["without_usage"]:
            console.print(f"at {one['rate']:g} a second, {one['without_usage']} answers came without a token count")
    if json_path is not None:
        about = {"url": url, "model": name, "duration_s": duration, "prompts": len(asked), "seed": seed, "body": body}
        try:
            json_path.write_text(json.dumps({**about, "rates": figures}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"{json_path} cannot be written: {error.strerror}")
    if not any(one["completed"] for one in figures):
        fail("no request was answered", code=1)


async def first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        fail(f"{client.base_url}models answers {error.response.status_code}")
    except httpx.HTTPError as error:
        fail(f"{client.base_url} cannot be reached: {error or type(error).__name__}")
    except (ValueError, LookupError, TypeError):
        fail(f"{client.base_url}models lists no model; give --model")


def read_extra(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        fail(f"--extra is not JSON: {error}")
    return fields if isinstance(fields, dict) else fail("--extra must be a JSON object")


def read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path} cannot be read: {error}")
    return [line for line in lines if line.strip()] or fail(f"{path} holds no prompt")


def read_key(variable: str) -> str:
    return os.environ.get(variable) or fail(f"{variable} holds no API key")


def fail(message: str, code: int = 2) -> NoReturn:
    sys.stderr.write(f"serve_load: {message}\n")
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
