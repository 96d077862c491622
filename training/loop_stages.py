"""The stages of a turn of the loop: what each is given, and all that its outcome depends on.

How each works is its own module's to know; when a turn is taken, `training.loop`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from backend.models.config import ModelConfig
from backend.models.hub import resolve_model
from backend.text.tokenizer import ChatTokenizer
from capture.export_npz import export_npz
from capture.server import Server, Version
from capture.store import Store, default_path
from training.data import find_shards
from training.distillation.options import DistillOptions
from training.errors import TrainingError
from training.hot_vocab import build as build_hot_vocab
from training.learning import figures_of
from training.ledger import Entry, Ledger, identity
from training.live_drafters import Operator
from training.promote import PromoteOptions, Verdict, candidate_name, promote
from training.stages import Done, Stage, code_of, perform, write_json

Report = Callable[[str, int, int], None]

MOST_HOT_ROWS = 32_768
_MODEL = (*(f"backend/{folder}/*.py" for folder in ("models", "ops", "engine", "drafters")), "backend/whole_file.py")
_FORCED = (*_MODEL, "training/data.py", "training/forced.py", "training/mapped.py")
_EXTRACT = ("training/extract.py", "training/force.py", "training/shards.py", "training/agreement.py")
_DISTILL = ("distill", "distillation/*", "losses", "recursion", "student", "target_files", "repetition")
CODE: Mapping[str, tuple[str, ...]] = {
    "export": ("capture/*.py",),
    "hot-vocab": ("training/hot_vocab.py", "training/coverage.py", "training/data.py", "backend/text/tokenizer.py"),
    "extract": (*_FORCED, *_EXTRACT),
    "distill": (*_FORCED, *(f"training/{one}.py" for one in (*_DISTILL, "evaluate/walk", "evaluate/following"))),
    "evaluate": (*_FORCED, "training/evaluate/*.py", "training/force.py", "training/repetition.py"),
    "promote": ("training/promote.py", "training/gate.py", "training/traffic.py", "training/live_drafters.py"),
}
"""What each stage's outcome depends on, beside its inputs; globs as `code_of` has them."""


class NotEnoughError(TrainingError):
    """There are not yet captured answers enough to train on and to judge by."""


