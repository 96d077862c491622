"""Drafters side by side on the same documents: served step by step (walk), and from the same anchors (stride).

What is compared, over what, and what was set apart; the arithmetic is in `walk`, `stride` and `figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.engine.sampling import SamplingParams
from backend.loading import Loaded
from backend.models.qwen3_5 import Qwen35
from training.data import Document, Forced
from training.errors import TrainingError
from training.evaluate.choices import choices
from training.evaluate.corpus import texts
from training.evaluate.figures import Bootstrap, Figure, Strided, Walked, depths
from training.evaluate.following import sampling_of
from training.evaluate.gathering import LOOPS, Report, gather, sources
from training.evaluate.opening import Contestant, Opened, open_all
from training.evaluate.stride import Judged, StrideOptions, judged, stride
from training.evaluate.walk import walk
from training.force import force_documents

NEW, KNOWN = "new", "known"
"""Held-out answers by what training's answers say."""


@dataclass(frozen=True)
class EvaluateOptions:
    """`data`: exports, shards or extractions, each a class of its own where there are several; `text`: files of fixed
    text. `drafters`: mtp, prediction, hot_vocab:FILE or a student's directory; differences are to the first. `every`:
    anchors every so many positions, None for walks alone. `held_out`: those documents alone. `seed`: of the bootstrap
    and of coupled sampling's noise."""

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
    """`documents` were used, of `tokens` generated ones; `known` of them have a gram of a training answer (`overlap`)
    and are told of as a group, apart from those that have none; `set_apart` by reason. `texts`: rows over fixed texts,
    whose strides judge drafts by the target's own choices."""

    fingerprints: Mapping[str, str]
    slots: int
    every: int | None
    seed: int
    documents: int
    tokens: int
    known: int
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
    data = sources(options.data)
    opened = opened or open_all(options.model, options.drafters, options.device, options.dtype, options.threads)
    loaded = opened.model
    own = gather(data, loaded, held_out=options.held_out, most=options.most, report=report)
    if data and not own.used:
        told = ", ".join(f"{count} {reason}" for reason, count in own.set_apart.items()) or "there are none"
        raise TrainingError(f"no document to evaluate on: {told}")
    rows = compare(
        loaded,
        opened.contestants,
        own.used,
        options,
        report,
        looping=own.looping,
        classes=own.classes,
        known=own.known,
    )
    documents = texts(options.text, loaded.tokenizer, min(options.longest_text, loaded.config.max_position_embeddings))
    forced = force_documents(loaded.runner, documents, report) if documents else []
    return Evaluation(
        fingerprints={
            name: getattr(loaded.fingerprints, name) for name in ("weights", "tokenizer", "chat_template", "build")
        },
        slots=options.slots,
        every=options.every,
        seed=options.seed,
        documents=len(own.used),
        tokens=sum(len(one.document.answer) for one in own.used),
        known=len(own.known),
        set_apart=dict(own.set_apart),
        rows=tuple(rows),
        texts=tuple(_over_texts(loaded, opened.contestants, forced, options, report)),
    )


def compare(
    loaded: Loaded,
    contestants: Sequence[Contestant],
    documents: Sequence[Forced],
    options: EvaluateOptions,
    report: Report = lambda doing, done, total: None,
    *,
    looping: Sequence[Forced] = (),
    classes: Mapping[str, str] | None = None,
    known: Collection[str] = (),
) -> list[Row]:
    """A row for each drafter over answers the model itself chose; `looping` ones are told of as a group apart.

    `classes`: of each document by its id, where they are to be told apart. `known`: ids of those that training has
    parts of.
    """
    if not documents:
        return []
    model, vocab = loaded.runner.model, loaded.vocab
    every = [*documents, *looping]
    anchored = _anchored(model, vocab, documents, options)
    groups = _groups([forced.document for forced in documents], classes or {}, known)
    bootstrap = Bootstrap(len(documents), options.rounds, options.seed)
    rows: list[Row] = []
    first: tuple[Walked, Strided | None] | None = None
    for one in contestants:
        heard = _heard(report, f"walking {one.name}", len(every))
        counts = walk(model, one.drafter, every, options.slots, vocab=vocab, report=heard)
        walked = Walked.of(counts[: len(documents)])
        strided = _strided(model, vocab, one, anchored, options, report)
        by = {
            grouping: {group: _part(walked, strided, who, options) for group, who in members.items()}
            for grouping, members in groups.items()
        }
        if looping:
            apart = Walked.of(counts[len(documents) :])
            figures = apart.figures(Bootstrap(len(looping), options.rounds, options.seed))
            by["set apart"] = {LOOPS: {"documents": len(looping), "walk": figures}}
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


def _over_texts(
    loaded: Loaded,
    contestants: Sequence[Contestant],
    documents: Sequence[Forced],
    options: EvaluateOptions,
    report: Report,
) -> list[Row]:
    if not documents:
        return []
    model, vocab = loaded.runner.model, loaded.vocab
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


def _groups(
    documents: Sequence[Document], classes: Mapping[str, str], known: Collection[str]
) -> dict[str, dict[str, list[int]]]:
    """By what the documents are told apart: group → which of them."""
    found: dict[str, dict[str, list[int]]] = {"temperature": {}}
    found |= {name: {} for name, given in (("class", classes), ("training", known)) if given}
    for i, document in enumerate(documents):
        found["temperature"].setdefault(f"{sampling_of(document).temperature:g}", []).append(i)
        if classes:
            found["class"].setdefault(classes[document.id], []).append(i)
        if known:
            found["training"].setdefault(KNOWN if document.id in known else NEW, []).append(i)
    return {grouping: dict(sorted(groups.items())) for grouping, groups in found.items()}


def _part(walked: Walked, strided: Strided | None, who: Sequence[int], options: EvaluateOptions) -> dict[str, Any]:
    bootstrap = Bootstrap(len(who), options.rounds, options.seed)
    found = {"documents": len(who), "walk": walked.part(who).figures(bootstrap)}
    return found | ({"stride": strided.part(who).figures(bootstrap)} if strided else {})


def _by_depth(strided: Strided, bootstrap: Bootstrap) -> dict[str, dict[str, Any]]:
    """Of the depths that have anchors."""
    figures = {name: strided.figures(bootstrap, depth) for depth, name in enumerate(depths())}
    return {name: {"stride": found} for name, found in figures.items() if found["anchors"]}


def _heard(report: Report, doing: str, total: int) -> Callable[[int], None]:
    report(doing, 0, total)
    return lambda done: report(doing, done, total)
