"""Students' speed against the native MTP head's, on a random checkpoint of a real shape: tokens/s end to end.

`python -m tests.benchmarks.student`. What a drafter computes is computed and paid for; what is accepted of it is
scripted, by the acceptances measured on the bundled model. `--steps`: a draft step of each against one verify. Asserts
nothing about figures.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the tests: before torch is imported

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from backend.drafters.protocol import Choose, Drafter, Proposal
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.draft_length import FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.probe import probe, settle
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.models.config import ModelConfig
from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.qwen3_5 import Qwen35
from backend.models.student import PRESETS, StudentBlock, StudentConfig
from tests.benchmarks.auto import Script, Scripted
from tests.decoding import Job, Request, make_loop
from tests.factory import BLOCK, NINE_B, WIDTHS_08B, Shape

Way = tuple[str, int]  # drafter, K
Survival = dict[str, tuple[float, ...]]  # surv_0 … of each drafter
PLAIN: Way = ("none", 0)

SHAPES = {
    "0.8b": replace(WIDTHS_08B, vocab=248_320, layers=BLOCK * 6),
    "9b": NINE_B,
}
# surv_0 … surv_3 of walks on the bundled model, as README has them under "Distil a student": the native head, whole and
# cut to 2,500 of 4,096 ids, and sv-slim students of these ids with 0.30 of its reads. No sv was trained there: it is
# given what sv-slim had.
ACCEPTANCES: Survival = {
    "mtp": (0.887, 0.819, 0.761, 0.709),
    "hot_vocab": (0.870, 0.785, 0.714, 0.651),
    "sv": (0.864, 0.778, 0.711, 0.650),
    "sv-slim": (0.864, 0.778, 0.711, 0.650),
}
MOST_SLOTS = 4
PROMPT_TOKENS = 40
GREEDY = SamplingParams(temperature=0)
_KEPT_FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")  # as when a checkpoint is loaded
_GOLDEN = 5**0.5 / 2 - 0.5


def random_model(shape: Shape, device: torch.device) -> Qwen35:
    """In bfloat16, made where it is to be: a file of the 9B would only be written to be read."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen35(ModelConfig.from_dict(shape.config()))
    model = model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(_KEPT_FLOAT32):
            parameter.data = parameter.data.float()
    model.to_empty(device=device)
    if shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    _fill(model)
    return model.requires_grad_(False).eval()


def random_student(preset: str, model: Qwen35, ids: torch.Tensor) -> StudentBlock:
    with ids.device:
        block = StudentBlock(StudentConfig.preset(preset, model.config, len(ids)), model.config, ids)
    block = block.to(torch.bfloat16)
    _fill(block)
    return block.requires_grad_(False).eval()


@torch.no_grad()
def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.02)


class BySlot(Scripted):
    """Runs a drafter, and proposes the known answer as far as in a step of its slots' acceptances.

    How far is the same for all sequences of a batch, and by Kronecker's sequence instead of by chance: in any run of
    steps the share of those that got past slot s is surv_s as nearly as can be.
    """

    def __init__(
        self, head: RecursiveDrafter, answers: dict[tuple[int, ...], tuple[int, ...]], survival: Sequence[float]
    ) -> None:
        super().__init__(head, answers, 0.0, head.model.config.vocab_size)
        self.draft_block = head.draft_block
        self._survival, self._steps = survival, 0
        self.seconds: list[float] = []  # of the drafting, while it is `timed`
        self.timed: Callable[[], None] | None = None  # waits for the device
        self.clock: Callable[[], float] = time.perf_counter

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> Script:
        self._steps = 0
        return super().new_state(prompt, pages)

    def propose(self, states: Sequence[Script], counts: Sequence[int], choose: Choose) -> Proposal:
        began = self._now()
        real = self._head.propose([state.head for state in states], counts, choose)
        self.seconds.append(self._now() - began)
        self._steps += 1
        at = self._steps * _GOLDEN % 1
        right = sum(at < survival for survival in self._survival)
        drafts = torch.zeros(len(states), max(counts), dtype=torch.int64)
        for row, state in enumerate(states):
            for slot, token in enumerate(state.ahead[: max(counts)]):
                drafts[row, slot] = token if slot < right else (token + 1) % self._vocab
        return Proposal(drafts.to(real.tokens.device), counts)

    def _now(self) -> float:
        if self.timed:
            self.timed()
        return self.clock()


