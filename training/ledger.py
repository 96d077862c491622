"""The ledger: every run's command, inputs, figures and end as lines of JSON, only ever appended to, failures included.

Knows files and processes; knows no model, and what a figure means is its writer's to say.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from backend.interface import BackendError
from capture.records import CaptureError
from training.errors import TrainingError

SCHEMA = 1
NAME = "ledger.jsonl"
_USER = re.compile(r"(?<=://)[^/\s]*@")
ON_PURPOSE = (TrainingError, BackendError, CaptureError)

Outcome = Literal["running", "ok", "refused", "negative", "failed"]
"""running: begun, and no end known (killed, or still at it) · refused: its input could not be used · negative: it
ended, and the answer is no · failed: it broke off."""


@dataclass
class Entry:
    """One run, to be filled in while it lasts. Values: what JSON can say, paths, numbers of numpy, dataclasses."""

    figures: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)  # path → sha256
    outcome: Outcome = "running"
    reason: str | None = None

    def made(self, *paths: Path) -> None:
        """Name what the run wrote."""
        self.outputs |= {str(path): identity(path) for path in paths}

    def negative(self, reason: str) -> None:
        """It ran to its end, and what it found speaks against what was tried: that belongs into a ledger too."""
        self.outcome, self.reason = "negative", reason

    def refused(self, reason: str) -> None:
        self.outcome, self.reason = "refused", reason


@dataclass(frozen=True)
class Run:
    """A line as read back; `fields` is all of it."""

    fields: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    @property
    def command(self) -> str:
        return str(self.fields["command"])

    @property
    def started(self) -> str:
        return str(self.fields["started"])

    @property
    def outcome(self) -> str:
        return str(self.fields["outcome"])

    @property
    def reason(self) -> str | None:
        reason = self.fields.get("reason")
        return None if reason is None else str(reason)

    @property
    def figures(self) -> Mapping[str, Any]:
        figures = self.fields.get("figures")
        return figures if isinstance(figures, Mapping) else {}

    @property
    def wall_seconds(self) -> float | None:
        seconds = self.fields.get("wall_seconds")
        if isinstance(seconds, int | float) and abs(seconds) <= sys.float_info.max:
            return float(seconds)
        return None


@dataclass(frozen=True)
class Ledger:
    """A file of runs. A run is a line when it begins and, under the same id, a whole one when it ends."""

    path: Path

    @classmethod
    def beside(cls, made: Path, given: Path | None = None) -> Ledger:
        """The given file, else $DRAFTLOOP_LEDGER, else ledger.jsonl in the folder where `made` stands."""
        configured = os.environ.get("DRAFTLOOP_LEDGER")
        return cls(given or (Path(configured) if configured else made.absolute().parent / NAME))

    @contextmanager
    def run(self, command: str, options: Any = None, inputs: Iterable[Path] = ()) -> Iterator[Entry]:
        """Record what happens inside. `options`: a dataclass or mapping; `inputs`: files and folders, told by hash.

        An exception ends the line and goes on its way; killed, the run's first line stays, as "running".
        Raises TrainingError where the file cannot be written: work nobody can account for is not begun.
        """
        entry = Entry()
        begun = time.monotonic()
        line: dict[str, Any] = {
            "schema": SCHEMA,
            "id": uuid.uuid4().hex,
            "command": command,
            "started": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "arguments": plain(options),
            "code": code(),
            "inputs": {str(path): identity(path) for path in inputs},
            "outcome": "running",
        }
        self._append(line)
        try:
            yield entry
            if entry.outcome == "running":
                entry.outcome = "ok"
        except BaseException as error:
            if entry.outcome == "running":
                entry.outcome, entry.reason = _ending(error)
            raise
        finally:
            self._append({**line, **plain(entry), "wall_seconds": time.monotonic() - begun, "memory": _peak_memory()})

    def read(self) -> tuple[list[Run], int]:
        """Every run once, in the order they began, and how many lines are damaged (a machine that went down leaves
        half of one). Raises TrainingError for a file that is missing or of a newer draftloop."""
        try:
            text = self.path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise TrainingError(f"cannot read the ledger {self.path}: {error.strerror or error}") from error
        runs: dict[str, Run] = {}
        damaged = 0
        for line in text.split("\n"):
            if not line.strip():
                continue
            told = _line(line)
            if told is None:
                damaged += 1
            elif told["schema"] > SCHEMA:
                raise TrainingError(f"the ledger {self.path} has schema {told['schema']}; this build reads {SCHEMA}")
            else:
                runs[str(told["id"])] = Run(told)
        return list(runs.values()), damaged

    def _append(self, line: Mapping[str, Any]) -> None:
        """One write, so that lines of several processes never mix; after half a line, on a new one."""
        data = (json.dumps(line, allow_nan=False, sort_keys=False) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(file).st_size
                torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                data = b"\n" * torn + data
                if os.write(file, data) != len(data):
                    raise OSError(None, "the disk is full")
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise TrainingError(f"cannot write to the ledger {self.path}: {error.strerror or error}") from error


def identity(path: Path) -> str:
    """What a file or folder holds, as a sha256: of the file; of the folder's manifest or config, which name the
    hashes of what else is there; else over the names and sizes of its files. "missing" where there is nothing."""
    if path.is_dir():
        for name in ("manifest.json", "config.json"):
            if (path / name).is_file():
                return identity(path / name)
        listed = [
            (str(file.relative_to(path)), file.stat().st_size) for file in sorted(path.rglob("*")) if file.is_file()
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    if not path.is_file():
        return "missing"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror or error}") from error


def code() -> dict[str, Any]:
    """Which code ran: the version, and of a git checkout the commit and whether files differ from it."""
    try:
        found: dict[str, Any] = {"version": version("draftloop")}
    except PackageNotFoundError:  # run from a source tree that is not installed
        found = {"version": "unknown"}
    root = Path(__file__).parents[1]
    if (root / ".git").exists():
        commit, changes = (_git(root, *arguments) for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain")))
        if commit:
            found |= {"commit": commit, "changed": bool(changes)}
    return found


def plain(value: Any) -> Any:
    """The value as JSON can say it; not-a-number and infinities, which it cannot, as None. Fields of dataclasses whose
    metadata calls them secret are left out, and of URLs who asks and with which password."""
    if is_dataclass(value) and not isinstance(value, type):
        told = [one for one in fields(value) if not one.metadata.get("secret")]
        return {one.name: plain(getattr(value, one.name)) for one in told}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if isinstance(value, str):
        return _USER.sub("", value)
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if callable(numbers := getattr(value, "tolist", None)):  # of numpy and torch
        return plain(numbers())
    return _USER.sub("", str(value))


def _ending(error: BaseException) -> tuple[Outcome, str]:
    if isinstance(error, KeyboardInterrupt):
        return "failed", "interrupted"
    text = " ".join(str(error).split())
    if isinstance(error, ON_PURPOSE):
        return "refused", text
    return "failed", f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(text: str) -> dict[str, Any] | None:
    try:
        told = json.loads(text)
        # What no text can hold, half of a surrogate pair, as it comes from file names that are not UTF-8.
        told = json.loads(json.dumps(told, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    known = isinstance(told, dict) and isinstance(told.get("schema"), int)
    if not known or not all(isinstance(told.get(name), str) for name in ("id", "command", "started", "outcome")):
        return None
    return dict(told)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        told = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def _peak_memory() -> dict[str, int]:
    """Bytes at the most: of this process, and of its GPU where torch has used one."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak["gpu_bytes"] = int(torch.cuda.max_memory_allocated())
    return peak
