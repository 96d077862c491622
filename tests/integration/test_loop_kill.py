"""Law L3 on the real engine: kill -9 amid fifty streams loses no answer whose end a client has seen."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.answers import body, whole
from tests.checkpoints import random_small
from tests.servers import ROOT, ProcessServer, clean_environment

STREAMS = 50


class Client:
    """One streamed answer as far as it came."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = ""
        self.text = ""
        self.finish_reason: str | None = None
        self.timings: dict[str, Any] = {}

    async def ask(self, client: openai.AsyncOpenAI) -> None:
        limit = 4 + self.number % 30
        asked = body(f"What is {self.number}?", temperature=1, top_k=0, top_p=1, max_tokens=limit)
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            self.id = chunk.id.removeprefix("chatcmpl-")
            self.text += choice.delta.content or ""
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
                self.timings = (chunk.model_extra or {})["timings"]


async def kill_amid_streams(server: ProcessServer, moment: random.Random) -> list[Client]:
    """Fifty streams at once; the server is killed some time after some of them have ended."""
    clients = [Client(number) for number in range(STREAMS)]
    enough = moment.randrange(1, STREAMS // 2)

    async def killer() -> None:
        while sum(client.finish_reason is not None for client in clients) < enough:
            await asyncio.sleep(0.001)
        await asyncio.sleep(moment.uniform(0, 0.1))
        server.process.kill()

    async def ask(client: Client) -> None:
        with suppress(openai.APIError, httpx.TransportError):  # the server was killed
            await client.ask(connection)

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as connection:
        await asyncio.wait_for(asyncio.gather(killer(), *map(ask, clients)), 120)
    return clients


@pytest.mark.timeout(240)
def test_no_answer_whose_end_was_seen_is_lost_to_kill_9(serve_model: Callable[..., ProcessServer]) -> None:
    moment = random.Random(20)
    cut_short = 0
    seen: dict[str, Client] = {}
    for _ in range(2):
        server = serve_model(random_small())  # again and again on the file as the kill left it
        clients = asyncio.run(kill_amid_streams(server, moment))
        assert server.process.wait(10) == -9
        seen |= {client.id: client for client in clients if client.finish_reason}
        cut_short += sum(client.finish_reason is None for client in clients)
        with closing(sqlite3.connect(server.capture)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = {row.id: row for row in server.rows()}
        for name, client in seen.items():
            row = rows[name]
            assert (row.status, row.finish_reason) == ("finished", client.finish_reason)
            assert row.response_text == client.text
            assert len(row.completion_tokens) == len(row.logprobs) == client.timings["predicted_n"]
            assert len(row.prompt_tokens) == client.timings["prompt_n"] + client.timings["cache_n"]
    assert len(seen) > 3
    assert cut_short > 3
    told = capture_stats(server.capture)
    assert told["rows"] == len(rows)
    server = serve_model(random_small())
    answer = whole(server.openai, "Still there?", max_tokens=4)
    assert {*rows, answer.row_id} == {row.id for row in server.rows()}
    assert server.stop() == 0
    assert capture_stats(server.capture)["rows"] == len(rows) + 1


def capture_stats(path: Path | None) -> dict[str, Any]:
    """What `capture stats` says of the file."""
    command = [sys.executable, "-m", "capture.cli", "stats", "--json", "--capture", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    return found
