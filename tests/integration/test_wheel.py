"""The wheel, installed where there is no checkout: it has every file, serves, captures and exports."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.checkpoints import BUNDLED, has_tiny, random_small
from tests.servers import ROOT, clean_environment, running_process

PACKAGES = ("serve", "backend", "capture", "training")


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment() | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout and nothing left there gets in."""
    place = tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        if name.split("/")[0] in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE") and (ROOT / name).is_file():
            target = place / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    # A new enough setuptools at hand spares a download.
    isolation = [] if _setuptools() < 77 else ["--no-isolation"]
    run(sys.executable, "-m", "build", "--wheel", *isolation, "-o", place, place / "source", cwd=place)
    (built,) = place.glob("*.whl")
    return built


def _setuptools() -> int:
    try:
        return int(version("setuptools").split(".")[0])
    except PackageNotFoundError:
        return 0


def install(wheel: Path, place: Path, *how: str) -> Path:
    """A fresh environment with the wheel; its bin folder."""
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *how, wheel, cwd=place)
    return place / "bin"


def lend_dependencies(bin_: Path) -> None:
    """Link into a fresh environment what the wheel there asks for, directly or through others, and nothing else."""
    (site,) = (bin_.parent / "lib").glob("python*/site-packages")
    (ours,) = distributions(path=[str(site)])
    todo = list(ours.requires or ())
    lent: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = Requirement(todo.pop())
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key in lent or not _applies(wanted):
            continue
        lent.add(key)
        lender = distribution(wanted.name)
        for top in {file.parts[0] for file in lender.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(lender.locate_file(top))))
        todo += [str(inner) for inner in map(Requirement, lender.requires or ()) if _applies(inner, *wanted.extras)]


def _applies(wanted: Requirement, *extras: str) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def loop(bin_: Path, outside: Path) -> None:
    """Serve, chat and export with nothing but what is installed, in a folder that is no checkout."""
    names = ", ".join(PACKAGES)
    origins = run(
        *(bin_ / "python", "-c", f"import {names}\nfor m in ({names}): print(m.__file__)"), cwd=outside
    ).splitlines()
    assert len(origins) == len(PACKAGES)
    assert all(Path(origin).is_relative_to(bin_.parent) for origin in origins), origins

    model = "tiny" if has_tiny else str(random_small().directory)
    at = ["sh", "-c", 'unset PYTHONPATH && cd "$0" && exec "$@"', str(outside)]
    capture = outside / "capture.db"
    with running_process([*at, str(bin_ / "serve"), "--model", model, "--threads", "1"], capture) as server:
        answer = server.openai.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What does len() do?"}], max_tokens=24, temperature=0
        )
        assert server.stop() == 0
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0

    printed = run(bin_ / "capture", "export", "--to", "npz", "--capture", capture, cwd=outside)
    folder = outside / printed.split()[-1]
    assert folder.is_relative_to(outside)
    (shard,) = folder.glob("*.npz")
    with np.load(shard, allow_pickle=False) as data:
        assert data["prompt_lengths"].tolist() == [answer.usage.prompt_tokens]
        assert data["doc_offsets"].tolist() == [0, len(data["tokens"])]
        assert len(data["tokens"]) == answer.usage.total_tokens
        assert int(data["loss_mask"].sum()) == answer.usage.completion_tokens
        assert data["doc_ids"].tolist() == [answer.id.removeprefix("chatcmpl-")]
    assert json.loads((folder / "manifest.json").read_text())


def test_the_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    source = wheel.parent / "source"
    wanted = {file.relative_to(source).as_posix() for package in PACKAGES for file in (source / package).rglob("*.*")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert held == wanted
    assert f"backend/tiny/{next(BUNDLED.glob('*.jinja')).name}" in held


def test_the_wheel_serves_and_exports_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    bin_ = install(wheel, tmp_path / "env", "--no-deps")
    lend_dependencies(bin_)
    loop(bin_, tmp_path / "outside")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_brings_all_it_needs(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    loop(install(wheel, tmp_path / "env"), tmp_path / "outside")
