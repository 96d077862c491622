"""Drafters side by side on the same documents: served step by step (walk), and from the same anchors (stride).

What is compared, over what, and what was set apart; the arithmetic is in `walk`, `stride` and `figures`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.engine.sampling import SamplingParams
from backend.models.qwen3_5 import Qwen35
from training.data import Document, Forced, Shard, find_shards, read_documents
from training.errors import TrainingError
from training.evaluate.choices import choices, first_difference
from training.evaluate.corpus import texts
from training.evaluate.figures import Bootstrap, Figure, Strided, Walked, depths
from training.evaluate.following import sampling_of
from training.evaluate.opening import Contestant, Opened, open_all
from training.evaluate.stride import Judged, StrideOptions, judged, stride
from training.evaluate.walk import walk
from training.force import force_documents
from training.repetition import loops

Report = Callable[[str, int, int], None]

LOOPS, DIFFERS, UNKNOWN, SHORT = "loops", "chosen otherwise here", "sampling unknown", "no step"
"""Why a document is set apart: it repeats itself; the target does not choose its tokens (another build, a grammar); the
same, and the capture does not say how it was sampled; it has fewer than two generated tokens."""


@dataclass(frozen=True)
class EvaluateOptions:
    """`data`: exports or shards; `text`: files of fixed text. `drafters` as `serve --drafter` has them, or a student's
    directory; differences are to the first. `every`: anchors every so many positions, None for walks alone. `held_out`:
    those documents alone. `seed`: of the bootstrap and of coupled sampling's noise."""

    data: tuple[Path, ...] = ()
    text: tuple[Path, ...] = ()
    model: str = "tiny"
    drafters: tuple[str, ...] = ("mtp",)
    slots: int = 4
    every: int | None = None
    temperatures: tuple[float, ...] = (0.7, 1.0)
    held_out: bool = True
    most: int | None = None  # documents
    longest_text: int = 65_536  # tokens
    rounds: int = 1000  # of the bootstrap
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Row:
    """One drafter's figures. `walk` and `stride` are of all documents that were not set apart; `by` of groups of them:
    name of the grouping → group → figures. `difference`: to the first row, on the same documents."""

    name: str
    given: str
    fingerprint: str
    parameters_read: int
    walk: Mapping[str, Any] | None
    stride: Mapping[str, Any] | None
    by: Mapping[str, Mapping[str, Mapping[str, Any]]]
    difference: Mapping[str, Figure] | None


@dataclass(frozen=True)
class Evaluation:
    """`documents` were used, of `tokens` generated ones; `set_apart` by reason. `texts`: rows over fixed texts, whose
    strides judge drafts by the target's own choices."""

    fingerprints: Mapping[str, str]
    slots: int
    every: int | None
    seed: int
    documents: int
    tokens: int
    set_apart: Mapping[str, int]
    rows: tuple[Row, ...]
    texts: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    options: EvaluateOptions, report: Report = lambda doing, done, total: None, opened: Opened | None = None
) -> Evaluation:
    """Compare drafters. `opened`: a model and drafters that are loaded already.

    Raises TrainingError where there is nothing to compare over, or data is of other weights than the model's, and
    BackendError where the model or a drafter cannot be loaded.
    """
    if not (options.data or options.text):
        raise TrainingError("nothing to evaluate on: an export of captured answers or --text is needed")
    shards = find_shards(options.data)
    opened = opened or open_all(options.model, options.drafters, options.device, options.dtype, options.threads)
    loaded = opened.model
    used, looping, set_apart = _own(shards, options, opened, report) if shards else ([], [], Counter[str]())
    if options.data and not used:
        told = ", ".join(f"{count} {reason}" for reason, count in set_apart.items()) or "there are none"
        raise TrainingError(f"no document to evaluate on: {told}")
    rows = compare(loaded.runner.model, loaded.vocab, opened.contestants, used, options, report, looping)
    documents = texts(options.text, loaded.tokenizer, min(options.longest_text, loaded.config.max_position_embeddings))
    forced = force_documents(loaded.runner, documents, report) if documents else []
    return Evaluation(
        fingerprints={
            name: getattr(loaded.fingerprints, name) for name in ("weights", "tokenizer", "chat_template", "build")
        },
        slots=options.slots,
        every=options.every,
        seed=options.seed,
        documents=len(used),
        tokens=sum(len(one.document.answer) for one in used),
        set_apart=dict(set_apart),
        rows=tuple(rows),
        texts=tuple(_over_texts(loaded.runner.model, loaded.vocab, opened.contestants, forced, options, report)),
    )