@dataclass(frozen=True)
class Run:
    """Of one way in one round: seconds and tokens of all verify steps, and the median seconds of a step (with its
    drafting) and of a proposal; at an answer's end those are shorter."""

    seconds: float
    tokens: int
    turn: float
    proposal: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


Runs = dict[Way, list[Run]]


@dataclass(frozen=True)
class Bench:
    """A loop with all drafters attached, and what its streams are asked and answer."""

    loop: Loop
    drafters: dict[str, BySlot]  # by name
    answers: dict[tuple[int, ...], tuple[int, ...]]
    synchronize: Callable[[], None]
    clock: Callable[[], float]

    def run(self, way: Way, streams: int, timed: bool = False) -> Run:
        """So many streams to the end of their answers, which must be the known ones."""
        name, slots = way
        drafter = self.drafters.get(name)
        jobs = begun(self.loop, drafter, slots, list(self.answers)[:streams], len(next(iter(self.answers.values()))))
        if drafter:
            drafter.seconds, drafter.timed = [], self.synchronize if timed else None
            drafter.clock = self.clock
        self.synchronize()
        began, turns = self.clock(), []
        before_them = sum(len(job.sequence.tokens) for job in jobs)
        while not any(job.sequence.finish for job in jobs):  # so that the batch is whole
            before = self.clock()
            self.loop.turn()
            turns.append(self.clock() - before)
        self.synchronize()
        seconds = self.clock() - began
        tokens = sum(len(job.sequence.tokens) for job in jobs) - before_them
        self.loop.finish()
        for job in jobs:
            if tuple(job.sequence.tokens) != self.answers[tuple(job.sequence.prompt)]:
                raise RuntimeError(f"{name} at K = {slots} changed an answer")
        proposals = drafter.seconds if drafter else [0.0]
        return Run(seconds, tokens, statistics.median(turns), statistics.median(proposals))


def begun(
    loop: Loop, drafter: Drafter | None, slots: int, prompts: Sequence[tuple[int, ...]], tokens: int
) -> list[Job]:
    """A stream of each prompt, all with their first token."""
    loop.speculation.lengths = FixedDraftLength(0)  # or the first would end before the last has begun
    jobs = [Job(loop, Request(prompt, GREEDY, tokens), drafter) for prompt in prompts]
    for job in jobs:
        loop.add(job.sequence)
    while not all(job.sequence.decoding for job in jobs):
        loop.turn()
    loop.speculation.lengths = FixedDraftLength(slots)
    return jobs


def make(
    shape: Shape,
    device: torch.device,
    hot: int,
    streams: int,
    tokens: int,
    survival: Survival,
    clock: Callable[[], float],
) -> Bench:
    """The model, its drafters with what their rows need, and the answers that K = 0 gives."""
    model = random_model(shape, device)
    ids = torch.arange(hot, dtype=torch.int32, device=device)
    blocks: dict[str, DraftBlock] = {"mtp": NativeBlock(model), "hot_vocab": NativeBlock(model, ids)}
    blocks |= {preset: random_student(preset, model, ids) for preset in PRESETS}
    runner = Runner(model)
    heads = {
        name: RecursiveDrafter(model, block, name, name, "native" if isinstance(block, NativeBlock) else name)
        for name, block in blocks.items()
    }
    report = probe(runner)
    for head in heads.values():
        for module in head.draft_block.own:
            settle(module, report.tiles)
    loop = make_loop(runner, 0, list(heads.values()), positions=PROMPT_TOKENS + tokens, sequences=streams)
    prompts = [tuple(range(10 + 100 * i, 10 + 100 * i + PROMPT_TOKENS)) for i in range(streams)]
    jobs = begun(loop, None, 0, prompts, tokens)
    loop.finish()
    answers = {prompt: tuple(job.sequence.tokens) for prompt, job in zip(prompts, jobs, strict=True)}
    scripted = {name: BySlot(head, answers, survival[name]) for name, head in heads.items()}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return Bench(loop, scripted, answers, synchronize, clock)


