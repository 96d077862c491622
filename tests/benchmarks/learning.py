"""What distillation is worth on the bundled model: students of several recipes and seeds, judged on held-out answers.

`python -m tests.benchmarks.learning --workdir DIR`. Answers are captured through the API, half greedy and half at 0.7;
each student is judged beside the native head, whole and cut to the student's ids, on identical documents. What DIR
holds is not made again: a run that was killed, or that ran out of --minutes, goes on where it was. Asserts nothing
about figures.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from backend.models.config import ModelConfig
from backend.models.hub import resolve_model
from backend.models.weights import load_model
from backend.text.tokenizer import ChatTokenizer
from tests.benchmarks.learning_data import captured, templated
from training.data import find_shards
from training.distill import distill
from training.distillation.options import DistillOptions
from training.evaluate.evaluation import EvaluateOptions, Evaluation, Row, evaluate
from training.extract import ExtractOptions, extract
from training.hot_vocab import build

MODEL = "tiny"


@dataclass(frozen=True)
class Recipe:
    """A way to make a student. `generic`: from texts that the model did not generate; `ce_alone`: by their tokens."""

    name: str
    short: str
    alpha: float = 1.0
    ce_alone: bool = False
    generic: bool = False


RECIPES = (
    Recipe("own answers, KD then CE, α 1", "main"),
    Recipe("α 0.5", "half", alpha=0.5),
    Recipe("α 0", "native", alpha=0.0),
    Recipe("CE alone", "ce", ce_alone=True),
    Recipe("generic corpus of the same size", "generic", generic=True),
)


@dataclass(frozen=True)
class Plan:
    """What decides every figure; a working directory belongs to one."""

    prompts: int
    hot: int
    preset: str
    d_inner: int | None
    steps: int
    ce_steps: int
    seeds: int
    slots: int
    seed: int


class Workplace:
    """The directory of one plan, and what has been made in it."""

    def __init__(self, place: Path, plan: Plan, progress: Progress) -> None:
        self.place, self.plan, self._progress = place, plan, progress
        place.mkdir(parents=True, exist_ok=True)
        told = json.dumps(asdict(plan), indent=2) + "\n"
        written = place / "plan.json"
        if written.exists() and written.read_text() != told:
            raise typer.BadParameter(f"{place} is of another plan: {written.read_text()}")
        written.write_text(told)
        directory = resolve_model(MODEL)
        self._tokenizer = ChatTokenizer.load(directory)
        self._config = ModelConfig.from_directory(directory)
        self._weights = load_model(directory, torch.device("cpu"), torch.bfloat16, with_mtp=False).weights

    @property
    def own(self) -> Path:
        return self.place / "own"

    @property
    def hot(self) -> Path:
        return self.place / "hot.safetensors"

    def data(self) -> None:
        """Answers, the generic corpus, the hot vocabulary and both extractions."""
        captured(self.place, self.plan.prompts, self.plan.seed, self._progress)
        templated(self.place, self.own, self._tokenizer, self._weights, self.plan.seed)
        if not self.hot.exists():
            build(find_shards([self.own]), self._tokenizer, self.plan.hot).hot.save(self.hot)
        for name in ("own", "generic"):
            options = ExtractOptions(
                inputs=(self.place / name,), model=MODEL, out=self._extracted(name), hot_vocab=self.hot
            )
            extract(options, self._report(f"extracting {name}"))

    def has(self, recipe: Recipe, seed: int) -> bool:
        return self._done(recipe, seed).is_file()

    def student(self, recipe: Recipe, seed: int) -> Path:
        """Its checkpoint, made unless it is there."""
        out = self._place_of(recipe, seed)
        if self.has(recipe, seed):
            return out
        steps, ce_steps = self.plan.steps, self.plan.ce_steps
        options = DistillOptions(
            data=self._extracted("generic" if recipe.generic else "own"),
            model=MODEL,
            hot_vocab=self.hot,
            out=out,
            preset=self.plan.preset,
            widths={} if self.plan.d_inner is None else {"d_inner": self.plan.d_inner},
            steps=steps,
            ce_steps=ce_steps,
            alpha=recipe.alpha,
            seed=seed,
        )
        if recipe.ce_alone:  # as many steps, from the rate that distillation begins with
            rate = options.settled(self._config).lr
            options = replace(options, steps=0, ce_steps=steps + ce_steps, ce_lr=rate)
        began = time.monotonic()
        distill(options, self._report(f"{recipe.name}, seed {seed}"))
        self._done(recipe, seed).write_text(json.dumps({"seconds": time.monotonic() - began}) + "\n")
        return out

    def judged(self, students: Sequence[Path]) -> Evaluation:
        options = EvaluateOptions(
            data=(self.own,),
            model=MODEL,
            drafters=("mtp", f"hot_vocab:{self.hot}", *map(str, students)),
            slots=self.plan.slots,
            every=self.plan.slots,
            temperatures=(),
            threads=1,
        )
        return evaluate(options, self._report("judging"))

    def _place_of(self, recipe: Recipe, seed: int) -> Path:
        return self.place / "students" / f"{recipe.short}-{seed}"

    def _done(self, recipe: Recipe, seed: int) -> Path:
        """Its seconds, written once it is finished."""
        return self._place_of(recipe, seed).with_suffix(".json")

    def _extracted(self, name: str) -> Path:
        return self.place / f"forced-{name}"

    def _report(self, name: str) -> Callable[[str, int, int], None]:
        task = self._progress.add_task(name)
        return lambda doing, done, total: self._progress.update(
            task, description=f"{name}: {doing}", completed=done, total=total
        )


def summary(found: Evaluation, made: Sequence[tuple[Recipe, int]]) -> list[dict[str, Any]]:
    """By contestant, students of one recipe together: figures of each seed and, of chain and τ, their mean."""
    native = found.rows[0]
    rows: dict[str, list[Row]] = {"native head": [native], "native head cut to the list": [found.rows[1]]}
    for row, (recipe, _) in zip(found.rows[2:], made, strict=True):
        rows.setdefault(recipe.name, []).append(row)
    return [_of_recipe(name, members, native) for name, members in rows.items()]


def _of_recipe(name: str, members: Sequence[Row], native: Row) -> dict[str, Any]:
    walks = [row.walk or {} for row in members]
    base = (native.walk or {})["chain"].value
    chains = [walk["chain"] for walk in walks]
    return {
        "name": name,
        "seeds": len(members),
        "parameters_read": members[0].parameters_read,
        "reads_over_native": members[0].parameters_read / native.parameters_read,
        "n": chains[0].n,
        "surv": [statistics.mean(walk["surv"][s].value for walk in walks) for s in range(len(walks[0]["surv"]))],
        "chain": statistics.mean(chain.value for chain in chains),
        "chain_over_native": statistics.mean(chain.value / base for chain in chains),
        "chain_by_seed": [(chain.value, chain.low, chain.high) for chain in chains],
        "less_native": [
            (row.difference["chain"].value, row.difference["chain"].low, row.difference["chain"].high)
            for row in members
            if row.difference
        ],
        "tau": statistics.mean(walk["tau"].value for walk in walks),
    }


def table(rows: Sequence[dict[str, Any]], found: Evaluation) -> Table:
    slots = found.slots
    columns = (
        "seeds",
        "reads",
        "of native's",
        *(f"surv {s}" for s in range(slots)),
        "chain by seed",
        "of native's",
        "τ",
    )
    apart = ", ".join(f"{count} {reason}" for reason, count in found.set_apart.items()) or "none"
    title = f"{found.documents} held-out answers, {found.tokens} tokens; set apart: {apart}"
    made = Table("drafter", *columns, title=title, caption="means over the seeds; chain with its 95 % interval")
    for row in rows:
        chains = (f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in row["chain_by_seed"])
        made.add_row(
            row["name"],
            str(row["seeds"]),
            f"{row['parameters_read']:,}",
            f"{row['reads_over_native']:.3f}",
            *(f"{value:.3f}" for value in row["surv"]),
            "\n".join(chains),
            f"{row['chain_over_native']:.3f}",
            f"{row['tau']:.2f}",
        )
    return made


def main(
    workdir: Annotated[Path, typer.Option(help="Where everything made is kept, and found again.")],
    prompts: Annotated[int, typer.Option(min=40, help="Answers to capture; a tenth of them is held out.")] = 2000,
    hot: Annotated[int, typer.Option(min=64, help="Ids of the students' output heads.")] = 2560,
    preset: Annotated[str, typer.Option(help="sv or sv-slim.")] = "sv-slim",
    d_inner: Annotated[int | None, typer.Option(help="The students' inner width, the preset's unless given.")] = 96,
    steps: Annotated[int, typer.Option(min=1, help="Steps of KD.")] = 800,
    ce_steps: Annotated[int, typer.Option(min=0, help="Steps of CE after them.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Students of each recipe.")] = 3,
    slots: Annotated[int, typer.Option(min=1, max=8, help="Draft tokens a step when judged.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    minutes: Annotated[float, typer.Option(help="No student is begun after so long; run again for the rest.")] = 30.0,
    figures: Annotated[Path | None, typer.Option("--json", help="Also write every figure here.")] = None,
) -> None:
    """Capture, train, judge, compare."""
    began = time.monotonic()
    torch.set_num_threads(1)
    console = Console()
    plan = Plan(prompts, hot, preset, d_inner, steps, ce_steps, seeds, slots, seed)
    wanted = [(recipe, number) for number in range(seeds) for recipe in RECIPES]
    with Progress(console=console, transient=True) as progress:
        work = Workplace(workdir, plan, progress)
        work.data()
        made: list[tuple[Recipe, int]] = []
        students: list[Path] = []
        for recipe, number in wanted:
            if (time.monotonic() - began) / 60 > minutes and not work.has(recipe, number):
                continue
            students.append(work.student(recipe, number))
            made.append((recipe, number))
        found = work.judged(students)
    rows = summary(found, made)
    console.print(table(rows, found))
    if len(made) < len(wanted):
        console.print(f"{len(wanted) - len(made)} students are yet to be made: run again with the same --workdir")
    if figures:
        written = {
            "plan": asdict(plan),
            "torch": torch.__version__,
            "minutes": (time.monotonic() - began) / 60,
            "rows": rows,
            "evaluation": found.as_json(),
        }
        figures.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
