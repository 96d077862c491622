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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from backend.models.hub import resolve_model
from backend.models.weights import load_model
from backend.text.tokenizer import ChatTokenizer
from tests.benchmarks.learning_data import captured, templated
from training.data import find_shards
from training.distill import distill
from training.distillation.options import DistillOptions
from training.evaluate.evaluation import EvaluateOptions, Evaluation, Row, evaluate
from training.evaluate.figures import Figure
from training.extract import ExtractOptions, extract
from training.hot_vocab import build
from training.learning import figures_of
from training.ledger import Ledger

MODEL = "tiny"
# Under 0.30 of the native head's reads: of its 4,096 rows nearly all that answers use, at a width that pays for them.
WIDTHS = ("d_inner=128", "intermediate_size=256")


@dataclass(frozen=True)
class Recipe:
    """A way to make a student. `generic`: from texts that the model did not generate; `ce_alone`: by their tokens."""

    name: str
    short: str
    alpha: float = 1.0
    ce_alone: bool = False
    generic: bool = False


MAIN = Recipe("own answers, α 1", "main")
RECIPES = (
    MAIN,
    Recipe("α 0.5", "half", alpha=0.5),
    Recipe("α 0", "native", alpha=0.0),
    Recipe("CE alone", "ce", ce_alone=True),
    Recipe("generic corpus", "generic", generic=True),  # of as many tokens
)
NATIVE, CUT = "native head", "native, cut"


@dataclass(frozen=True)
class Plan:
    """What decides every figure; a working directory belongs to one."""

    prompts: int
    hot: int
    preset: str
    widths: dict[str, int]  # in place of the preset's
    lr: float
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
        self.ledger = Ledger.beside(place / "plan.json")
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
            widths=self.plan.widths,
            lr=self.plan.lr,
            steps=steps,
            ce_steps=ce_steps,
            alpha=recipe.alpha,
            seed=seed,
        )
        if recipe.ce_alone:  # as many steps, from the rate that distillation begins with
            options = replace(options, steps=0, ce_steps=steps + ce_steps, ce_lr=self.plan.lr)
        began = time.monotonic()
        with self.ledger.run("distill", options, [options.data]) as entry:
            distill(options, self._report(f"{recipe.name}, seed {seed}"))
            entry.figures, entry.fingerprints = figures_of(out)
            entry.seeds = {"seed": seed}
        self._done(recipe, seed).write_text(json.dumps({"seconds": time.monotonic() - began}) + "\n")
        return out

    def judged(self, made: Sequence[Recipe], seed: int) -> tuple[Evaluation, dict[str, Row]]:
        """The students of one seed and the native heads on the held-out answers; differences are to the first one."""
        students = [str(self._place_of(recipe, seed)) for recipe in made]
        options = EvaluateOptions(
            data=(self.own,),
            model=MODEL,
            drafters=(*students, "mtp", f"hot_vocab:{self.hot}"),
            slots=self.plan.slots,
            every=self.plan.slots,
            temperatures=(),
            threads=1,
        )
        found = evaluate(options, self._report(f"judging seed {seed}"))
        names = [*(recipe.name for recipe in made), NATIVE, CUT]
        return found, dict(zip(names, found.rows, strict=True))

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


def summary(seeds: Sequence[dict[str, Row]]) -> list[dict[str, Any]]:
    """A row for each recipe and native head over all seeds: each seed's figures, and their means."""
    names = dict.fromkeys((NATIVE, CUT, *(name for seed in seeds for name in seed)))
    return [_of_recipe(name, [seed for seed in seeds if name in seed]) for name in names]


def _of_recipe(name: str, seeds: Sequence[dict[str, Row]]) -> dict[str, Any]:
    rows, natives = [seed[name] for seed in seeds], [seed[NATIVE] for seed in seeds]
    walks, strides = [row.walk or {} for row in rows], [row.stride or {} for row in rows]
    chains = [walk["chain"] for walk in walks]
    ratios = [chain.value / (native.walk or {})["chain"].value for chain, native in zip(chains, natives, strict=True)]
    return {
        "name": name,
        "seeds": len(rows),
        "parameters_read": rows[0].parameters_read,
        "reads_over_native": rows[0].parameters_read / natives[0].parameters_read,
        "drafts": [chain.n for chain in chains],
        "surv": _means(walk["surv"] for walk in walks),
        "cond": _means(walk["cond"] for walk in walks),
        "hit": _means(stride["hit"] for stride in strides),
        "chain": statistics.mean(chain.value for chain in chains),
        "chain_over_native": statistics.mean(ratios),
        "chain_by_seed": [asdict(chain) for chain in chains],
        "chain_less_main": [asdict(row.difference["chain"]) for row in rows if row.difference],
        "tau": statistics.mean(walk["tau"].value for walk in walks),
        "tau_by_seed": [asdict(walk["tau"]) for walk in walks],
    }