def measure(
    bench: Bench, ways: Sequence[Way], streams: int, rounds: int, timed: bool, tick: Callable[[], None]
) -> Runs:
    """Every way once a round, in changing order; the first round is not counted."""
    runs: Runs = {way: [] for way in ways}
    for turn in range(rounds + 1):
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            run = bench.run(way, streams, timed)
            if turn:
                runs[way].append(run)
            tick()
    return runs


def ratios(runs: Runs, way: Way, base: Way) -> list[float]:
    """Of the speeds, round by round, so that what slows a whole round down cancels."""
    return [one.speed / other.speed for one, other in zip(runs[way], runs[base], strict=True)]


def told(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def best(runs: Runs, name: str) -> Way:
    """Its draft length with the most tokens a second."""
    return max((way for way in runs if way[0] == name), key=lambda way: statistics.median(ratios(runs, way, PLAIN)))


def speeds(runs: Runs, survival: Survival, title: str) -> Table:
    """Tokens a second of every way, as ratios; of each drafter its best K is bold."""
    made = Table(title=title, caption="ratios of tokens/s: median (range) over the rounds")
    for column in ("drafter", "K", "τ", "tokens/s", "over K = 0", "over mtp, same K", "over mtp, its best K"):
        made.add_column(column, justify="right")
    for way, of in runs.items():
        name, slots = way
        row = [name, str(slots), f"{1 + sum(survival.get(name, ())[:slots]):.2f}"]
        row += [f"{statistics.median(run.speed for run in of):.1f}", told(ratios(runs, way, PLAIN))]
        if slots:
            row += [told(ratios(runs, way, base)) for base in (("mtp", slots), best(runs, "mtp"))]
        made.add_row(*row, style="bold" if slots and way == best(runs, name) else "")
    return made


def draft_steps(bench: Bench, runs: Runs, title: str) -> Table:
    """Of each drafter: weights, the time of a proposal's first draft and of each further one, against one verify."""
    verify = statistics.median(run.turn for run in runs[PLAIN])
    made = Table(title=title, caption=f"a verify is a step at K = 0: {1000 * verify:.2f} ms; medians over the rounds")
    columns = ("weights read", "of mtp's", "first draft, ms", "further, ms", "of a verify", "of mtp's")
    for column in ("drafter", *columns):
        made.add_column(column, justify="right")
    further = {}
    for name, drafter in bench.drafters.items():
        lengths = sorted(slots for of, slots in runs if of == name)
        few, many = ((name, length) for length in (lengths[0], lengths[-1]))
        pairs = zip(runs[few], runs[many], strict=True)
        further[name] = statistics.median((b.proposal - a.proposal) / (many[1] - few[1]) for a, b in pairs)
        weights = drafter.draft_block.parameters_read
        first = statistics.median(run.proposal for run in runs[few]) - (few[1] - 1) * further[name]
        made.add_row(
            name,
            f"{weights:,}",
            f"{weights / bench.drafters['mtp'].draft_block.parameters_read:.3f}",
            f"{1000 * first:.2f}",
            f"{1000 * further[name]:.2f}",
            f"{further[name] / verify:.3f}",
            f"{further[name] / further['mtp']:.3f}",
        )
    return made


def accepted(given: Sequence[str]) -> Survival:
    """The defaults, and in their place what was given as name=s0,s1,…"""
    survival = dict(ACCEPTANCES)
    for one in given:
        name, _, listed = one.partition("=")
        try:
            slots = tuple(float(value) for value in listed.split(","))
        except ValueError:
            raise typer.BadParameter(f"{one!r} is not name=s0,s1,…") from None
        if name not in survival or len(slots) > MOST_SLOTS or not 1 >= slots[0] >= slots[-1] >= 0:
            raise typer.BadParameter(f"{one!r}: expected one of {', '.join(survival)} and at most {MOST_SLOTS} shares")
        if any(later > earlier for earlier, later in pairwise(slots)):
            raise typer.BadParameter(f"{one!r}: slots 0 … s are all accepted no less often than 0 … s + 1")
        survival[name] = slots
    return survival


def main(
    shape: Annotated[str, typer.Option(help=" or ".join(SHAPES))] = "0.8b",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    layers: Annotated[int | None, typer.Option(min=4, help="Decoder layers, a multiple of 4. Unset: all.")] = None,
    hot: Annotated[int, typer.Option(min=1, help="Rows of the cut heads.")] = 32_768,
    batch: Annotated[list[int], typer.Option(min=1, help="Streams at a time; may be given several times.")] = [1],  # noqa: B006
    slots: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "1,2,3,4",
    acceptance: Annotated[list[str], typer.Option(help="name=s0,s1,… : surv of a drafter's slots.")] = [],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of an answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    steps: Annotated[bool, typer.Option(help="Time the draft steps alone, waiting for the device after each.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    cpu_time: Annotated[
        bool, typer.Option(help="Seconds of this process's own work, where others take the cores; for one CPU thread.")
    ] = False,
    figures: Annotated[Path | None, typer.Option("--json", help="Also write every round's figures here.")] = None,
) -> None:
    """Measure every drafter at every draft length."""
    console = Console(width=150)
    torch.set_num_threads(threads)
    survival, lengths = accepted(acceptance), sorted({int(length) for length in slots.split(",")})
    if cpu_time and (threads > 1 or device != "cpu"):
        raise typer.BadParameter("--cpu-time is for one thread on the CPU")
    if shape not in SHAPES or not 1 <= lengths[0] <= lengths[-1] <= MOST_SLOTS or (steps and len(lengths) < 2):
        raise typer.BadParameter(f"expected a shape of {', '.join(SHAPES)} and draft lengths of 1 to {MOST_SLOTS}")
    asked = SHAPES[shape] if layers is None else replace(SHAPES[shape], layers=BLOCK * (layers // len(BLOCK)))
    written: dict[str, Any] = {"shape": shape, "layers": len(asked.layers), "hot": hot, "acceptance": survival}
    written |= {
        "cpu_time": cpu_time,
        "device": device,
        "torch": torch.__version__,
        "threads": threads,
        "tokens": tokens,
        "runs": [],
    }
    with torch.inference_mode():
        clock = time.process_time if cpu_time else time.perf_counter
        bench = make(asked, torch.device(device), hot, max(batch), tokens, survival, clock)
        ways = [PLAIN, *((name, length) for name in bench.drafters for length in lengths)]
        for streams in batch:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(f"{streams} streams", total=(rounds + 1) * len(ways))
                runs = measure(bench, ways, streams, rounds, steps, lambda: progress.advance(task))  # noqa: B023
            title = (
                f"{shape} of {len(asked.layers)} layers, {hot} hot rows, {streams} streams, {device}, {rounds} rounds"
            )
            console.print(draft_steps(bench, runs, title) if steps else speeds(runs, survival, title))
            written["runs"] += [
                {"drafter": name, "slots": length, "streams": streams, "rounds": [asdict(run) for run in of]}
                for (name, length), of in runs.items()
            ]
    written["parameters_read"] = {name: one.draft_block.parameters_read for name, one in bench.drafters.items()}
    if figures:
        figures.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
