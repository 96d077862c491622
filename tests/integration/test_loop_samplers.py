"""Every sampler over HTTP: what it promises, and the same bits with four drafts a step and with none (law L2)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from tests.answers import Answer, bits, row_of, streamed, whole
from tests.checkpoints import tiny
from tests.servers import ProcessServer

COUNT = "Count from 1 to 10."
LIST = "What is a list?"
HELLO = "Hello"
UNSURE = "Tell me something about the weather."  # nothing the bundled model has learned
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 1, "top_k": 0, "seed": 7}
HOT: dict[str, Any] = {**SAMPLED, "temperature": 1.4}  # the bundled model is sure of itself
PAIRS = """start: "(" pair ("," pair){0,3} ")"
pair: /[0-9]{1,2}/ [":" /[a-z]{2,5}/]"""
PAIRS_AS_REGEX = r"\((P)(,(P)){0,3}\)".replace("P", r"[0-9]{1,2}(:[a-z]{2,5})?")


class Fact(BaseModel):
    """A schema with bounds everywhere, so that any answer to it ends."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern="^[a-z]{3,9}$")]
    count: Annotated[int, Field(ge=10, le=99)]
    kind: Literal["function", "method"]
    tags: Annotated[list[bool], Field(min_length=1, max_length=3)]


SCHEMA = Fact.model_json_schema()


@dataclass(frozen=True)
class Told:
    """An answer with its token ids."""

    answer: Answer
    prompt: list[int]
    ids: list[int]

    @property
    def content(self) -> str:
        return self.answer.content


Ask = Callable[..., Told]


@pytest.fixture
def ask_both(drafting: ProcessServer, plain: ProcessServer) -> Ask:
    """Ask both servers; whatever is asked, they must say the same."""

    def ask(content: str, **asked: Any) -> Told:
        asked = {"max_tokens": 48, "logprobs": True, "top_logprobs": 1, **asked}
        one, other = streamed(drafting.openai, content, **asked), whole(plain.openai, content, **asked)
        assert one.said == other.said
        row, twin = row_of(drafting, one), row_of(plain, other)
        assert bits(row) == bits(twin)
        assert row.parameters == twin.parameters
        assert other.timings["draft_n"] == 0
        return Told(one, row.prompt_tokens.tolist(), row.completion_tokens.tolist())

    return ask


