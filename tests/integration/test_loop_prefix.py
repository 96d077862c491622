"""The prefix cache over HTTP: what it finds is told and counted, and no bit of an answer depends on it (law L1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from backend.engine.forms import GRID
from backend.engine.prefix import EVERY
from tests.answers import Answer, bits, row_of, streamed, whole
from tests.checkpoints import tiny
from tests.servers import ProcessServer

Talk = list[dict[str, str]]
TOKENS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 3},
    {"temperature": 1, "top_p": 1, "top_k": 0, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{24}"}},
]
LENGTHS = (0, 1, 2, 5, 21)  # sentences before the question: prompts of some dozens to some hundreds of tokens


def talk(name: str, sentences: int, *more: str) -> Talk:
    """A conversation that begins like no other test's, its turns by user and assistant in turn."""
    background = f"This is about {name}. " + "Lists, sets and tuples hold values. " * sentences
    turns = [{"role": "user", "content": background + "What is a list?"}]
    roles = ("assistant", "user")
    return turns + [{"role": roles[i % 2], "content": content} for i, content in enumerate(more)]


def prompt_of(messages: Talk) -> tuple[int, ...]:
    return tiny().tokenizer.encode_chat(messages, {}).ids


def last_boundary(prompt: int) -> int:
    """The most of a prompt that can be found: its last token is always run."""
    return (prompt - 1) // GRID * GRID


@dataclass
class Figures:
    """The prefix counters of a server, from now on."""

    server: ProcessServer

    def __post_init__(self) -> None:
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        return self.server.metric("prefix_cache_queries_total"), self.server.metric("prefix_cache_hits_total")

    def grown(self) -> tuple[float, ...]:
        return tuple(now - before for now, before in zip(self._now(), self._before, strict=True))


@pytest.fixture
def figures(drafting: ProcessServer) -> Figures:
    return Figures(drafting)


def assert_same(drafting: ProcessServer, one: Answer, other_server: ProcessServer, other: Answer) -> None:
    assert one.said == other.said
    assert bits(row_of(drafting, one)) == bits(row_of(other_server, other))


@pytest.mark.parametrize("sentences", LENGTHS)
@pytest.mark.parametrize("manner", MANNERS, ids=["greedy", "truncated", "penalised", "grammar"])
def test_the_same_again_is_found_and_changes_nothing(
    drafting: ProcessServer, plain: ProcessServer, figures: Figures, manner: dict[str, Any], sentences: int
) -> None:
    messages = talk(f"{MANNERS.index(manner)} by {sentences}", sentences)
    asked = {**manner, **TOKENS, "max_tokens": 16}
    without = whole(plain.openai, messages, **asked)
    answers = [ask(drafting.openai, messages, **asked) for ask in (whole, streamed, whole)]
    for answer in answers:
        assert_same(drafting, answer, plain, without)
        # Drafts are as good after a hit.
        assert row_of(drafting, answer).steps == row_of(drafting, answers[0]).steps
    length = len(prompt_of(messages))
    hit = last_boundary(length)
    assert [answer.cached for answer in (*answers, without)] == [0, hit, hit, 0]
    assert (hit > 0) == (length > GRID)
    assert figures.grown() == (3 * length, 2 * hit)


def test_what_was_found_is_told_in_every_place(drafting: ProcessServer) -> None:
    messages = talk("places", 12)
    first, again = (streamed(drafting.openai, messages, max_tokens=4) for _ in range(2))
    length = len(prompt_of(messages))
    for answer in (first, again):
        usage, timings = answer.usage, answer.timings
        assert usage["prompt_tokens"] == length == timings["prompt_n"] + timings["cache_n"]
        assert usage["total_tokens"] == length + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": timings["cache_n"]}
        row = row_of(drafting, answer)
        assert (row.timings["cache_n"], row.timings["prompt_n"]) == (timings["cache_n"], timings["prompt_n"])
        assert len(row.prompt_tokens) == length
    assert first.cached == 0 < again.cached


