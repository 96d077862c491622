"""A walk makes the drafts that serving made and counts them as serving did: per slot, to the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from backend.drafters.mtp import mtp_drafter
from backend.drafters.protocol import Drafter
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.models.hub import resolve_model
from backend.models.weights import load_model
from backend.text.tokenizer import ChatTokenizer
from tests.decoding import Outcome, Request, decode
from training.data import Document, Forced
from training.errors import TrainingError
from training.evaluate.choices import choices, first_difference
from training.evaluate.following import Following, sampling_of
from training.evaluate.stride import StrideOptions, judged, stride
from training.evaluate.walk import walk
from training.force import force_documents

TEXTS = ("What is a list?", "How do I read a file?", "Name three fruits.", "Why?", "Explain sorting " * 12, "def f(x):")
SLOTS = 4


class Tiny:
    """The bundled model, ready to decode, and its own drafter."""

    def __init__(self) -> None:
        directory = resolve_model("tiny")
        loaded = load_model(directory, torch.device("cpu"), torch.bfloat16, with_mtp=True)
        self.tokenizer = ChatTokenizer.load(directory)
        self.runner, self.block = Runner(loaded.model), loaded.drafter
        with torch.inference_mode():
            probe(self.runner)
        self.vocab = min(loaded.config.vocab_size, self.tokenizer.vocab_size)

    def drafter(self) -> Drafter:
        return mtp_drafter(self.runner.model, self.block)

    def prompt(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode_chat([{"role": "user", "content": text}], {}, ()).ids

    def forced(self, request: Request, tokens: Sequence[int]) -> Forced:
        """The answer as training reads it, forced."""
        every = [*request.prompt, *tokens]
        sampling = asdict(request.params) | {
            "max_tokens": request.max_tokens,
            "logit_bias": {str(token): bias for token, bias in request.params.logit_bias},
            "stop_token_ids": sorted(request.eos),
        }
        document = Document(
            id="-".join(map(str, every[-3:])),
            tokens=np.array(every, np.int32),
            prompt_length=len(request.prompt),
            logprobs=np.zeros(len(every), np.float32),
            held_out=True,
            seed=request.params.seed,
            sampling=sampling,
        )
        (forced,) = force_documents(self.runner, [document])
        return forced


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="module")
def requests(tiny: Tiny) -> list[Request]:
    """Greedy and sampled, truncated and not, penalised, ended by the model and by the budget."""
    eos = tiny.tokenizer.eos_ids
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=3),
        SamplingParams(temperature=1.0, seed=2**63 + 5, choice=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, min_tokens=30, stop_token_ids=eos),
        SamplingParams(temperature=0.8, min_p=0.05, logit_bias=((11, 2.0),), bad_words=((5,), (7, 8)), seed=9),
    ]
    return [
        Request(tiny.prompt(text), one, max_tokens=max_tokens, eos=eos)
        for max_tokens in (40, 7)
        for text, one in zip(TEXTS, params, strict=True)
    ]


def counted(outcomes: Sequence[Outcome]) -> list[tuple[list[int], list[int]]]:
    """P_s and A_s of each answer's steps."""
    slots = range(SLOTS)
    return [
        (
            [sum(step.drafted > s for step in outcome.steps) for s in slots],
            [sum(step.accepted > s for step in outcome.steps) for s in slots],
        )
        for outcome in outcomes
    ]


def test_every_slot_of_a_walk_is_proposed_and_accepted_as_the_engine_did(tiny: Tiny, requests: list[Request]) -> None:
    outcomes = decode(tiny.runner, tiny.drafter(), SLOTS, requests, together=4)
    documents = [tiny.forced(request, outcome.tokens) for request, outcome in zip(requests, outcomes, strict=True)]
    assert {outcome.finish for outcome in outcomes} == {"stop", "length"}
    for together in (1, 5):
        found = walk(tiny.runner.model, tiny.drafter(), documents, SLOTS, vocab=tiny.vocab, together=together)
        assert [(list(one.proposed), list(one.accepted)) for one in found] == counted(outcomes)
        assert [one.steps for one in found] == [len(outcome.steps) for outcome in outcomes]
    assert sum(sum(one.accepted) for one in found) > 50, "there was something to count"