@pytest.fixture(params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def ask(ask_both: Ask, request: pytest.FixtureRequest) -> Ask:
    """As `ask_both`, at temperature 0 and above."""
    return lambda content, **asked: ask_both(content, **{**request.param, **asked})


def plain_ids(text: str) -> list[int]:
    return tiny().tokenizer.plain(text)


def no_spaces() -> dict[str, float]:
    """A bias against tokens of white space alone, which a small model would fill any JSON with."""
    tokenizer = tiny().tokenizer
    return {str(token): -100 for token in range(tokenizer.vocab_size) if tokenizer.text_bytes(token).isspace()}


def text_of(ids: list[int]) -> str:
    return b"".join(map(tiny().tokenizer.text_bytes, ids)).decode()


def test_a_banned_token_never_comes(ask: Ask) -> None:
    before = ask(COUNT)
    ((often, times),) = Counter(before.ids).most_common(1)
    assert times > 5
    after = ask(COUNT, logit_bias={str(often): -100})
    assert often not in after.ids
    assert len(after.ids) > 1


def test_a_forced_token_is_all_that_comes(ask: Ask) -> None:
    (token,) = plain_ids(" list")
    assert ask(HELLO, logit_bias={str(token): 100}, max_tokens=9).ids == [token] * 9


def test_a_bias_is_no_part_of_the_logprobs(ask: Ask) -> None:
    (token,) = plain_ids(" list")
    told = ask(HELLO, logit_bias={str(token): 100}, max_tokens=3)
    assert all(logprob < -1 for _, logprob, _ in told.answer.tokens)
    assert all(alternatives[0][1] > logprob for _, logprob, alternatives in told.answer.tokens)


@pytest.mark.parametrize(
    "penalties",
    [{"presence_penalty": 2}, {"frequency_penalty": 0.5}, {"presence_penalty": -1.5, "frequency_penalty": 1.5}],
)
def test_what_the_output_had_is_penalised_token_by_token(ask_both: Ask, penalties: dict[str, float]) -> None:
    asked = {**GREEDY, "max_tokens": 40, "top_logprobs": 64}
    assert chosen_as_if(ask_both(COUNT, **asked, **penalties), **penalties)
    assert not chosen_as_if(ask_both(COUNT, **asked), **penalties), "the check is blind"


def chosen_as_if(told: Told, presence_penalty: float = 0, frequency_penalty: float = 0) -> bool:
    """Whether each token was the best of its alternatives under these penalties."""
    had: Counter[bytes] = Counter()

    def score(token: tuple[bytes, float]) -> float:
        spelled, logprob = token
        return logprob - presence_penalty * (spelled in had) - frequency_penalty * had[spelled]

    for spelled, logprob, alternatives in told.answer.tokens:
        if score((spelled, logprob)) < max(map(score, alternatives)) - 1e-4:
            return False
        had[spelled] += 1
    return True


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_where_it_is_sampled(ask_both: Ask, name: str) -> None:
    asked = {**HOT, "ignore_eos": True}
    less, none, more = (len(set(ask_both(COUNT, **asked, **{name: by}).ids)) for by in (-2, 0, 2))
    assert less < none < more


def test_a_strong_repetition_penalty_lets_nothing_come_back(ask: Ask) -> None:
    before, after = ask(COUNT, max_tokens=24), ask(COUNT, max_tokens=24, repetition_penalty=100)
    assert set(before.ids) & set(before.prompt)
    assert not set(after.ids) & set(after.prompt)
    assert len(set(after.ids)) == len(after.ids) == 24 > len(set(before.ids))


def test_min_p_of_one_leaves_the_best_alone(ask_both: Ask) -> None:
    greedy = ask_both(UNSURE, **GREEDY)
    assert ask_both(UNSURE, **HOT, min_p=1).ids == greedy.ids
    assert ask_both(UNSURE, **HOT).ids != greedy.ids


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_truncated_sampling_takes_none_but_the_leading(ask_both: Ask, truncation: dict[str, Any]) -> None:
    # At temperature 1 the logprobs are what is truncated.
    asked = {**SAMPLED, "temperature": 1, "seed": 8, "top_logprobs": 64, "ignore_eos": True, "max_tokens": 24}

    def kept(spelled: bytes, logprob: float, alternatives: tuple[tuple[bytes, float], ...]) -> bool:
        better = [other for _, other in alternatives if other > logprob]
        return (
            len(better) < truncation.get("top_k", 64)
            and sum(map(math.exp, better)) < truncation.get("top_p", 1)
            and math.exp(logprob - alternatives[0][1]) >= truncation.get("min_p", 0)
        )

    told, free = (ask_both(UNSURE, **{**asked, **more}) for more in (truncation, {}))
    assert all(kept(*token) for token in told.answer.tokens)
    assert not all(kept(*token) for token in free.answer.tokens)
    assert any(logprob < alternatives[0][1] for _, logprob, alternatives in told.answer.tokens), "it was greedy"


def test_min_tokens_keeps_the_answer_from_ending(ask: Ask) -> None:
    before, after = ask(HELLO), ask(HELLO, min_tokens=30)
    assert len(before.ids) < 30 <= len(after.ids)
    assert not tiny().tokenizer.eos_ids & set(after.ids[:29])
    assert after.ids[: len(before.ids) - 1] == before.ids[:-1]


def test_bad_words_are_not_said(ask: Ask) -> None:
    before = ask(LIST)
    words = ["list", "ordered, mutable", "example"]
    assert all(word in before.content for word in words)
    after = ask(LIST, bad_words=words)
    assert not any(word in after.content for word in words)
    assert len(after.ids) > 10


def test_ignoring_the_end_goes_on_to_the_limit(ask: Ask) -> None:
    before, after = ask(HELLO), ask(HELLO, ignore_eos=True)
    assert before.answer.finish_reason == "stop"
    assert (after.answer.finish_reason, len(after.ids)) == ("length", 48)
    assert after.ids[: len(before.ids)] == before.ids
    assert after.ids[len(before.ids) - 1] in tiny().tokenizer.eos_ids


def test_a_stop_token_ends_the_answer_where_it_first_comes(ask: Ask) -> None:
    before = ask(LIST)
    token = before.ids[9]
    end = before.ids.index(token) + 1
    after = ask(LIST, stop_token_ids=[token, 4000])
    assert (after.ids, after.answer.finish_reason) == (before.ids[:end], "stop")
    assert after.content == text_of(before.ids[:end])


def test_min_tokens_bans_stop_tokens_before_their_time(ask: Ask) -> None:
    before = ask(COUNT)
    (comma,) = plain_ids(",")
    assert comma in before.ids[:12]
    after = ask(COUNT, stop_token_ids=[comma], min_tokens=12)
    assert comma not in after.ids[:11]
    assert len(after.ids) >= 12


def test_a_json_object_is_one(ask: Ask) -> None:
    told = ask("What does `json.loads` do?", response_format={"type": "json_object"}, logit_bias=no_spaces())
    assert told.answer.finish_reason == "stop"
    assert isinstance(json.loads(told.content), dict)


def test_a_json_object_is_one_so_far_where_the_limit_cuts_it(ask: Ask) -> None:
    (empty,) = plain_ids("{}")
    told = ask(LIST, response_format={"type": "json_object"}, logit_bias={str(empty): -100})
    assert told.answer.finish_reason == "length"
    assert isinstance(from_json(told.content, allow_partial="trailing-strings"), dict)


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "structured_outputs"],
)
def test_a_schema_is_kept(ask: Ask, asked: dict[str, Any]) -> None:
    told = ask(LIST, **asked, logit_bias=no_spaces(), max_tokens=200)
    assert told.answer.finish_reason == "stop"
    Fact.model_validate_json(told.content)


