"""The documents of an evaluation: found, forced, and set apart where they are no measure of serving.

Reads exports (which it forces) and extractions (which were). Knows no drafter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backend.loading import Loaded
from training.data import Document, Forced, Shard, find_shards, read_documents
from training.errors import TrainingError
from training.evaluate.choices import first_difference
from training.evaluate.overlap import Learned
from training.force import force_documents
from training.forced import FORMAT, MANIFEST, read_forced, read_manifest
from training.repetition import loops

Report = Callable[[str, int, int], None]

LOOPS, DIFFERS, UNKNOWN, SHORT = "loops", "chosen otherwise here", "sampling unknown", "no step"
"""Why a document is set apart: it repeats itself; the target does not choose its tokens (another build, a grammar); the
same, and the capture does not say how it was sampled; it has fewer than two generated tokens."""


@dataclass(frozen=True)
class Source:
    """An export's shards, or an extraction's folder. `name`: of the class its documents are."""

    name: str
    shards: tuple[Shard, ...]
    folder: Path | None = None


@dataclass
class Gathered:
    """`used` documents, those that loop, and how many were set apart by reason; `classes`: the source of each by id,
    where there are several sources; `known`: ids of used held-out ones that have a gram of a training answer."""

    used: list[Forced] = field(default_factory=list)
    looping: list[Forced] = field(default_factory=list)
    set_apart: Counter[str] = field(default_factory=Counter)
    classes: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)


def sources(data: Sequence[Path]) -> list[Source]:
    """What is there to read, in given order. Raises TrainingError where one is missing or incomplete."""
    found: list[Source] = []
    for given in data:
        name = given.name if given.name not in [one.name for one in found] else str(given)
        if _is_extraction(given):
            read_manifest(given)
            found.append(Source(name, (), given))
        else:
            found.append(Source(name, tuple(find_shards([given]))))
    return found


def gather(given: Sequence[Source], loaded: Loaded, *, held_out: bool, most: int | None, report: Report) -> Gathered:
    """The documents of the sources, each once, at most `most` of them; `held_out`: of that split alone.

    Raises TrainingError for a damaged shard, and for documents of other weights or another tokenizer.
    """
    found = Gathered()
    taken: set[str] = set()
    learned: list[NDArray[np.int32]] = []
    for source in given:
        for forced in _forced(source, loaded, held_out, most, taken, learned, report):
            document = forced.document
            if len(given) > 1:
                found.classes[document.id] = source.name
            if len(document.answer) < 2:
                found.set_apart[SHORT] += 1
            elif first_difference(loaded.runner.model, forced, loaded.vocab) is not None:
                found.set_apart[UNKNOWN if document.sampling is None else DIFFERS] += 1
            elif loops(document.answer):
                found.set_apart[LOOPS] += 1
                found.looping.append(forced)
            else:
                found.used.append(forced)
    if held_out:
        training = Learned(learned)
        found.known = {one.document.id for one in found.used if training.has_part_of(_answer(one.document))}
    return found


def _forced(
    source: Source,
    loaded: Loaded,
    held_out: bool,
    most: int | None,
    taken: set[str],
    learned: list[NDArray[np.int32]],
    report: Report,
) -> Iterator[Forced]:
    def is_wanted(document: Document) -> bool:
        """Takes it in, or of one of training its answer."""
        if not document.held_out:
            learned.append(_answer(document))
        is_one = (document.held_out or not held_out) and document.id not in taken
        if not is_one or (most is not None and len(taken) >= most):
            return False
        _check(document, loaded.fingerprints.weights)
        taken.add(document.id)
        return True

    if source.folder is not None:
        theirs = read_manifest(source.folder)["fingerprints"]["tokenizer"]
        if theirs != loaded.tokenizer.fingerprint:
            raise TrainingError(f"{source.folder} is of another tokenizer ({theirs[:12]}) than the model")
        yield from (forced for forced in read_forced(source.folder) if is_wanted(forced.document))
    else:
        documents = read_documents(source.shards, loaded.tokenizer.fingerprint, loaded.config.vocab_size)
        yield from force_documents(loaded.runner, [one for one in documents if is_wanted(one)], report)


def _answer(document: Document) -> NDArray[np.int32]:
    return document.tokens[document.prompt_length :]


def _check(document: Document, mine: str) -> None:
    if not document.prompt_length:
        raise TrainingError(f"document {document.id} has no prompt: nothing comes before its answer")
    if document.weights != mine:
        raise TrainingError(
            f"document {document.id} was generated by other weights ({document.weights[:12]}) than the model's "
            f"({mine[:12]})"
        )


def _is_extraction(path: Path) -> bool:
    """Anything else is `find_shards`' to judge."""
    try:
        return bool(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False
