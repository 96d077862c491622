"""Fixtures that start the real thing: the app in a uvicorn of its own, or the whole server process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoint, has_tiny, random_qwen, tiny
from tests.servers import AppServer, ProcessServer, running_app, running_process, serve_command


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., AppServer]]:
    """Start the app over a FakeBackend, captured in a file of the test: see `tests.servers.running_app`."""
    with ExitStack() as stack:

        def start(*arguments: Any, **given: Any) -> AppServer:
            return stack.enter_context(running_app(*arguments, **{"capture": tmp_path / "capture.db", **given}))

        yield start


@pytest.fixture
def serve_process(tmp_path: Path) -> Iterator[Callable[..., ProcessServer]]:
    """Start a server process over the fake backend: `serve_process(*flags)`, ready when this returns."""
    with ExitStack() as stack:

        def start(*flags: str) -> ProcessServer:
            command = [sys.executable, "-m", "tests.fake_backend", *flags]
            return stack.enter_context(running_process(command, tmp_path / "capture.db"))

        yield start


@pytest.fixture
def serve_model(tmp_path: Path) -> Iterator[Callable[..., ProcessServer]]:
    """Start `serve` on a checkpoint: `serve_model(checkpoint, *flags)`; all of a test's servers share its file."""
    with ExitStack() as stack:

        def start(checkpoint: Checkpoint, *flags: str) -> ProcessServer:
            return stack.enter_context(running_process(serve_command(checkpoint, *flags), tmp_path / "capture.db"))

        yield start


@pytest.fixture(scope="session", params=[random_qwen, *([tiny] if has_tiny else [])], ids=lambda make: make.__name__)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """Each checkpoint that whole answers are tried on."""
    made: Checkpoint = request.param()
    return made


@pytest.fixture(scope="session")
def model_server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """One running `serve` on the checkpoint for every test that only asks it things."""
    with running_process(serve_command(checkpoint), tmp_path_factory.mktemp("model") / "capture.db") as server:
        yield server


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """The bundled model with its drafter and its prefix cache: everything that must make no difference."""
    command = serve_command(tiny(), "--draft-tokens", "4")
    with running_process(command, tmp_path_factory.mktemp("drafting") / "capture.db") as server:
        yield server


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """The bundled model one token after the other, every prompt from its start: what `drafting` must equal."""
    command = serve_command(tiny(), "--drafter", "none", "--prefix-cache", "off")
    with running_process(command, tmp_path_factory.mktemp("plain") / "capture.db") as server:
        yield server