def test_a_conversation_goes_on_from_what_is_known(
    drafting: ProcessServer, plain: ProcessServer, figures: Figures
) -> None:
    messages = talk("a conversation", 16)
    asked = {"temperature": 0.7, "seed": 2, **TOKENS, "max_tokens": 30}
    known: set[tuple[int, ...]] = set()
    queried = found = 0
    for question in ("And a set?", "Is a tuple like that? " * 12, "Why?", ""):
        prompt = prompt_of(messages)
        answer, without = whole(drafting.openai, messages, **asked), whole(plain.openai, messages, **asked)
        assert_same(drafting, answer, plain, without)
        expected = max((len(prefix) for prefix in known if prefix == prompt[: len(prefix)]), default=0)
        assert answer.cached == expected
        queried, found = queried + len(prompt), found + expected
        turn = tiny().tokenizer.encode_chat(messages, {}).last_user_start
        known |= {prompt[:at] for at in (last_boundary(len(prompt)), turn // GRID * GRID) if at}
        messages = [
            *messages,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": question},
        ]
    assert found > 3 * GRID
    assert figures.grown() == (queried, found)


def test_another_question_about_the_same_text_finds_the_text(drafting: ProcessServer, plain: ProcessServer) -> None:
    system = {"role": "system", "content": "You know this. " + "Lists, sets and tuples hold values. " * 20}
    asked = {**MANNERS[1], **TOKENS, "max_tokens": 24}
    found = []
    for question in ("What is a list?", "How do I reverse a string?", "Hello"):
        messages = [system, {"role": "user", "content": question}]
        answer = whole(drafting.openai, messages, **asked)
        assert_same(drafting, answer, plain, whole(plain.openai, messages, **asked))
        found.append(answer.cached)
    text = tiny().tokenizer.encode_chat(messages, {}).last_user_start
    assert found == [0, text // GRID * GRID, text // GRID * GRID]


def test_a_long_prompt_leaves_marks_on_its_way(drafting: ProcessServer, plain: ProcessServer) -> None:
    sentences = 150
    long = talk("a long story", sentences)
    assert len(prompt_of(long)) > EVERY + 100
    # It parts from the other in the middle of the text, behind the mark.
    parted = talk("a long story", sentences)
    half = EVERY * len(parted[0]["content"]) // len(prompt_of(long)) + 200
    parted[0]["content"] = parted[0]["content"][:half] + " And what is a set?"
    assert whole(drafting.openai, long, max_tokens=2).cached == 0
    asked = {**MANNERS[1], **TOKENS, "max_tokens": 24}
    answer = whole(drafting.openai, parted, **asked)
    assert answer.cached == EVERY
    assert_same(drafting, answer, plain, whole(plain.openai, parted, **asked))


def test_salts_part_the_cache(drafting: ProcessServer, plain: ProcessServer) -> None:
    messages = talk("secrets", 10)
    asked = {**MANNERS[1], **TOKENS, "max_tokens": 12}
    salts = [None, "a", "a", "b", None, "b", "A"]
    answers = [
        whole(drafting.openai, messages, **asked, **({} if salt is None else {"cache_salt": salt})) for salt in salts
    ]
    hit = last_boundary(len(prompt_of(messages)))
    assert [answer.cached for answer in answers] == [0, 0, hit, 0, hit, hit, 0]
    without = whole(plain.openai, messages, **asked, cache_salt="a")
    for answer in answers:
        assert_same(drafting, answer, plain, without)


def test_the_operator_sees_what_is_kept(drafting: ProcessServer) -> None:
    def kept() -> dict[str, Any]:
        told: dict[str, Any] = drafting.http.get("/v1/engine").json()["prefix_cache"]
        return told

    before, figures = kept(), Figures(drafting)
    messages = talk("the operator", 10)
    for _ in range(2):
        whole(drafting.openai, messages, max_tokens=1)
    after = kept()
    queried, found = figures.grown()
    assert after["queried_tokens"] - before["queried_tokens"] == queried
    assert after["hit_tokens"] - before["hit_tokens"] == found > 0
    assert after["snapshots"] > 0
    assert after["snapshot_bytes"] > 0
    assert drafting.metric("kv_cache_usage_ratio") == 0


def test_a_server_without_it_finds_nothing(plain: ProcessServer) -> None:
    messages = talk("nothing", 12)
    answers = [whole(plain.openai, messages, max_tokens=4) for _ in range(2)]
    assert [answer.cached for answer in answers] == [0, 0]
    assert plain.metric("prefix_cache_queries_total") == plain.metric("prefix_cache_hits_total") == 0
    assert plain.http.get("/v1/engine").json()["prefix_cache"] is None
