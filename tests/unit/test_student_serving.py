"""Students beside the model's own head on the bundled model: law L2 whoever drafts, equal counts of equal heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.drafters.protocol import Drafter
from backend.drafters.student import StudentHeader, Target, save_student
from backend.engine.cache import pages_for
from backend.engine.draft_length import FixedDraftLength
from backend.engine.sampling import SamplingParams
from backend.interface import BackendError
from backend.loading import GIB, Loaded, LocalOptions, load
from backend.models.student import StudentBlock, StudentConfig
from backend.models.weights import LoadedModel, load_model
from backend.text.tokenizer import ChatTokenizer
from tests.checkpoints import BUNDLED
from tests.decoding import Job, Outcome, Request
from training.student import How, initialise

TOKENS = 24
SYSTEM = "You answer in short sentences, you never repeat what was asked, and you say so where you do not know. " * 4
ASKED = ("What is a list in Python?", "Write a function that adds two numbers.")
SAMPLERS = (SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.95, seed=3))


def save(directory: Path, of: LoadedModel, config: StudentConfig, how: How) -> None:
    """A student whose ids are the lowest ones, stored as the bundled model is."""
    block = StudentBlock(config, of.config, torch.arange(config.hot_rows))
    initialise(block, of.model, how)
    target = Target(weights=of.weights, tokenizer=ChatTokenizer.load(BUNDLED).fingerprint, chat_template="not compared")
    block = block.to(torch.bfloat16)
    save_student(directory, block, StudentHeader.of(block, target))


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cut of the native head, one that knows nothing, and one that is the native head."""
    place = tmp_path_factory.mktemp("students")
    source = load_model(BUNDLED, torch.device("cpu"), torch.float32, with_mtp=True)
    save(place / "cut", source, StudentConfig.preset("sv", source.config, 1024), "slice")
    save(place / "wild", source, StudentConfig.preset("sv-slim", source.config, 512), "random")
    save(place / "whole", source, StudentConfig.like_native(source.config, source.config.vocab_size), "slice")
    return place


def options(students: Path, *names: str, **given: Any) -> LocalOptions:
    first, *others = [f"student:{students / name}" if (students / name).is_dir() else name for name in names]
    common: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "max_model_len": 1024}
    return LocalOptions("tiny", drafter=first, further_drafters=tuple(others), **common | given)


@pytest.fixture(scope="module")
def loaded(students: Path) -> Loaded:
    return load(options(students, "cut", "wild", "whole", "mtp"))


@pytest.fixture(scope="module")
def requests(loaded: Loaded) -> list[Request]:
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}] for asked in ASKED]
    prompts = [loaded.tokenizer.encode_chat(chat, {"enable_thinking": False}).ids for chat in chats]
    return [Request(prompt, params, TOKENS, loaded.tokenizer.eos_ids) for prompt in prompts for params in SAMPLERS]


@pytest.fixture(scope="module")
def plain(loaded: Loaded, requests: list[Request]) -> list[Outcome]:
    """Of no drafter, each alone, nothing of it kept."""
    return [decoded(loaded, 0, [(request, None)], salt="plain")[0] for request in requests]


@torch.inference_mode()
def decoded(loaded: Loaded, slots: int, asked: list[tuple[Request, Drafter | None]], salt: str) -> list[Outcome]:
    """All at once, as far as there is room. `salt`: nothing is found in the prefix cache that another one has left."""
    loaded.loop.speculation.lengths = FixedDraftLength(slots)
    jobs = [Job(loaded.loop, request, drafter, salt) for request, drafter in asked]
    for job in jobs:
        loaded.loop.add(job.sequence)
    loaded.loop.finish()
    return [job.outcome for job in jobs]


def seen(outcomes: list[Outcome]) -> list[tuple[Any, ...]]:
    return [outcome.seen for outcome in outcomes]


def counts(outcomes: list[Outcome]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple((step.drafted, step.accepted) for step in outcome.steps) for outcome in outcomes]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["cut", "wild"])
def test_a_student_changes_no_token_and_no_logprob(
    loaded: Loaded, requests: list[Request], plain: list[Outcome], name: str, slots: int
) -> None:
    drafter, prefix = loaded.drafters[name], loaded.loop.scheduler.prefix
    assert prefix is not None
    for again in (False, True):
        before = prefix.hits
        outcomes = decoded(loaded, slots, [(request, drafter) for request in requests], salt=f"{name} {slots}")
        assert seen(outcomes) == seen(plain)
        assert not again or prefix.hits - before > 64 * len(requests)
    accepted = [step.accepted for outcome in outcomes for step in outcome.steps]
    assert 0 in accepted
    assert name == "wild" or slots in accepted


def test_drafters_of_all_kinds_in_one_batch_change_nothing(
    loaded: Loaded, requests: list[Request], plain: list[Outcome]
) -> None:
    drafters = [*loaded.drafters.values(), None]
    asked = [(request, drafters[i % len(drafters)]) for i, request in enumerate(requests)]
    assert seen(decoded(loaded, 3, asked, salt="mixed")) == seen(plain)


def test_a_student_that_is_the_native_head_has_exactly_its_acceptance(loaded: Loaded, requests: list[Request]) -> None:
    of = {
        name: counts(decoded(loaded, 4, [(request, loaded.drafters[name]) for request in requests], salt=name))
        for name in ("mtp", "whole", "cut")
    }
    assert of["whole"] == of["mtp"]
    assert of["cut"] != of["mtp"]


def test_the_default_is_named_as_its_directory_and_stands_in_the_fingerprints(loaded: Loaded) -> None:
    assert loaded.default is loaded.drafters["cut"]
    assert list(loaded.drafters) == ["cut", "wild", "whole", "mtp"]
    assert loaded.fingerprints.drafter == loaded.drafters["cut"].fingerprint
    assert len({drafter.block for drafter in loaded.drafters.values()}) == 4


def test_a_student_alone_needs_no_native_head(students: Path) -> None:
    alone = load(options(students, "cut"))
    assert alone.runner.model.mtp is None
    assert list(alone.drafters) == ["cut"]


def test_each_blocks_keys_and_values_count_as_what_they_take(students: Path) -> None:
    """tiny has a key head of 64, so has each block: four blocks are four times as much beside one layer's and H."""
    budget = 12e6
    tight = load(options(students, "cut", "wild", "whole", "mtp", kv_memory=budget / GIB, prefix_cache=False))
    memory = tight.loop.speculation.memory
    pools = [memory.cache, *(memory.block(one.block, 1, 64) for one in tight.drafters.values() if one.block)]
    pages = memory.table.total + 1
    a_page = sum(pool.k.nbytes + pool.v.nbytes for pool in pools) / pages + memory.hidden.nbytes / pages
    assert memory.table.total < 2 * 4 * pages_for(1024 + 9)  # it is the budget that limits them
    taken = memory.table.total * a_page + 4 * memory.slots.slot_bytes
    assert budget - a_page < taken <= budget


def test_two_drafters_of_one_name_are_refused(students: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").symlink_to(students / "cut")
    given = options(students, "cut")
    with pytest.raises(BackendError, match="two drafters are named 'cut'"):
        load(replace(given, further_drafters=(f"student:{tmp_path / 'cut'}",)))
