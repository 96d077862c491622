"""A run's state on disk: one file of tensors, and a marker that is written last and says which file is whole.

Order and noise are functions of seed and step, so the state needs no generator's. Knows no model.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from capture.export_folder import put_down
from training.data import reason
from training.errors import TrainingError
from training.forced import digest

Resume = Literal["auto", "must", "never"]
MARKER = "state.json"


@dataclass
class State:
    """After `step` steps. By parameter name: float32 weights, their running mean, the best that was measured."""

    step: int
    weights: dict[str, Tensor]
    mean: dict[str, Tensor]
    optimizer: dict[str, Any]
    skipped: int = 0  # steps whose gradients were not finite
    tau: float | None = None  # of `best`
    best_step: int = 0
    best: dict[str, Tensor] | None = None


def write(directory: Path, state: State, identity: Mapping[str, Any]) -> None:
    """The state in place of the one before. `identity`: what must be equal for it to be continued."""
    file = directory / f"state-{state.step}.pt"
    try:
        put_down(file, lambda out: torch.save(vars(state), out))
        told = {"file": file.name, "sha256": digest(file), "step": state.step, "identity": identity}
        text = json.dumps(told, indent=1)
        put_down(directory / MARKER, lambda out: out.write(text.encode()))
    except (OSError, RuntimeError) as error:
        # torch ends a file that it could not write with an error of its own, which that of the system led to.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise TrainingError(f"cannot write the state of the run to {directory}: {reason(cause)}") from error
    for old in directory.glob("state-*.*"):
        if old.name != file.name:
            old.unlink(missing_ok=True)


def read(directory: Path, identity: Mapping[str, Any], resume: Resume) -> State | None:
    """What to continue from, None for a run that begins. Raises TrainingError where there is another run's state, or
    one that is not whole, and where there is none but must be."""
    path = directory / MARKER
    if resume == "never":
        return None
    if not path.is_file():
        if resume == "must":
            raise TrainingError(f"nothing to resume in {directory}: it has no {MARKER}")
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        theirs, file, sha256 = told["identity"], directory / told["file"], told["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"cannot read {path}: {error}") from error
    ours = json.loads(json.dumps(identity))
    if changed := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
        raise TrainingError(
            f"{directory} holds another run: {', '.join(changed)} differ. Give another --out, or --resume never"
        )
    try:
        if digest(file) != sha256:
            raise TrainingError(f"{file} is not whole: {MARKER} names another hash. Give --resume never to begin anew")
        return State(**torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise TrainingError(f"cannot read {file}: {error}") from error
