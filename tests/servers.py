"""Servers under test: the app in a uvicorn of its own, or the whole process, with clients to talk to them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from capture.records import Generation
from capture.store import Store
from capture.writer import CaptureWriter
from serve.app import create_app
from serve.server import bind, config, url
from serve.service import Service
from serve.settings import load
from tests.checkpoints import Checkpoint
from tests.fake_backend import FakeBackend, Script

ROOT = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"
MODEL = "under-test"


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The condition's first true value; fails after the given time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)
    return value


def rows(path: Path) -> list[Generation]:
    """Every committed generation of a capture file, oldest first."""
    with Store.open(path) as store:
        return list(store.iterate())


@dataclass
class Server:
    """A running server and the clients to talk to it."""

    url: str
    capture: Path | None
    http: httpx.Client
    openai: openai.OpenAI

    def chat(self, content: str = "Hi", **more: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": [{"role": "user", "content": content}], **more})

    def rows(self) -> list[Generation]:
        assert self.capture is not None
        return rows(self.capture)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; its labels in any order."""
        return self.metrics(name)[name, frozenset(labels.items())]

    def metrics(self, prefix: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples of /metrics whose name begins so, by name and labels, as of one moment."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        # To read all of it would take longer than the server takes to tell it.
        chosen = [
            line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"draftloop_{prefix}")
        ]
        return {
            (sample.name.removeprefix("draftloop_"), frozenset(sample.labels.items())): float(sample.value)
            for family in parse("\n".join([*chosen, ""]))
            for sample in family.samples
        }


@dataclass
class AppServer(Server):
    """The app over a fake backend, in this process."""

    service: Service
    backend: FakeBackend


@dataclass
class ProcessServer(Server):
    """A server process; `output` grows as it prints."""

    process: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    def stop(self, signum: int = signal.SIGTERM, seconds: float = 20.0) -> int:
        self.process.send_signal(signum)
        return self.process.wait(seconds)


def clients(base: str, stack: ExitStack, timeout: float = 20.0) -> tuple[httpx.Client, openai.OpenAI]:
    http = stack.enter_context(httpx.Client(base_url=base, timeout=timeout))
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=timeout)
    return http, stack.enter_context(client)


@contextmanager
def running_app(
    script: Script | None = None, backend: FakeBackend | None = None, ready: bool = True, **given: Any
) -> Iterator[AppServer]:
    """The app in a uvicorn of its own; `given` are settings. With `ready`, it has loaded when this returns."""
    settings = load(**{"port": 0, **{name: str(value) for name, value in given.items()}})
    backend = backend or FakeBackend(script or Script())
    path = None if settings.capture == "off" else Path(str(settings.capture))
    app = create_app(settings, backend, CaptureWriter(path) if path else None)
    listener = bind(settings.host, settings.port)
    server = uvicorn.Server(config(app))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        with ExitStack() as stack:
            base = url(listener)
            http, client = clients(base, stack)
            if ready:
                eventually(lambda: http.get("/ready").status_code == 200)
            yield AppServer(base, path, http, client, app.state.service, backend)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not end"


def clean_environment() -> dict[str, str]:
    """This process' environment without settings that would reach the server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTLOOP_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def running_process(command: Sequence[str], capture: Path, seconds: float = 60.0) -> Iterator[ProcessServer]:
    """A server process on a free port, ready when this returns, killed at the end if it still runs."""
    process = subprocess.Popen(
        [*command, "--port", "0", "--capture", str(capture)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(),
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: [output.append(line) for line in process.stdout or ()])
    reader.start()

    def address() -> str | None:
        assert process.poll() is None, f"the server ended: {''.join(output)}"
        found = re.search(r"at (https?://\S+?),", "".join(output))
        return found and found[1]

    try:
        with ExitStack() as stack:
            base = eventually(address, seconds)
            http, client = clients(base, stack, timeout=60)
            yield ProcessServer(base, capture, http, client, process, output)
    finally:
        process.kill()
        process.wait()
        reader.join()


def serve_command(checkpoint: Checkpoint, *flags: str) -> list[str]:
    """`serve` on a checkpoint, from this source tree; the API calls the model MODEL."""
    run = [sys.executable, "-c", "from serve.cli import main; main()"]
    return [*run, "--model", str(checkpoint.directory), "--served-model-name", MODEL, "--threads", "1", *flags]


class Lock:
    """Another process' write lock on a capture file, as a long transaction would hold it."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.connection.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        with closing(self.connection):
            self.connection.execute("ROLLBACK")
