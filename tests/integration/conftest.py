"""Fixtures that start the real thing: the app in a uvicorn of its own, or the whole server process."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ROOT, AppServer, ProcessServer, clean_environment, clients, eventually, running_app


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., AppServer]]:
    """Start the app over a FakeBackend, captured in a file of the test: see `tests.servers.running_app`."""
    with ExitStack() as stack:

        def start(*arguments: Any, **given: Any) -> AppServer:
            return stack.enter_context(running_app(*arguments, **{"capture": tmp_path / "capture.db", **given}))

        yield start


@pytest.fixture
def serve_process(tmp_path: Path) -> Iterator[Callable[..., ProcessServer]]:
    """Start a server process: `serve_process(*flags, module="tests.fake_backend")`, ready when this returns."""
    with ExitStack() as stack:

        def start(*flags: str, module: str = "tests.fake_backend", seconds: float = 60.0) -> ProcessServer:
            path = tmp_path / "capture.db"
            command = [sys.executable, "-m", module, "--port", "0", "--capture", str(path), *flags]
            process = subprocess.Popen(
                command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean_environment()
            )
            output: list[str] = []

            reader = threading.Thread(target=lambda: [output.append(line) for line in process.stdout or ()])
            reader.start()

            def stop() -> None:
                process.kill()
                process.wait()
                reader.join()

            stack.callback(stop)

            def address() -> str | None:
                assert process.poll() is None, f"the server ended: {''.join(output)}"
                found = re.search(r"at (http://\S+?),", "".join(output))
                return found and found[1]

            base = eventually(address, seconds)
            http, client = clients(base, stack)
            return ProcessServer(base, path, http, client, process, output)

        yield start