def test_an_anchor_sees_the_drafts_that_the_walks_step_from_there_had(tiny: Tiny, requests: list[Request]) -> None:
    options = StrideOptions(slots=SLOTS, every=100, temperatures=())
    for request in requests[:3]:
        (outcome,) = decode(tiny.runner, tiny.drafter(), SLOTS, [request])
        cut = tiny.forced(replace(request, eos=frozenset()), outcome.tokens[: SLOTS + 1])
        anchored = judged(tiny.runner.model, cut, cut.document.answer, options, tiny.vocab)
        (sums,) = stride(tiny.runner.model, tiny.drafter(), [anchored], options, tiny.vocab)
        accepted = outcome.steps[0].accepted
        assert sums["surv"].sum(0).tolist() == [float(slot < accepted) for slot in range(SLOTS)]


@torch.inference_mode()
@pytest.mark.parametrize("far", [9, 10, 33, 100])
def test_however_far_the_next_anchor_is_its_drafts_are_those_of_single_steps(tiny: Tiny, far: int) -> None:
    request = Request(tiny.prompt("What is a list?"), SamplingParams(temperature=0.0), max_tokens=120)
    (outcome,) = decode(tiny.runner, None, 0, [request])
    forced = tiny.forced(request, outcome.tokens)
    drafts = []
    for each in (far, 1):
        following = Following(tiny.runner.model, tiny.drafter(), [forced], tiny.vocab)
        (row,) = following.rows
        following.propose([row], [SLOTS])
        for _ in range(far // each):
            following.commit(row, each)
        drafts.append(following.propose([row], [SLOTS]))
    assert drafts[0] == drafts[1]


def test_an_unknown_budget_is_the_answers_length(tiny: Tiny, requests: list[Request]) -> None:
    request = replace(requests[0], max_tokens=9, eos=frozenset())
    (outcome,) = decode(tiny.runner, tiny.drafter(), SLOTS, [request])
    forced = tiny.forced(request, outcome.tokens)
    silent = replace(forced, document=replace(forced.document, sampling=None, seed=None))
    (found,) = walk(tiny.runner.model, tiny.drafter(), [silent], SLOTS, vocab=tiny.vocab)
    assert [(list(found.proposed), list(found.accepted))] == counted([outcome])


def test_documents_without_steps_count_nothing(tiny: Tiny, requests: list[Request]) -> None:
    forced = [tiny.forced(replace(requests[0], max_tokens=n), [5] * n) for n in (0, 1)]
    found = walk(tiny.runner.model, tiny.drafter(), forced, SLOTS)
    assert [(one.steps, sum(one.proposed)) for one in found] == [(0, 0), (0, 0)]


def test_what_serving_said_is_what_the_target_chooses_and_nothing_else_is(tiny: Tiny, requests: list[Request]) -> None:
    outcomes = decode(tiny.runner, None, 0, requests[6:], together=4)
    for request, outcome in zip(requests[6:], outcomes, strict=True):
        forced = tiny.forced(request, outcome.tokens)
        assert first_difference(tiny.runner.model, forced, tiny.vocab) is None
        at = len(outcome.tokens) // 2
        wrong = tiny.forced(request, [*outcome.tokens[:at], 77, *outcome.tokens[at + 1 :]])
        assert first_difference(tiny.runner.model, wrong, tiny.vocab) == len(request.prompt) + at
    sampled = tiny.forced(requests[7], outcomes[1].tokens)
    other = replace(sampled, document=replace(sampled.document, seed=4))
    assert first_difference(tiny.runner.model, other, tiny.vocab) is not None


def test_what_plain_parameters_choose_along_an_answer_of_theirs_is_the_answer(
    tiny: Tiny, requests: list[Request]
) -> None:
    for request in (requests[0], requests[1]):
        (outcome,) = decode(tiny.runner, None, 0, [request])
        forced = tiny.forced(request, outcome.tokens)
        assert choices(tiny.runner.model, forced, request.params, tiny.vocab) == list(outcome.tokens)


@pytest.mark.parametrize(
    "stated",
    [{"temperature": "hot"}, {"max_tokens": "x"}, {"logit_bias": {"x": 1}}, {"logit_bias": [1]}, {"bad_words": [5]}],
)
def test_parameters_that_no_request_can_have_had_are_one_line(stated: dict[str, object]) -> None:
    tokens = np.array([1, 2, 3], np.int32)
    document = Document("odd", tokens, 1, np.zeros(3, np.float32), held_out=True, seed=1, sampling=stated)
    with pytest.raises(TrainingError, match=r"document odd cannot have been sampled as it states: .+"):
        sampling_of(document)