@dataclass(frozen=True)
class LoopOptions:
    """`model`: the checkpoint that the server serves. `hot_rows`: the student's ids; half of the vocabulary at most,
    unless given. `preset`: sv for as many ids as a large vocabulary gives; for fewer sv-slim, whose rows are half as
    long, because a list too short costs more than a narrow head. `fewest_requests`: held-out documents and requests
    below which nothing is decided, and so nothing trained. What is None is left to the stage that it belongs to.
    """

    server: str
    workdir: Path
    model: str = "tiny"
    capture: Path | None = None
    api_key: str | None = field(default=None, metadata={"secret": True})
    admin_key: str | None = field(default=None, metadata={"secret": True})
    hot_rows: int | None = None
    preset: str | None = None
    widths: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    ce_steps: int | None = None
    alpha: float | None = None
    tokens_per_step: int | None = None
    name: str = "student"
    max_gb: float | None = None
    slots: int = 4
    requests: int = 64
    fewest_requests: int = 8
    concurrency: int = 1
    canary: float = 0.5
    wait: float = 0.0
    pairs: int = 6
    min_gain: float = 1.0
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0

    @property
    def capture_path(self) -> Path:
        return self.capture or default_path()

    @cached_property
    def directory(self) -> Path:
        return resolve_model(self.model)

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_directory(self.directory)

    @property
    def rows(self) -> int:
        """Of the student's head."""
        return self.hot_rows or min(MOST_HOT_ROWS, self.config.vocab_size // 2)

    @property
    def chosen_preset(self) -> str:
        return self.preset or ("sv" if self.rows >= MOST_HOT_ROWS else "sv-slim")

    def distillation(self, data: Path, hot_vocab: Path, out: Path) -> DistillOptions:
        asked = {name: getattr(self, name) for name in ("steps", "ce_steps", "alpha", "tokens_per_step")}
        return DistillOptions(
            data=data,
            hot_vocab=hot_vocab,
            out=out,
            model=self.model,
            preset=self.chosen_preset,
            widths=self.widths,
            slots=self.slots,
            seed=self.seed,
            device=self.device,
            name=self.name,
            **{name: value for name, value in asked.items() if value is not None},
        )

    def distillation_settled(self) -> DistillOptions:
        """As a turn would train. Raises TrainingError for what cannot be, with no folder of a stage there yet."""
        settled = self.distillation(self.workdir, self.workdir, self.workdir / "student").settled(self.config)
        settled.architecture(self.config, self.rows)
        return settled


@dataclass(frozen=True)
class Round:
    """What one turn of the loop came to. `verdict` as `training promote` tells it; `changed`: whether anything was done
    that an earlier turn had not."""

    stages: tuple[Done, ...]
    verdict: Mapping[str, Any]

    @property
    def changed(self) -> bool:
        return not all(stage.skipped for stage in self.stages)

    @property
    def promoted(self) -> bool:
        return bool(self.verdict["promoted"])

    @property
    def checkpoint(self) -> Path:
        return next(stage.folder for stage in self.stages if stage.name == "distill") / "student"

    def as_json(self) -> dict[str, Any]:
        told = [{"stage": one.name, "folder": str(one.folder), "skipped": one.skipped} for one in self.stages]
        return {"stages": told, "checkpoint": str(self.checkpoint), "verdict": dict(self.verdict)}


class Stages:
    """The stages of one turn, each made of what those before it made."""

    def __init__(self, options: LoopOptions, ledger: Ledger, version: Version, report: Report) -> None:
        self._options, self._ledger, self._version, self._report = options, ledger, version, report

    def all(self, captured: Mapping[str, Any]) -> Round:
        exported = self._perform(self._export(captured))
        shards = _shards(exported.folder / "npz", self._version)
        self._require_enough(exported)
        hot = self._perform(self._hot_vocab(exported, shards))
        extracted = self._perform(self._extract(exported, shards, hot))
        distilled = self._perform(self._distill(extracted, hot))
        evaluated = self._perform(self._evaluate(exported, shards, hot, distilled))
        promoted = self._promote(distilled)
        return Round((exported, hot, extracted, distilled, evaluated, promoted), promoted.figures)

    def _perform(self, stage: Stage) -> Done:
        self._report(stage.name, 0, 1)
        done = perform(self._options.workdir, stage, self._ledger)
        self._report(stage.name, 1, 1)
        return done

    def _heard(self, stage: str) -> Report:
        return lambda doing, done, total: self._report(f"{stage}: {doing}", done, total)

    def _require_enough(self, exported: Done) -> None:
        found, wanted = exported.figures["held_out_documents"], self._options.fewest_requests
        if found < wanted or not exported.figures["documents"] - found:
            raise NotEnoughError(
                f"not enough captured yet: {exported.figures['documents']} answers of this model hold {found} for "
                f"judging a drafter, which takes {wanted} (about a tenth of all is held out)"
            )

    def _export(self, captured: Mapping[str, Any]) -> Stage:
        options, report = self._options, self._heard("export")

        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            rows = 0

            def row() -> None:
                nonlocal rows
                rows += 1
                report("rows", rows, max(rows, int(captured["rows"])))

            with Store.open(options.capture_path) as store:
                export_npz(store, folder / "npz", on_row=row)
            manifest = json.loads((folder / "npz" / "manifest.json").read_text(encoding="utf-8"))
            mine = [one for one in manifest["shards"] if one["fingerprints"]["weights"] == self._version.weights]
            counts = ("documents", "held_out_documents", "prompt_tokens", "completion_tokens", "bytes")
            entry.figures |= {name: sum(one[name] for one in mine) for name in counts}
            entry.figures["skipped_rows"] = manifest["counts"]["skipped_rows"]
            entry.fingerprints["weights"] = self._version.weights
            return [folder / "npz"]

        inputs = {
            "capture": str(options.capture_path.resolve()),
            "captured": dict(captured),
            "weights": self._version.weights,
            "code": code_of(*CODE["export"]),
        }
        return Stage("export", inputs, run, keep=False)

    def _hot_vocab(self, exported: Done, shards: Sequence[Path]) -> Stage:
        options, report = self._options, self._heard("hot-vocab")

        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            tokenizer = ChatTokenizer.load(options.directory)
            found = find_shards(shards)
            built = build_hot_vocab(found, tokenizer, options.rows, lambda done: report("shards", done, len(found)))
            built.hot.save(folder / "hot_vocab.safetensors")
            entry.figures |= built.as_json()
            return [folder / "hot_vocab.safetensors"]

        inputs = {
            "export": dict(exported.outputs),
            "size": options.rows,
            "tokenizer": identity(options.directory / "tokenizer.json"),
            "code": code_of(*CODE["hot-vocab"]),
        }
        return Stage("hot-vocab", inputs, run)

    def _extract(self, exported: Done, shards: Sequence[Path], hot: Done) -> Stage:
        from training.extract import ExtractOptions, extract, read_manifest

        options = self._options
        inputs = {
            "export": dict(exported.outputs),
            "hot_vocab": dict(hot.outputs),
            "model": self._version.weights,
            "device": options.device,
            "dtype": options.dtype,
            "threads": options.threads,
            "code": code_of(*CODE["extract"]),
        }

        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            given = ExtractOptions(
                inputs=tuple(shards),
                model=options.model,
                out=folder / "forced",
                hot_vocab=hot.folder / "hot_vocab.safetensors",
                max_gb=options.max_gb,
                device=options.device,
                dtype=options.dtype,
                threads=options.threads,
            )
            manifest = read_manifest(extract(given, self._heard("extract")))
            entry.figures |= {name: manifest[name] for name in ("counts", "gate")}
            entry.fingerprints |= manifest["fingerprints"]
            return [folder / "forced"]

        return Stage("extract", inputs, run, resumable=True, keep=False)

    def _distill(self, extracted: Done, hot: Done) -> Stage:
        from training.distill import distill

        options = self._options
        asked = {name: getattr(options, name) for name in ("steps", "ce_steps", "alpha", "tokens_per_step")}
        inputs = {
            "extract": dict(extracted.outputs),
            "hot_vocab": dict(hot.outputs),
            "model": self._version.weights,
            **{name: value for name, value in asked.items() if value is not None},
            "preset": options.chosen_preset,
            "widths": dict(options.widths),
            "slots": options.slots,
            "name": options.name,
            "device": options.device,
            "seed": options.seed,
            "code": code_of(*CODE["distill"]),
        }

        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            forced, ids = extracted.folder / "forced", hot.folder / "hot_vocab.safetensors"
            made = distill(options.distillation(forced, ids, folder / "student"), self._heard("distill"))
            entry.figures, entry.fingerprints = figures_of(made)
            entry.seeds["distill"] = options.seed
            return [made / "model.safetensors", made / "config.json"]

        return Stage("distill", inputs, run, resumable=True)

    def _evaluate(self, exported: Done, shards: Sequence[Path], hot: Done, distilled: Done) -> Stage:
        from training.evaluate.evaluation import EvaluateOptions, evaluate

        options = self._options
        inputs = {
            "export": dict(exported.outputs),
            "hot_vocab": dict(hot.outputs),
            "student": dict(distilled.outputs),
            "slots": options.slots,
            "device": options.device,
            "dtype": options.dtype,
            "threads": options.threads,
            "seed": options.seed,
            "code": code_of(*CODE["evaluate"]),
        }

        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            student = distilled.folder / "student"
            given = EvaluateOptions(
                data=tuple(shards),
                model=options.model,
                drafters=("mtp", f"hot_vocab:{hot.folder / 'hot_vocab.safetensors'}", str(student.resolve())),
                slots=options.slots,
                every=options.slots,
                seed=options.seed,
                device=options.device,
                dtype=options.dtype,
                threads=options.threads,
            )
            found = evaluate(given, self._heard("evaluate"))
            entry.figures |= found.as_json()
            entry.fingerprints |= found.fingerprints
            entry.seeds["evaluate"] = options.seed
            write_json(folder / "evaluation.json", entry.figures)
            return [folder / "evaluation.json"]

        return Stage("evaluate", inputs, run)

    def _promote(self, distilled: Done) -> Done:
        options = self._options
        student = distilled.folder / "student"
        name = candidate_name(student)
        active, incumbent = _standing(options, name)
        given = PromoteOptions(
            server=options.server,
            drafter=student,
            name=name,
            capture=options.capture,
            api_key=options.api_key,
            admin_key=options.admin_key,
            requests=options.requests,
            fewest_requests=options.fewest_requests,
            concurrency=options.concurrency,
            canary=options.canary,
            wait=options.wait,
            pairs=options.pairs,
            min_gain=options.min_gain,
            seed=options.seed,
        )
        asked = ("requests", "concurrency", "canary", "wait", "pairs", "min_gain", "seed")
        inputs = {
            "student": dict(distilled.outputs),
            "server": options.server,
            "incumbent": incumbent,
            **{option: getattr(options, option) for option in asked},
            "code": code_of(*CODE["promote"]),
        }

        def run(folder: Path, entry: Entry) -> Sequence[Path]:
            verdict: Verdict = promote(given, self._heard("promote"))
            entry.figures |= verdict.as_json()
            entry.seeds["promote"] = options.seed
            if not verdict.promoted:
                entry.negative(verdict.reason)
            write_json(folder / "verdict.json", verdict.as_json())
            return [folder / "verdict.json"]

        done = self._perform(Stage("promote", inputs, run))
        if done.skipped and done.figures["promoted"] and active != name:  # the server was started anew without it
            done = self._perform(Stage("promote", inputs, run, again=True))
        return done


def _standing(options: LoopOptions, name: str) -> tuple[str, str]:
    """The server's active drafter, and the fingerprint of whom the candidate is to beat."""
    with Server(options.server, options.admin_key or options.api_key) as server:
        drafters = Operator(server).drafters()
    beaten = drafters.previous if drafters.active == name and drafters.previous else drafters.active
    found = drafters.loaded.get(beaten)
    return drafters.active, found.fingerprint if found else beaten


def _shards(folder: Path, version: Version) -> list[Path]:
    """The shards that the served model's answers are in."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return [folder / one["file"] for one in manifest["shards"] if one["fingerprints"]["weights"] == version.weights]
