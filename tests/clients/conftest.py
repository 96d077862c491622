"""Programs that people use with OpenAI's API, unchanged, against the bundled model: `make test-clients`.

None of them is a dependency of the server or of its other tests; what they import is imported inside the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.servers import ProcessServer, clean_environment, running_process, serve_command

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGCHAIN_TRACING_V2": "false",
}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """The bundled model, thinking off as its template has it."""
    with running_process(serve_command(tiny()), tmp_path_factory.mktemp("clients") / "capture.db") as server:
        yield server


@pytest.fixture(autouse=True, scope="session")
def _offline() -> None:
    """Clients that would look something up elsewhere must not need to."""
    os.environ.update(OFFLINE)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run a client's program with its home in the test's directory; returns what it prints. It must exit with 0."""

    def start(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
        done = subprocess.run(
            [Path(sys.executable).parent / program, *arguments],
            cwd=tmp_path,
            env={**clean_environment(), **OFFLINE, **home, "OPENAI_API_KEY": "none", **(environment or {})},
            text=True,
            capture_output=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{program} {arguments} failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return start
