"""An export's folder and its files: complete, or not there at all.

Knows file systems; knows nothing of what is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from capture.records import CaptureError


def default_folder(parent: Path) -> Path:
    """`draftloop-export-<UTC time>` in `parent`, with a number after it where that is taken."""
    name = f"draftloop-export-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    candidate, attempt = parent / name, 1
    while candidate.exists():
        attempt += 1
        candidate = parent / f"{name}-{attempt}"
    return candidate


@contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """Make the folder, or take an empty one; on failure leave things as they were."""
    made = not folder.exists()
    # As closed to others as the capture file: token ids are the conversations.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        raise CaptureError(f"{folder} is not empty: name a new folder, so that no two exports mix")
    try:
        yield
    except BaseException:
        for path in (*folder.glob("shard-*"), *folder.glob("manifest.json*")):
            path.unlink()
        if made:
            folder.rmdir()
        raise
    _sync(folder.parent)


def put_down(path: Path, write: Callable[[IO[bytes]], object], mode: int = 0o666) -> None:
    """Write a file under a temporary name, and give it its own only when it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # a disk that is full is not to stay so
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
