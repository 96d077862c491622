"""Files made one after the other in a folder, so that a killed run goes on: what is finished, what is whole, what fits.

Knows files, their hashes and JSON; knows nothing of what is in a shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.export_folder import put_down
from training.data import reason
from training.errors import TrainingError
from training.forced import digest


@dataclass(frozen=True)
class Shards:
    """`identity`: all that the files are a function of. `manifest` names the file that, written last, makes them whole;
    until then one named like it says what is finished. `guest`: the folder is another's, files in it are no obstacle.
    """

    folder: Path
    identity: Mapping[str, Any]
    manifest: str = "manifest.json"
    guest: bool = False

    @property
    def _progress(self) -> Path:
        return (self.folder / self.manifest).with_suffix(".progress")

    def finished(self) -> dict[str, dict[str, Any]]:
        """What an earlier run has finished, by file. Makes the folder ready for this one.

        Raises TrainingError where it holds something else, or cannot be used.
        """
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # token ids are the conversations
            told = next((path for path in (folder / self.manifest, self._progress) if path.is_file()), None)
            if told is None:
                if not self.guest and any(path.suffix != ".tmp" for path in folder.iterdir()):
                    raise TrainingError(f"{folder} is not empty, nor left by an earlier run: name a new folder")
                self.note({})
                return {}
            left = json.loads(told.read_text(encoding="utf-8"))
            other = [name for name, value in self.identity.items() if left.get(name) != value]
            if other:
                raise TrainingError(f"{told} is of another {', '.join(other)}: name a new folder, or remove it")
            return {entry["file"]: entry for entry in left["shards"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(f"cannot use {folder}: {reason(error)}") from error

    def is_whole(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether a finished file is there, and the one of its hash."""
        path = None if entry is None else self.folder / entry["file"]
        return entry is not None and path is not None and path.is_file() and digest(path) == entry["sha256"]

    def note(self, finished: Mapping[str, Mapping[str, Any]]) -> None:
        """Remember what is finished."""
        _write(self._progress, {**self.identity, "shards": [finished[name] for name in sorted(finished)]})

    def complete(self, finished: Mapping[str, Mapping[str, Any]], **figures: Any) -> None:
        """Write the manifest: with it the files are whole."""
        shards = [finished[name] for name in sorted(finished)]
        _write(self.folder / self.manifest, {**self.identity, **figures, "shards": shards})
        self._progress.unlink(missing_ok=True)


def told(size: int) -> str:
    """Bytes as people say them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def must_fit(what: str, size: int, place: Path, max_gb: float | None, reused: int = 0) -> None:
    """Raise TrainingError where `size` bytes are more than the cap or the disk of `place`, `reused` of which are ours.

    `what` takes them, plural: the error's subject.
    """
    subject = f"{what} take {told(size)}"
    if max_gb is not None and size > max_gb * 1e9:
        raise TrainingError(f"{subject}, --max-gb allows {max_gb:g} GB: export fewer, or allow more")
    place = place.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free + reused
    if size > free:
        raise TrainingError(f"{subject}, and {place} has {told(free)} free")


def _write(path: Path, told: Mapping[str, Any]) -> None:
    text = json.dumps(told, indent=2) + "\n"
    put_down(path, lambda file: file.write(text.encode()))