def _means(by_seed: Iterable[Sequence[Figure]]) -> list[float]:
    """Of each slot, over the seeds."""
    return [statistics.mean(figure.value or 0.0 for figure in slot) for slot in zip(*by_seed, strict=True)]


def table(rows: Sequence[dict[str, Any]], found: Evaluation) -> Table:
    """Chain by seed; in parentheses what it is less the first recipe's, on the same documents."""
    apart = ", ".join(f"{count} {reason}" for reason, count in found.set_apart.items()) or "none"
    made = Table(
        *("drafter", "reads", "surv by slot", "chain by seed", f"less {MAIN.name}", "of native's", "τ"),
        title=f"{found.documents} held-out answers, {found.tokens} tokens; set apart: {apart}",
        caption="reads, surv, τ: means over the seeds; chain with 95 % intervals; reads and chain of the native head's",
    )
    for row in rows:
        made.add_row(
            row["name"],
            f"{row['reads_over_native']:.3f}",
            " ".join(f"{value:.2f}" for value in row["surv"]),
            "\n".join(map(_told, row["chain_by_seed"])),
            "\n".join(map(_told, row["chain_less_main"])),
            f"{row['chain_over_native']:.3f}",
            f"{row['tau']:.2f}",
        )
    return made


def _told(figure: dict[str, Any]) -> str:
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def main(
    workdir: Annotated[Path, typer.Option(help="Where everything made is kept, and found again.")],
    prompts: Annotated[int, typer.Option(min=40, help="Answers to capture; a tenth of them is held out.")] = 8000,
    hot: Annotated[int, typer.Option(min=64, help="Ids of the students' output heads.")] = 2500,
    preset: Annotated[str, typer.Option(help="sv or sv-slim.")] = "sv-slim",
    width: Annotated[
        list[str] | None,
        typer.Option(help=f"NAME=N, in place of the preset's; again for each. {' and '.join(WIDTHS)} unless given."),
    ] = None,
    lr: Annotated[float, typer.Option(help="That KD begins with.")] = 2e-3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of KD.")] = 500,
    ce_steps: Annotated[int, typer.Option(min=0, help="Steps of CE after them.")] = 60,
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
    widths = dict(one.split("=") for one in width or WIDTHS)
    plan = Plan(
        prompts, hot, preset, {name: int(n) for name, n in widths.items()}, lr, steps, ce_steps, seeds, slots, seed
    )
    judged: list[tuple[Evaluation, dict[str, Row]]] = []
    missing = 0
    with Progress(console=console, transient=True) as progress:
        work = Workplace(workdir, plan, progress)
        work.data()
        for number in range(seeds):
            made: list[Recipe] = []
            for recipe in RECIPES:
                if work.has(recipe, number) or (time.monotonic() - began) / 60 < minutes:
                    work.student(recipe, number)
                    made.append(recipe)
            missing += len(RECIPES) - len(made)
            if MAIN in made:
                judged.append(work.judged(made, number))
    if not judged:
        raise typer.BadParameter(f"{minutes} minutes were not enough for any student: run again with the same workdir")
    rows = summary([rows for _, rows in judged])
    with work.ledger.run("learning", plan) as entry:
        entry.figures = {"drafters": rows}
    console.print(table(rows, judged[0][0]))
    if missing:
        console.print(f"{missing} students are yet to be made: run again with the same --workdir")
    if figures:
        written = {
            "plan": asdict(plan),
            "torch": torch.__version__,
            "minutes": (time.monotonic() - began) / 60,
            "rows": rows,
            "evaluations": [found.as_json() for found, _ in judged],
        }
        figures.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