@pytest.mark.parametrize(
    ("asked", "matched"),
    [
        ({"regex": "[a-z]{3,8}-[0-9]{4}"}, "[a-z]{3,8}-[0-9]{4}"),
        ({"regex": "(ä|🌍|ß){5}"}, "(ä|🌍|ß){5}"),
        ({"grammar": PAIRS}, PAIRS_AS_REGEX),
        ({"choice": ["never", "per.haps", "a|b"]}, r"never|per\.haps|a\|b"),
    ],
    ids=["regex", "bytes", "lark", "choice"],
)
def test_the_answer_matches_and_ends(ask: Ask, asked: dict[str, Any], matched: str) -> None:
    told = ask(LIST, structured_outputs=asked)
    assert re.fullmatch(matched, told.content)
    assert told.answer.finish_reason == "stop"


def test_a_complete_grammar_ends_the_answer_whatever_else_was_asked(ask: Ask) -> None:
    told = ask(LIST, structured_outputs={"regex": "[ab]{4}"}, min_tokens=40, ignore_eos=True)
    assert re.fullmatch("[ab]{4}", told.content)
    assert told.answer.finish_reason == "stop"


def test_everything_together_is_kept_together(ask: Ask) -> None:
    (a,) = plain_ids("a")
    told = ask(
        COUNT,
        structured_outputs={"regex": "[a-z ]{20,60}"},
        logit_bias={str(a): -100},
        bad_words=["the"],
        presence_penalty=1,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_p=0.01,
        min_tokens=6,
    )
    assert re.fullmatch("[a-z ]{20,60}", told.content)
    assert a not in told.ids
    assert "the" not in told.content
    assert len(told.ids) >= 6


def test_drafts_are_accepted_and_rejected_under_samplers(ask_both: Ask) -> None:
    for more in (
        {"frequency_penalty": 1},
        {"min_tokens": 40},
        {"structured_outputs": {"regex": "[a-z ]{60}"}},
    ):
        timings = ask_both(LIST, **HOT, **more).answer.timings
        assert 0 < timings["draft_n_accepted"] < timings["draft_n"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(drafting: ProcessServer, asked: dict[str, Any], param: str) -> None:
    rows = len(drafting.rows())
    for ask in (whole, streamed):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(drafting.openai, HELLO, **asked)
        assert (refused.value.type, refused.value.code) == ("invalid_request_error", "invalid_value")
        assert (refused.value.param or "").startswith(param)
        assert isinstance(refused.value.body, dict)
        assert "\n" not in refused.value.body["message"]
    assert len(drafting.rows()) == rows