def compare(
    model: Qwen35,
    vocab: int,
    contestants: Sequence[Contestant],
    documents: Sequence[Forced],
    options: EvaluateOptions,
    report: Report = lambda doing, done, total: None,
    looping: Sequence[Forced] = (),
) -> list[Row]:
    """A row for each drafter over answers the model itself chose; `looping` ones are told of as a group apart."""
    if not documents:
        return []
    every = [*documents, *looping]
    anchored = _anchored(model, vocab, documents, options)
    groups = _groups([forced.document for forced in documents])
    bootstrap = Bootstrap(len(documents), options.rounds, options.seed)
    rows: list[Row] = []
    first: tuple[Walked, Strided | None] | None = None
    for one in contestants:
        heard = _heard(report, f"walking {one.name}", len(every))
        counts = walk(model, one.drafter, every, options.slots, vocab=vocab, report=heard)
        walked = Walked.of(counts[: len(documents)])
        by: dict[str, dict[str, dict[str, Any]]] = {}
        for grouping, members in groups.items():
            by[grouping] = {
                group: {"documents": len(who), "walk": _part(walked, who, options)} for group, who in members.items()
            }
        if looping:
            apart = Walked.of(counts[len(documents) :])
            figures = apart.figures(Bootstrap(len(looping), options.rounds, options.seed))
            by["set apart"] = {LOOPS: {"documents": len(looping), "walk": figures}}
        strided = _strided(model, vocab, one, anchored, options, report)
        if strided:
            by["depth"] = _by_depth(strided, bootstrap)
        difference: dict[str, Figure] | None = None
        if first is None:
            first = walked, strided
        else:
            difference = {
                "tau": bootstrap.difference(walked.tau, first[0].tau),
                "chain": bootstrap.difference(walked.chain, first[0].chain),
            }
            if strided and first[1]:
                difference["stride_chain"] = bootstrap.difference(strided.chain(), first[1].chain())
        rows.append(
            Row(
                name=one.name,
                given=one.given,
                fingerprint=one.drafter.fingerprint,
                parameters_read=one.parameters_read,
                walk=walked.figures(bootstrap),
                stride=strided.figures(bootstrap) if strided else None,
                by=by,
                difference=difference,
            )
        )
    return rows


def _own(
    shards: Sequence[Shard], options: EvaluateOptions, opened: Opened, report: Report
) -> tuple[list[Forced], list[Forced], Counter[str]]:
    """Documents to compare over, those that loop, and how many were set apart for each reason."""
    loaded = opened.model
    documents = read_documents(shards, loaded.tokenizer.fingerprint, loaded.config.vocab_size)
    wanted = [one for one in documents if one.held_out or not options.held_out][: options.most]
    mine = loaded.fingerprints.weights
    if other := next((one for one in wanted if one.weights != mine), None):
        raise TrainingError(
            f"document {other.id} was generated by other weights ({other.weights[:12]}) than the model's ({mine[:12]})"
        )
    set_apart: Counter[str] = Counter()
    enough = [one for one in wanted if len(one.answer) > 1]
    if len(wanted) > len(enough):
        set_apart[SHORT] = len(wanted) - len(enough)
    used, looping = [], []
    for forced in force_documents(loaded.runner, enough, report):
        document = forced.document
        if first_difference(loaded.runner.model, forced, loaded.vocab) is not None:
            set_apart[UNKNOWN if document.sampling is None else DIFFERS] += 1
        elif loops(document.answer):
            set_apart[LOOPS] += 1
            looping.append(forced)
        else:
            used.append(forced)
    return used, looping, set_apart


def _over_texts(
    model: Qwen35,
    vocab: int,
    contestants: Sequence[Contestant],
    documents: Sequence[Forced],
    options: EvaluateOptions,
    report: Report,
) -> list[Row]:
    if not documents:
        return []
    anchors = _stride_options(options)
    greedy = SamplingParams(temperature=0.0)
    anchored = [judged(model, one, choices(model, one, greedy, vocab), anchors, vocab) for one in documents]
    bootstrap = Bootstrap(len(documents), options.rounds, options.seed)
    rows = []
    for one in contestants:
        strided = _strided(model, vocab, one, anchored, options, report)
        assert strided
        alone = Bootstrap(1, options.rounds, options.seed)
        by = {
            "depth": _by_depth(strided, bootstrap),
            "text": {
                forced.document.id: {"documents": 1, "stride": strided.part([i]).figures(alone)}
                for i, forced in enumerate(documents)
            },
        }
        figures = strided.figures(bootstrap)
        rows.append(Row(one.name, one.given, one.drafter.fingerprint, one.parameters_read, None, figures, by, None))
    return rows


def _anchored(model: Qwen35, vocab: int, documents: Sequence[Forced], options: EvaluateOptions) -> list[Judged]:
    """Nothing where no stride is asked for."""
    if options.every is None:
        return []
    anchors = _stride_options(options)
    return [judged(model, one, one.document.answer, anchors, vocab) for one in documents]


def _strided(
    model: Qwen35, vocab: int, one: Contestant, anchored: Sequence[Judged], options: EvaluateOptions, report: Report
) -> Strided | None:
    if not anchored:
        return None
    heard = _heard(report, f"anchors of {one.name}", len(anchored))
    return Strided.of(stride(model, one.drafter, anchored, _stride_options(options), vocab, report=heard))


def _stride_options(options: EvaluateOptions) -> StrideOptions:
    return StrideOptions(options.slots, options.every or options.slots, options.temperatures, options.seed)


def _groups(documents: Sequence[Document]) -> dict[str, dict[str, list[int]]]:
    """By what the documents are told apart: group → which of them."""
    temperatures: dict[str, list[int]] = {}
    for i, document in enumerate(documents):
        temperatures.setdefault(f"{sampling_of(document).temperature:g}", []).append(i)
    return {"temperature": dict(sorted(temperatures.items()))}


def _part(walked: Walked, who: Sequence[int], options: EvaluateOptions) -> dict[str, Any]:
    return walked.part(who).figures(Bootstrap(len(who), options.rounds, options.seed))


def _by_depth(strided: Strided, bootstrap: Bootstrap) -> dict[str, dict[str, Any]]:
    """Of the depths that have anchors."""
    figures = {name: strided.figures(bootstrap, depth) for depth, name in enumerate(depths())}
    return {name: {"stride": found} for name, found in figures.items() if found["anchors"]}


def _heard(report: Report, doing: str, total: int) -> Callable[[int], None]:
    report(doing, 0, total)
    return lambda done: report(doing, done, total)
