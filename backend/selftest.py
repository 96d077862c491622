"""`serve --selftest`: is this checkpoint read and decoded right, here? A few answers, decoded in ways that must agree.

Nobody who writes this code may have run the user's weights: acceptance with the hidden states it believes in, beside
acceptance with the ones it does not, is how a first run tells. Knows no HTTP; every figure is counted as DESIGN §6.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from backend.drafters.diagnostic import PreNormDrafter, Rehearsal
from backend.drafters.protocol import Drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.draft_length import FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.sampling import Sampler, SamplingParams
from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Emission, Sequence
from backend.engine.speculation import Speculation
from backend.engine.statistics import SpeculationCounts
from backend.interface import BackendError, GenerationFailed, Step
from backend.loading import Loaded, LocalOptions, load
from backend.ops.linear import RowTile
from backend.text.answer import AnswerText

SLOTS = 3  # K of every speculative run here
TOKENS = 48  # an answer's most
_USUAL = 0.5  # slot 0 of a released MTP head accepts 60 to 90 % of its drafts

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short paragraph about the sea at night.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 * 23? Show each step.",
    "List the planets of the solar system in order.",
    "Erkläre in zwei Sätzen, was ein Computer ist.",
    'Return a JSON object with the keys "name", "age" and "city" for an invented person.',
    "Translate into Spanish: The library opens at nine and closes at six.",
    "What does this print?\n\nfor i in range(3):\n    print(i, i ** 2)",
    "用一句话介绍长城。",
    "Write an SQL query for the ten customers with the most orders.",
    "Summarise: Bees visit flowers for nectar. In passing they carry pollen, so that plants can set seed.",
    "Solve for x: 3x + 7 = 22.",
    "Name three differences between a list and a tuple in Python.",
    "Continue the story: The old clock struck thirteen, and the door",
    "Write a bash command that counts the lines of all .py files below the current directory.",
)


@dataclass(frozen=True)
class Answer:
    """What one prompt was answered with, and the verify steps it took."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Decoding:
    """Every prompt's answer under one drafter; `timed` tokens came in `seconds` during which no prompt was run."""

    name: str
    answers: tuple[Answer, ...]
    timed: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.timed / max(self.seconds, 1e-9)

    @property
    def steps(self) -> list[Step]:
        return [step for answer in self.answers for step in answer.steps]

    @property
    def acceptance_length(self) -> float:
        """τ = 1 + Σ A_s / verify steps."""
        return 1 + sum(step.accepted for step in self.steps) / max(len(self.steps), 1)

    def slots(self) -> list[tuple[int, int]]:
        """(A_s, P_s) of slots 0 … SLOTS - 1."""
        counts = SpeculationCounts([self.name], SLOTS)
        for step in self.steps:
            counts.add(self.name, step)
        (found,) = counts.snapshot()
        return list(zip(found.accepted_tokens_per_pos, found.draft_tokens_per_pos, strict=True))

    def identical_to(self, other: Decoding) -> int:
        """How many answers have bitwise the tokens and logprobs of `other`'s."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum((a.tokens, a.logprobs) == (b.tokens, b.logprobs) for a, b in pairs)


@dataclass(frozen=True)
class Findings:
    """The same prompts decoded in every way there is; without an MTP head, `post_norm` and `pre_norm` are None."""

    plain: Decoding
    post_norm: Decoding | None
    pre_norm: Decoding | None
    rehearsed: Decoding
    together: Decoding

    @property
    def speculative(self) -> list[Decoding]:
        return [d for d in (self.post_norm, self.pre_norm, self.rehearsed, self.together) if d is not None]


def run(options: LocalOptions, out: Console | None = None, tokens: int = TOKENS) -> int:
    """Decode the built-in prompts, at most `tokens` each, and print what was found; 0 if all is well, else 1.

    Raises BackendError when the checkpoint cannot be loaded at all.
    """
    console = out or Console()
    loaded = _load(options, console)
    _print_build(loaded, console)
    try:
        findings = measure(loaded, console, tokens)
    except GenerationFailed as error:
        failures = [str(error)]
    else:
        _print_decodings(findings, console)
        failures = [*build_failures(loaded), *decoding_failures(findings)]
    for line in failures:
        _say(console, f"[bold red]FAIL[/] {line}")
    if not failures:
        _say(console, "[bold green]PASS[/]")
    return 1 if failures else 0


def _load(options: LocalOptions, console: Console) -> Loaded:
    """The checkpoint with its MTP head, or without one where that is why it would not load."""
    try:
        return load(options)
    except BackendError as error:
        if options.drafter == "none":
            raise
        plain = load(replace(options, drafter="none", further_drafters=()))
        _say(console, f"Checked without a drafter: {escape(str(error))}")
        return plain


def measure(loaded: Loaded, console: Console, tokens: int = TOKENS) -> Findings:
    """Decode the prompts by K = 0, by K = SLOTS under every drafter, and all together. Raises GenerationFailed."""
    memory = loaded.loop.speculation.memory
    mtp = loaded.default if isinstance(loaded.default, RecursiveDrafter) else None
    prompts = [
        loaded.tokenizer.encode_chat([{"role": "user", "content": content}], {"enable_thinking": False}).ids
        for content in PROMPTS
    ]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("decoding", total=len(PROMPTS) * (5 if mtp else 3))

        def decoded(name: str, drafter: Drafter | None, together: int = 1) -> Decoding:
            # Without a prefix cache: every way runs every row itself.
            lengths = FixedDraftLength(SLOTS if drafter else 0)
            loop = Loop(Speculation(loaded.runner, memory, lengths), Scheduler(memory, together, None))
            asked = [_ask(loaded, prompt, index, drafter, tokens) for index, prompt in enumerate(prompts)]
            return _decode(name, loop, asked, lambda: progress.advance(task))

        plain = decoded("K = 0", None)
        known = Rehearsal({p: answer.tokens for p, answer in zip(prompts, plain.answers, strict=True)})
        slots = len(memory.slots.bases)
        return Findings(
            plain=plain,
            post_norm=decoded(f"K = {SLOTS}, {mtp.name}", mtp) if mtp else None,
            pre_norm=decoded(f"K = {SLOTS}, mtp pre-norm", PreNormDrafter(mtp, memory)) if mtp else None,
            rehearsed=decoded(f"K = {SLOTS}, {known.name}", known),
            together=decoded(f"K = {SLOTS}, {min(slots, len(PROMPTS))} at once", known, slots),
        )


@dataclass(frozen=True)
class _Asked:
    sequence: Sequence
    emissions: list[Emission]


def _ask(loaded: Loaded, prompt: tuple[int, ...], index: int, drafter: Drafter | None, tokens: int) -> _Asked:
    """Even prompts are answered greedily, odd ones sampled at temperature 1 from a fixed seed."""
    emissions: list[Emission] = []
    sequence = Sequence(
        id=str(index),
        prompt=prompt,
        sampler=Sampler(SamplingParams(temperature=float(index % 2), seed=index), loaded.vocab, prompt),
        max_tokens=tokens,
        eos_ids=loaded.tokenizer.eos_ids,
        text=AnswerText(loaded.tokenizer.text_bytes, ()),
        alternatives=0,
        on_emission=emissions.append,
        drafter=drafter,
    )
    return _Asked(sequence, emissions)


@torch.inference_mode()
def _decode(name: str, loop: Loop, asked: Ids[_Asked], advance: Callable[[], None]) -> Decoding:
    sequences = [one.sequence for one in asked]

    def reached() -> tuple[int, int, int]:
        """Prompt tokens run, tokens emitted, answers complete."""
        finished = sum(sequence.finish is not None for sequence in sequences)
        return sum(s.prefilled for s in sequences), sum(len(s.tokens) for s in sequences), finished

    for sequence in sequences:
        loop.add(sequence)
    timed, seconds, before = 0, 0.0, reached()
    while loop.busy:
        began = time.perf_counter()
        loop.turn()
        took, after = time.perf_counter() - began, reached()
        if after[0] == before[0]:
            seconds, timed = seconds + took, timed + after[1] - before[1]
        for _ in range(after[2] - before[2]):
            advance()
        before = after
    for one in asked:
        if error := one.emissions[-1].error:
            raise GenerationFailed(error)
    answers = (
        Answer(
            tokens=tuple(one.sequence.tokens),
            logprobs=tuple(one.sequence.logprobs),
            text="".join(emission.text for emission in one.emissions),
            steps=tuple(one.sequence.steps),
        )
        for one in asked
    )
    return Decoding(name, tuple(answers), timed, seconds)


def build_failures(loaded: Loaded) -> list[str]:
    """What the start-up probe found that the prefix law cannot live with."""
    found = loaded.probe
    return [
        f"{what} are not bitwise equal for every row count: answers depend on the draft length"
        for what, agree in (("attention rows", found.attention_rows_agree), ("verify blocks", found.blocks_agree))
        if not agree
    ]


def decoding_failures(findings: Findings) -> list[str]:
    """Answers that a drafter changed, and hidden states that the MTP head likes better than ours."""
    count = len(findings.plain.answers)
    failures = [
        f"{decoding.name}: {count - same} of {count} answers differ from K = 0"
        for decoding in findings.speculative
        if (same := decoding.identical_to(findings.plain)) < count
    ]
    if findings.post_norm and findings.pre_norm:
        post, pre = findings.post_norm.slots()[0], findings.pre_norm.slots()[0]
        if standard_errors(post, pre) < -2:
            failures.append(f"pre-norm accepts more: slot 0 {_share(pre)} against {_share(post)}; please report this")
    return failures


def remarks(findings: Findings) -> list[str]:
    """What the acceptance of the MTP head says about how it was read; nothing of it is a failure."""
    if not (findings.post_norm and findings.pre_norm):
        return ["No MTP head was checked."]
    post, pre = findings.post_norm.slots()[0], findings.pre_norm.slots()[0]
    apart, figures = standard_errors(post, pre), f"slot 0 accepts {_share(post)}, with pre-norm {_share(pre)}"
    said = []
    if apart > 2:
        said.append(f"Post-norm is right: {figures}.")
    elif apart >= -2:
        said.append(f"Post-norm and pre-norm cannot be told apart here: {figures}.")
    if post[0] < _USUAL * post[1]:
        said.append("Released checkpoints accept 60 to 90 % in slot 0: unless this one is untrained, please report it.")
    return said


def standard_errors(first: tuple[int, int], second: tuple[int, int]) -> float:
    """By how many standard errors the first (accepted, proposed) share exceeds the second; 0 where none can tell."""
    (a, n), (b, m) = first, second
    if not (n and m) or a + b in (0, n + m):
        return 0.0
    pooled = (a + b) / (n + m)
    return (a / n - b / m) / math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))


def _print_build(loaded: Loaded, console: Console) -> None:
    build, found, fingerprints = loaded.build, loaded.probe, loaded.fingerprints
    tiles = Counter(_tile(tile) for tile in found.tiles.values())
    rows = ", ".join(f"{kind} for {count}" for kind, count in tiles.items())
    said = {True: "bitwise equal", False: "[red]not bitwise equal[/]"}
    _say(console, f"weights {fingerprints.weights[:16]}, mtp {fingerprints.drafter[:16]}")
    _say(console, "{device}, {cpu_capability}, {threads} threads, {dtype}, torch {torch}".format(**build))
    _say(console, f"rows at a time, by projection shape: {rows}")
    _say(console, f"attention rows: {said[found.attention_rows_agree]}, verify blocks: {said[found.blocks_agree]}")


def _print_decodings(findings: Findings, console: Console) -> None:
    plain = findings.plain
    table = Table(
        title=f"{len(PROMPTS)} prompts, half greedy, half sampled",
        caption="same: tokens and logprobs bitwise those of K = 0. surv_s: A_s / P_s",
    )
    table.add_column("decoding", no_wrap=True)
    for column in ("same", *(f"surv_{slot}" for slot in range(SLOTS)), "τ", "tok/s"):
        table.add_column(column, justify="right")
    table.add_row(plain.name, "", *[""] * SLOTS, "", f"{plain.tokens_per_second:.1f}")
    for decoding in findings.speculative:
        table.add_row(
            decoding.name,
            f"{decoding.identical_to(plain)}/{len(plain.answers)}",
            *(_share(slot).replace(" (", "\n").rstrip(")") for slot in decoding.slots()),
            f"{decoding.acceptance_length:.2f}",
            f"{decoding.tokens_per_second:.1f}",
        )
    console.print(table)
    _say(console, f"[dim]{escape(PROMPTS[0])}[/]\n  {escape(plain.answers[0].text.strip())}")
    for line in remarks(findings):
        _say(console, line)


def _tile(tile: RowTile) -> str:
    if tile.fixed:
        return f"exactly {tile.rows}"
    return "any number" if tile.rows == 1 else f"multiples of {tile.rows}"


def _share(slot: tuple[int, int]) -> str:
    accepted, proposed = slot
    return f"{100 * accepted / proposed:.1f} % ({accepted}/{proposed})" if proposed else "-"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
