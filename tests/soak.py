"""Random load on a real server: after it nothing is stuck, nothing is held, memory has not grown, no text has changed.

By hand: `python -m tests.soak --seconds 600`, with --model for another checkpoint than a random one. Clients come and
go, disconnect, draft differently and ask the same again in ever new company: whoever asks the same hears the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from tests.checkpoints import Checkpoint, random_small
from tests.servers import CHAT, ProcessServer, eventually, running_process, serve_command

KV_MEMORY = "0.0023"  # GiB: the small random model's longest sequence has all pages there are, four
FLAGS = ("--max-num-seqs", "6", "--allow-drafter-choice", "--further-drafters", "prediction")
TEXT = "the list of all words that a path or a file can hold returns none if it is empty else its first item"
WORDS = TEXT.split()
SYSTEM = " ".join(random.Random(0).choices(WORDS, k=150))
QUESTIONS = 60
# MiB that a server may take between a third of the time and its end. The first thousand requests fill caches, oneDNN's
# of 1,024 kernels first of all (446 MiB at the start, 506 after 30 s, 557 after 170, 559 after 200): a short run can
# only tell what loses hundreds of KiB a request.
GROWTH, GROWTH_WARM, WARM_SECONDS = 96, 24, 300


@dataclass
class Soak:
    """What came of the load so far. `answers`: by question, whatever the drafter and the company."""

    server: ProcessServer
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    answers: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    async def run(self, seconds: float, clients: int = 10) -> list[float]:
        """Load for so long; the server's resident MiB, sampled all the while."""
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as http:
            crowd = [asyncio.create_task(self._client(http, i, until)) for i in range(clients)]
            sizes = []
            while time.monotonic() < until:
                await asyncio.sleep(min(1.0, seconds / 30))
                sizes.append(resident(self.server))
            await asyncio.gather(*crowd)
        return sizes

    async def _client(self, http: httpx.AsyncClient, number: int, until: float) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < until:
            question = rng.randrange(QUESTIONS)
            body = question_body(question)
            body["drafter"] = rng.choice(["mtp", "mtp", "prediction", "none"])
            if rng.random() < 0.2:
                body["prediction"] = {"type": "content", "content": " ".join(rng.choices(WORDS, k=20))}
            match rng.choice(["whole", "whole", "streamed", "streamed", "left", "refused"]):
                case "whole":
                    self._answered(question, whole(await http.post(CHAT, json=body)))
                case "streamed":
                    self._answered(question, await streamed(http, body))
                case "left":
                    await leave(http, body, rng.uniform(0, 0.4))
                    self.seen["left"] += 1
                case "refused":
                    response = await http.post(CHAT, json={**body, "max_tokens": 100_000})
                    if response.status_code != 400:
                        self.wrong.append(f"what can never fit was answered with {response.status_code}")
                    self.seen["refused"] += 1
            await asyncio.sleep(rng.choice([0, 0, 0, rng.uniform(0, 0.3)]))

    def _answered(self, question: int, answer: str) -> None:
        self.seen["answered"] += 1
        if self.answers.setdefault(question, answer) != answer:
            self.wrong.append(f"question {question} got another answer in other company")

    def settled(self) -> bool:
        """Nobody runs, nobody waits, no page is held by either."""
        engine = self.server.http.get("/v1/engine").json()
        return not engine["running"] and not engine["waiting"] and not engine["pages"]["held_by_running"]


def question_body(question: int) -> dict[str, Any]:
    """The same request for the same number; sampled in many ways, of many lengths, many with one beginning."""
    rng = random.Random(question)
    system = [{"role": "system", "content": SYSTEM}] if question % 2 else []
    before_a_border = rng.randint(410, 480) - (165 if system else 0)  # words, of about a token each
    content = " ".join(rng.choices(WORDS, k=rng.choice([3, 120, before_a_border, before_a_border])))
    most = rng.choice([1, 20, 90, 90])
    ways: list[Mapping[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {"20": 3, "30": -100}},
        {"temperature": 1.0, "min_tokens": min(20, most), "stop": ["e"]},
        {"temperature": 1.0, "ignore_eos": True},
        {"temperature": 0, "response_format": {"type": "json_object"}},
    ]
    return {
        "messages": [*system, {"role": "user", "content": content}],
        "max_tokens": most,
        "seed": question,
        "logprobs": True,
        **ways[question % len(ways)],
    }


def whole(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return told(choice["message"]["content"], choice["logprobs"], choice["finish_reason"])


async def streamed(http: httpx.AsyncClient, body: Mapping[str, Any]) -> str:
    text, tokens, finish = "", [], ""
    async with http.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
                tokens += (choice.get("logprobs") or {}).get("content") or []
                finish = choice["finish_reason"] or finish
    return told(text, {"content": tokens}, finish)


async def leave(http: httpx.AsyncClient, body: Mapping[str, Any], patience: float) -> None:
    """Ask and hang up after so many seconds, wherever the answer stands."""
    with suppress(TimeoutError):
        await asyncio.wait_for(streamed(http, body), patience)


def told(text: str | None, logprobs: Mapping[str, Any] | None, finish: str) -> str:
    figures = [(token["token"], token["logprob"]) for token in (logprobs or {}).get("content") or []]
    return json.dumps([text or "", figures, finish])


def resident(server: ProcessServer) -> float:
    """Of the server process, MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def soak(checkpoint: Checkpoint, seconds: float, *flags: str, seed: int = 0) -> Soak:
    """Load a server of its own for so long and assert what the module promises."""
    with tempfile.TemporaryDirectory() as folder:
        command = serve_command(checkpoint, *FLAGS, *flags)
        with running_process(command, Path(folder) / "capture.db") as server:
            load = Soak(server, seed)
            sizes = asyncio.run(load.run(seconds))
            eventually(load.settled, 30)
            assert not load.wrong, load.wrong
            assert load.seen["answered"] > seconds, load.seen
            # Every page there is can be had again.
            last = server.chat(" ".join(random.Random(1).choices(WORDS, k=1700)), ignore_eos=True, max_tokens=5)
            assert last.json()["choices"][0]["finish_reason"] == "length", last.text
            eventually(load.settled, 30)
            early = max(sizes[len(sizes) // 6 : len(sizes) // 3])
            load.seen["MiB early"], load.seen["MiB late"] = round(early), round(sizes[-1])
            load.seen["preemptions"] = int(server.http.get("/v1/engine").json()["preemptions"])
            assert sizes[-1] - early < (GROWTH_WARM if seconds >= WARM_SECONDS else GROWTH), sizes
            assert not [line for line in server.output if "Traceback" in line or "ERROR" in line], server.output
            assert server.stop() == 0
    return load


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 600.0,
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; unset: a small random one.")] = None,
    kv_memory: Annotated[str, typer.Option(help="GiB; little of it means preemptions.")] = KV_MEMORY,
    draft_tokens: Annotated[str, typer.Option(help="0 to 8, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the load.")] = 0,
) -> None:
    """Put a server under random load, then say what it did; ends with an error where it broke a promise."""
    checkpoint = Checkpoint(model.name, model, thinks=False) if model else random_small()
    load = soak(checkpoint, seconds, "--kv-memory", kv_memory, "--draft-tokens", draft_tokens, seed=seed)
    Console().print(dict(load.seen))


if __name__ == "__main__":
    typer.run(main)
