"""A model and the drafters to compare over it, opened as a server opens them: same bits, same drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from backend.drafters.hot_vocab import HotVocab, hot_vocab_drafter
from backend.drafters.mtp import mtp_drafter
from backend.drafters.prediction import PredictionDrafter
from backend.drafters.protocol import Drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.drafters.student import load_student, student_drafter
from backend.engine.probe import settle
from backend.loading import Loaded, LocalOptions, load
from training.errors import TrainingError

KINDS = "mtp, prediction, hot_vocab:FILE or a student's directory"


@dataclass(frozen=True, eq=False)
class Contestant:
    """A drafter under the name of its row. `given`: how it was asked for."""

    name: str
    given: str
    drafter: Drafter

    @property
    def parameters_read(self) -> int:
        """Weights that one draft step reads."""
        drafter = self.drafter
        return drafter.draft_block.parameters_read if isinstance(drafter, RecursiveDrafter) else 0


@dataclass(frozen=True)
class Opened:
    """The model ready to decode, and who drafts for it, in the order given."""

    model: Loaded
    contestants: tuple[Contestant, ...]


def open_all(model: str, drafters: Sequence[str], device: str, dtype: str, threads: int | None) -> Opened:
    """Raises BackendError where one cannot be loaded, TrainingError where it is none. Of two with one name the later
    has a number."""
    asked = [(given, *_kind_and_path(given)) for given in drafters]
    with_mtp = any(kind in ("mtp", "hot_vocab") for _, kind, _ in asked)
    loaded = load(
        LocalOptions(
            model=model,
            device=device,
            dtype=dtype,
            drafter="mtp" if with_mtp else "none",
            threads=threads,
            max_model_len=1,  # nothing is served
            max_num_seqs=1,
            prefix_cache=False,
        )
    )
    tiles = dict(loaded.probe.tiles)
    contestants: list[Contestant] = []
    for given, kind, path in asked:
        drafter = _open(kind, path, loaded)
        if isinstance(drafter, RecursiveDrafter):
            with torch.inference_mode():
                for module in drafter.draft_block.own:
                    settle(module, tiles)
        taken = sum(one.drafter.name == drafter.name for one in contestants)
        contestants.append(Contestant(f"{drafter.name} {taken + 1}" if taken else drafter.name, given, drafter))
    return Opened(loaded, tuple(contestants))


def _kind_and_path(given: str) -> tuple[str, Path]:
    """As `serve` reads a drafter's name: a kind and, after a colon, where it is; a directory is a student's."""
    kind, _, path = given.partition(":")
    if given in ("mtp", "prediction"):
        return given, Path()
    if kind in ("hot_vocab", "student") and path:
        return kind, Path(path).expanduser()
    if given and (directory := Path(given).expanduser()).is_dir():
        return "student", directory
    raise TrainingError(f"no drafter {given!r}: {KINDS} can be compared")


def _open(kind: str, path: Path, loaded: Loaded) -> Drafter:
    model, tokenizer = loaded.runner.model, loaded.tokenizer.fingerprint
    if kind == "prediction":
        return PredictionDrafter()
    if kind in ("mtp", "hot_vocab"):
        block = loaded.drafters["mtp"].fingerprint
        if kind == "mtp":
            return mtp_drafter(model, block)
        return hot_vocab_drafter(model, block, HotVocab.load(path, tokenizer, loaded.config.vocab_size))
    return student_drafter(model, load_student(path, model, loaded.fingerprints.weights, tokenizer))
