"""Distillation: forced documents in, a student that drafts for the trunk out (or the native MTP block, trained itself).

First towards the trunk's distribution over four recursive slots, then towards its tokens; what the held-out walk likes
best is kept. Killed anywhere it goes on where its last state was, to the same bits on a CPU.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backend.drafters.hot_vocab import HotVocab
from backend.drafters.recursive import RecursiveDrafter
from backend.drafters.student import HEADER, WEIGHTS, StudentHeader, Target, save_student
from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.fingerprint import hash_ids
from backend.models.hub import resolve_model
from backend.models.student import StudentBlock
from backend.models.weights import load_model
from backend.text.tokenizer import ChatTokenizer
from capture.export_folder import put_down
from training.data import Forced, reason
from training.distillation import state as states
from training.distillation.batches import Batch, Window, collate, drawn_noise, stream, windows
from training.distillation.log import Log, Walked, line_of
from training.distillation.native import LearningNative, LearningStudent, save_native
from training.distillation.options import DistillOptions
from training.distillation.plan import Plan, plan_of
from training.distillation.schedule import Moment
from training.distillation.state import State
from training.distillation.step import Counted, Lesson, Objective
from training.distillation.teacher import Teacher
from training.distillation.world import World, join
from training.errors import TrainingError
from training.evaluate.walk import walk
from training.forced import read_forced, read_manifest
from training.ledger import identity
from training.repetition import loops
from training.student import initialise
from training.target_files import MANIFEST, StoredTargets, targets_of

__all__ = ["DistillOptions", "Plan", "distill", "plan"]

Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""

LOG, LAST, NATIVE_FILE, FACTS = "log.jsonl", "last", "mtp.safetensors", "training.json"
_CALIBRATION_TOKENS = 50_000
_MOST_SKIPPED = 20  # steps in a row


def distill(options: DistillOptions, report: Report = lambda doing, done, total: None) -> Path:
    """Train by `options`; the directory of the checkpoint, which is the best by the held-out documents' walk.

    OUT gets the checkpoint, OUT/last the weights of the last step, log.jsonl and the state to resume from. With
    target "mtp" the checkpoint is mtp.safetensors. Under torchrun every process is to call this.

    Raises TrainingError and BackendError in one line for inputs that do not fit together, for a directory that holds
    another run or the other target's checkpoint, and for a run that diverges.
    """
    _check_place(options)
    with join(options.device) as world:
        run = _Run(options, world, report)
        try:
            run.train()
            run.finish()
        except OSError as error:
            raise TrainingError(f"cannot write to {options.out}: {reason(error)}") from error
    return options.out


def plan(options: DistillOptions) -> Plan:
    """What `distill` would do, and what it takes: nothing is trained or written. Raises as it does."""
    _check_place(options)
    with join(options.device) as world:
        return _Run(options, world, lambda doing, done, total: None).plan


def _check_place(options: DistillOptions) -> None:
    """One directory is one checkpoint: beside another, nobody could tell which of the two a file belongs to."""
    others, what = (
        ((WEIGHTS, HEADER), "a student") if options.target == "mtp" else ((NATIVE_FILE, FACTS), "an MTP block")
    )
    if found := [name for name in others if (options.out / name).exists()]:
        raise TrainingError(f"{options.out} holds {what} already ({', '.join(found)}): give another --out")


class _Run:
    """Everything a run holds: what it was given, the block that learns, and its state."""

    def __init__(self, options: DistillOptions, world: World, report: Report) -> None:
        self._world, self._report = world, report
        directory = resolve_model(options.model)
        self._dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
        loaded = load_model(directory, world.device, self._dtype, with_mtp=True)
        self._model = loaded.model
        tokenizer = ChatTokenizer.load(directory)
        self._target = Target(
            weights=loaded.weights, tokenizer=tokenizer.fingerprint, chat_template=tokenizer.template_fingerprint
        )
        self._vocab = min(loaded.config.vocab_size, tokenizer.vocab_size)
        self._options = options = options.settled(loaded.config)
        self._schedule = options.schedule()
        self._train, self._held_out, self._left_out = self._documents()
        self._windows = [
            window
            for i, forced in enumerate(self._train)
            for window in windows(
                i, forced.document.prompt_length, len(forced.document.tokens), options.window, options.slots
            )
        ]
        if not self._windows:
            raise TrainingError(
                f"{options.data} holds no document to learn from, an answer of two tokens at least: "
                f"{len(self._held_out)} are held out, {self._left_out} repeat themselves"
            )
        self._block, ids = self._new_block(tokenizer)
        self._identity = {
            **options.identity(),
            "data": identity(options.data / "manifest.json"),
            "weights": loaded.weights,
            "block": loaded.drafter,
            "d2t": None if ids is None else hash_ids(ids),
            "targets": identity(options.data / MANIFEST) if options.targets else None,
        }
        self._targets = self._precomputed() if options.targets else None
        everything = torch.arange(len(self._model.lm_head.weight)) if ids is None else ids.long()
        self._teacher = Teacher(self._model, everything.to(world.device))
        self.plan = plan_of(
            options,
            {name: parameter.numel() for name, parameter in self._block.named()},
            self._model,
            [window.length for window in self._windows],
            sum(window.last - window.first for window in self._windows),
            len(self._train),
            len(self._held_out),
            self._left_out,
            world,
        )

    def _documents(self) -> tuple[list[Forced], list[Forced], int]:
        """Those to learn from, the held-out ones, and how many were left out because they repeat themselves."""
        manifest = read_manifest(self._options.data)
        theirs = manifest["fingerprints"]
        for what in ("weights", "tokenizer"):
            ours = getattr(self._target, what)
            if theirs[what] != ours:
                raise TrainingError(
                    f"{self._options.data} was extracted from another model: its {what} are {theirs[what][:12]}, "
                    f"here {ours[:12]}"
                )
        split: tuple[list[Forced], list[Forced]] = ([], [])
        left_out = 0
        for forced in read_forced(self._options.data):
            if loops(forced.document.answer):  # easy to foresee and long: it would crowd out what there is to learn
                left_out += 1
            else:
                split[forced.document.held_out].append(forced)
        return *split, left_out

    def _precomputed(self) -> list[StoredTargets]:
        """The native head's chain of each document to learn from."""
        known = self._identity
        theirs = {
            "weights": known["weights"],
            "tokenizer": self._target.tokenizer,
            "drafter": known["block"],
            "d2t_sha256": known["d2t"],
        }
        return targets_of(self._options.data, self._train, theirs, self._options.slots)

    def _new_block(self, tokenizer: ChatTokenizer) -> tuple[LearningStudent | LearningNative, Tensor | None]:
        """The block with its first weights, and its ids."""
        options, config = self._options, self._model.config
        if options.target == "mtp":
            native = LearningNative(self._model)
            self._world.follow_first([parameter.data for _, parameter in native.named()])
            return native, None
        assert options.hot_vocab is not None
        hot = HotVocab.load(options.hot_vocab, tokenizer.fingerprint, config.vocab_size)
        with torch.device(self._world.device):
            block = StudentBlock(options.architecture(config, hot.size), config, hot.d2t.to(self._world.device))
        try:
            initialise(block, self._model, options.initialise, self._calibration(), options.seed)
        except ValueError as error:
            raise TrainingError(f"a student cannot start so: {error}") from None
        student = LearningStudent(block.float())
        self._world.follow_first([parameter.data for _, parameter in student.named()])
        return student, hot.d2t

    def _calibration(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        for forced in self._train:
            if seen >= _CALIBRATION_TOKENS:
                return
            seen += len(forced.document.tokens)
            tokens = torch.from_numpy(forced.document.tokens.astype("int64")).to(self._world.device)
            yield tokens, forced.hidden.to(self._world.device, self._dtype)

    def train(self) -> None:
        """From the state in OUT, or from the start, to the last step."""
        options, schedule, world = self._options, self._schedule, self._world
        if world.first:
            options.out.mkdir(parents=True, exist_ok=True)
        named = dict(self._block.named())
        optimizer = _optimizer(named, options)
        self._state = state = self._resumed(named, optimizer)
        objective = Objective(options.slots, options.discount, options.reinforce, options.visited, options.chunk)
        lesson = Lesson(self._model, self._block, self._teacher, objective)
        lengths = [window.length for window in self._windows]
        assert options.tokens_per_step is not None
        batches = stream(lengths, options.tokens_per_step, options.seed, state.step)
        log = Log(options.out / LOG, state.step) if world.first else None
        began, unusable = time.monotonic(), 0
        if state.step == 0:
            self._judge(named, log)
        while state.step < schedule.total:
            moment = schedule.at(state.step)
            batch = self._collated(next(batches), state.step, moment)
            with self._autocast():
                counted = lesson.gradients(batch, moment, world)
            for parameter in named.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            world.sum([parameter.grad for parameter in named.values() if parameter.grad is not None])
            norm = float(nn.utils.clip_grad_norm_(list(named.values()), options.clip))
            if usable := norm < float("inf"):
                for group in optimizer.param_groups:
                    group["lr"] = moment.lr * group["factor"]
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            unusable = 0 if usable else unusable + 1
            state.skipped += not usable
            if unusable == _MOST_SKIPPED:
                raise TrainingError(f"the gradients of {_MOST_SKIPPED} steps in a row were not finite: lower --lr")
            state.step += 1
            _follow(state.mean, named, min(options.ema, (1 + state.step) / (10 + state.step)))
            done, doing = state.step, f"{moment.stage}  {_shown(counted)}"
            if log is not None and (done % options.log_every == 0 or done == schedule.total):
                log.write(line_of(done, moment, counted, norm, state.skipped, time.monotonic() - began))
            if done == schedule.total or (options.evaluate_every and done % options.evaluate_every == 0):
                self._judge(named, log)
            if world.first:
                if done == schedule.total or (options.save_every and done % options.save_every == 0):
                    self._save(named, optimizer)
                self._report(doing, done, schedule.total)

    def finish(self) -> None:
        """Write the checkpoint: the best weights as OUT, the last ones as OUT/last."""
        state, options = self._state, self._options
        if self._world.first:
            evaluation = {
                "held_out_documents": len(self._held_out),
                "repeating_documents_left_out": self._left_out,
                "slots": options.slots,
                "dtype": "float32" if self._dtype == torch.float32 else "bfloat16",
                "native": self._walked(NativeBlock(self._model)).as_json() if self._held_out else None,
            }
            best = state.mean if state.best is None else state.best
            last = copy.deepcopy(state.mean)
            self._write(options.out / LAST, last, state.step, evaluation)
            self._write(options.out, best, state.best_step if state.best is not None else state.step, evaluation)
        self._world.wait()

    def _collated(self, batch: Sequence[int], step: int, moment: Moment) -> Batch | None:
        """This process's share of a batch, with its noise."""
        places = self._world.share(range(len(batch)))
        if not places:
            return None
        chosen: list[Window] = [self._windows[batch[place]] for place in places]
        targets = self._targets if moment.mixed else None
        made = collate(chosen, self._train, self._world.device, self._dtype, targets)
        if not self._options.noise:
            return made
        told = [hashlib.sha256(f"{self._options.seed} {step} {place}".encode()).digest() for place in places]
        seeds = [int.from_bytes(digest[:7], "little") for digest in told]
        return replace(made, noise=drawn_noise(made, self._options.noise, seeds))

    def _autocast(self) -> Any:
        on_gpu = self._world.device.type == "cuda"
        return torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()

    def _resumed(self, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> State:
        found = states.read(self._options.out, self._identity, self._options.resume)
        if found is None:
            return State(0, {}, {name: value.detach().clone() for name, value in named.items()}, {})
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(found.weights[name])
        found.mean = {name: value.to(self._world.device) for name, value in found.mean.items()}
        optimizer.load_state_dict(found.optimizer)
        found.weights, found.optimizer = {}, {}
        return found

    def _save(self, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        state = copy.copy(self._state)
        state.weights = {name: value.detach() for name, value in named.items()}
        state.optimizer = optimizer.state_dict()
        states.write(self._options.out, state, self._identity)

    def _judge(self, named: Mapping[str, nn.Parameter], log: Log | None) -> None:
        """Walk the held-out documents with the mean weights, and keep them where none were better."""
        state = self._state
        if self._world.first and self._held_out:
            walked = self._walked(self._with(state.mean))
            if log is not None:
                log.write({"step": state.step, "held_out": walked.as_json()})
            if state.tau is None or walked.tau > state.tau:
                state.tau, state.best_step = walked.tau, state.step
                state.best = {name: value.clone() for name, value in state.mean.items()}
        self._world.wait()

    def _with(self, weights: Mapping[str, Tensor]) -> LearningStudent | LearningNative:
        """A copy of the block as it would be served: with these weights, rounded as the checkpoint rounds them."""
        block = self._block
        if isinstance(block, LearningNative):
            other: LearningStudent | LearningNative = LearningNative(self._model)
        else:
            other = LearningStudent(copy.deepcopy(block.student))
        for module in other.own:
            module.to(self._dtype).requires_grad_(False)
        with torch.no_grad():
            for name, parameter in other.named():
                parameter.copy_(weights[name].bfloat16())
        return other

    def _walked(self, block: DraftBlock) -> Walked:
        drafter = RecursiveDrafter(self._model, block, "distilled", "distilled", "distilled")
        counts = walk(self._model, drafter, self._held_out, self._options.slots, vocab=self._vocab)
        slots = range(self._options.slots)
        return Walked(
            sum(one.steps for one in counts),
            [sum(one.proposed[slot] for one in counts) for slot in slots],
            [sum(one.accepted[slot] for one in counts) for slot in slots],
        )

    def _write(self, out: Path, weights: Mapping[str, Tensor], step: int, evaluation: dict[str, Any]) -> None:
        told = {
            **self._identity,
            "step": step,
            "documents": len(self._train),
            "anchors": self.plan.anchors,
            "skipped": self._state.skipped,
        }
        block = self._with(weights)
        if self._held_out:
            evaluation = {**evaluation, "student": self._walked(self._with(weights)).as_json()}
        if isinstance(block, LearningNative):
            out.mkdir(parents=True, exist_ok=True)
            save_native(out / NATIVE_FILE, block.mtp, torch.bfloat16)
            header = {"target": self._target.model_dump(), "training": told, "evaluation": evaluation}
            text = json.dumps(header, indent=2) + "\n"
            put_down(out / FACTS, lambda file: file.write(text.encode()))
            return
        student = block.student.to(torch.bfloat16)
        header_of = StudentHeader.of(student, self._target, self._options.name, told, evaluation)
        save_student(out, student, header_of)


def _optimizer(named: Mapping[str, nn.Parameter], options: DistillOptions) -> torch.optim.AdamW:
    """Three groups: the head's rows, other matrices, and norms; `factor` is of the learning rate."""
    groups: dict[str, list[nn.Parameter]] = {"head": [], "matrices": [], "norms": []}
    for name, parameter in named.items():
        groups["norms" if parameter.dim() == 1 else "head" if name == "head.weight" else "matrices"].append(parameter)
    decay, head = options.weight_decay, options.head_lr
    told = [
        {"params": groups["head"], "factor": head, "weight_decay": 0.0},
        {"params": groups["matrices"], "factor": 1.0, "weight_decay": decay},
        {"params": groups["norms"], "factor": 1.0, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in told if group["params"]], lr=0.0, betas=(0.9, 0.95))


@torch.no_grad()
def _follow(mean: Mapping[str, Tensor], named: Mapping[str, nn.Parameter], decay: float) -> None:
    for name, parameter in named.items():
        mean[name].lerp_(parameter, 1 - decay)


def _shown(counted: Counted) -> str:
    return " ".join(f"{hits / max(rows, 1):.3f}" for hits, rows in zip(counted.hits, counted.rows, strict=True))
