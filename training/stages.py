"""Stages of a longer work: each is done once for the same inputs, and what was killed half-way goes on from there.

A stage has a folder named by the hash of all it depends on; a file in it, written last, says that it is done. Knows
nothing of what stages do.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.whole_file import replace_whole
from training.errors import TrainingError
from training.ledger import Entry, Ledger, identity, plain

MARKER = "done.json"
FORMAT_VERSION = 1
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Stage:
    """`inputs`: all that the outcome depends on, options, hashes of data and of code. `run` gets the stage's folder and
    its line of the ledger, and returns the paths it made there. `resumable`: it goes on in a folder it was killed in;
    another one begins with an empty one. `keep`: its folders for other inputs stay when it is done anew. `again`:
    do it though it is done."""

    name: str
    inputs: Mapping[str, Any]
    run: Callable[[Path, Entry], Sequence[Path]]
    resumable: bool = False
    keep: bool = True
    again: bool = False

    @property
    def key(self) -> str:
        text = json.dumps(plain({"stage": self.name, "inputs": self.inputs}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Done:
    """A finished stage. `outputs`: name in the folder → hash. `skipped`: an earlier run had done it."""

    name: str
    folder: Path
    outputs: Mapping[str, str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    skipped: bool = False


def perform(workdir: Path, stage: Stage, ledger: Ledger) -> Done:
    """Do the stage, or find that it is done. Raises whatever it raises, and TrainingError where the folder fails."""
    folder = workdir / f"{stage.name}-{stage.key[:12]}"
    if not stage.again and (done := _done(folder, stage)):
        return done
    (folder / MARKER).unlink(missing_ok=True)
    if not stage.resumable:
        shutil.rmtree(folder, ignore_errors=True)
    with ledger.run(stage.name, stage.inputs) as entry:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"cannot make {folder}: {error.strerror or error}") from error
        made = stage.run(folder, entry)
        entry.made(*made)
        done = Done(
            stage.name, folder, {str(path.relative_to(folder)): identity(path) for path in made}, plain(entry.figures)
        )
        write_json(
            folder / MARKER,
            {
                "format_version": FORMAT_VERSION,
                "stage": stage.name,
                "key": stage.key,
                "inputs": plain(stage.inputs),
                "outputs": done.outputs,
                "figures": done.figures,
            },
        )
    if not stage.keep:
        _forget_others(workdir, folder, stage.name)
    return done


def code_of(*patterns: str) -> str:
    """A hash of source files of this installation, named by globs from the packages' parent: `capture/*.py`.

    Raises ValueError for a pattern that names none, which would be a dependence that nobody notices.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = [path for path in ROOT.glob(pattern) if path.suffix == ".py"]
        if not found:
            raise ValueError(f"no source file is named by {pattern!r}")
        files.update(found)
    listed = [(str(path.relative_to(ROOT)), identity(path)) for path in sorted(files)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """The file as a whole or not at all. Raises TrainingError."""
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    try:
        replace_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or none that was written whole."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Nobody else works in this folder meanwhile. Raises TrainingError where somebody does."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise TrainingError(f"cannot work in {workdir}: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise TrainingError(f"another run works in {workdir}: wait for it, or name another folder") from None
    try:
        yield
    finally:
        os.close(file)


def _done(folder: Path, stage: Stage) -> Done | None:
    """What an earlier run made, if all of it is there as it was left."""
    told = read_json(folder / MARKER)
    if told is None or told.get("format_version") != FORMAT_VERSION or told.get("key") != stage.key:
        return None
    outputs: dict[str, str] = told["outputs"]
    if any(identity(folder / name) != digest for name, digest in outputs.items()):
        return None
    return Done(stage.name, folder, outputs, told["figures"], skipped=True)


def _forget_others(workdir: Path, folder: Path, name: str) -> None:
    for other in workdir.glob(f"{name}-*"):
        if other != folder and (other / MARKER).is_file():
            shutil.rmtree(other, ignore_errors=True)
