"""Answers in phases: what each allows, that blocks walk them as one token at a time does, and which a request gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.constraints import constraint
from backend.drafters.mtp import mtp_drafter
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from backend.interface import ChatRequest, Grammar, InvalidRequest, SamplingRequest
from backend.text.grammar import GrammarCompiler
from backend.text.phases import Either, Fixed, Free, Matcher, Phases
from backend.text.tokenizer import ChatTokenizer, Prompt
from backend.text.tool_calls import ToolCallParser
from tests import factory, plain_decoder
from tests.decoding import Job, Outcome, Request, make_loop
from tests.factory import Shape
from tests.unit.test_grammar import TINY, DeviceBatch, decode, logits_of

both_ways = pytest.mark.parametrize("batch_type", [SamplerBatch, DeviceBatch])
THINKING, ANSWERING = (Prompt((1,), "", 0, in_reasoning=thinks) for thinks in (True, False))
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LETTERS = Grammar("regex", "[a-f]{2,5}")
SIZES = {
    "type": "function",
    "function": {
        "name": "resize",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["px", "em"]},
                "size": {"type": "integer", "minimum": 0, "maximum": 99},
                "keep": {"type": "boolean"},
            },
            "required": ["unit", "size"],
        },
    },
}
STRICT = {"type": "function", "function": {**SIZES["function"], "strict": True}}  # type: ignore[dict-item]


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(TINY)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def literal(name: str) -> int:
    found = tokenizer().literal_id(name)
    assert found is not None
    return found


def ids(text: str) -> list[int]:
    """Tokens of a text in which tags are tags."""
    pieces = re.split(f"({'|'.join(TAGS)})", text)
    return [token for piece in pieces for token in ([literal(piece)] if piece in TAGS else tokenizer().plain(piece))]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(map(tokenizer().text_bytes, tokens)).decode(errors="replace")


def matcher_of(prompt: Prompt, grammar: Grammar | None = None, **asked: Any) -> Matcher | None:
    request = ChatRequest("x", sampling=SamplingRequest(grammar=grammar), **asked)
    return constraint(request, prompt, tokenizer(), compiler())


def takes(matcher: Matcher | None, tokens: Sequence[int]) -> bool:
    assert matcher is not None
    return all(matcher.advance(token) for token in tokens)


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.allowed()
    return set(range(tokenizer().vocab_size) if mask is None else np.flatnonzero(mask).tolist())


def call(**values: Any) -> str:
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=resize>\n{written}</function>\n</tool_call>"


# What is asked for, and the answers to it: of each whether it may end there.
KINDS: dict[str, Callable[[], Matcher | None]] = {
    "thoughts then letters": lambda: matcher_of(THINKING, LETTERS),
    "few thoughts then letters": lambda: matcher_of(THINKING, LETTERS, thinking_budget=3),
    "few thoughts": lambda: matcher_of(THINKING, thinking_budget=3),
    "no thoughts then calls": lambda: matcher_of(THINKING, tools=[SIZES], tool_choice="required", thinking_budget=0),
    "calls": lambda: matcher_of(ANSWERING, tools=[SIZES], tool_choice="required"),
    "strict calls, maybe": lambda: matcher_of(THINKING, tools=[STRICT]),
    "one call at most": lambda: matcher_of(ANSWERING, tools=[SIZES], parallel_tool_calls=False),
    "a shape or calls": lambda: matcher_of(ANSWERING, Grammar("json_schema", '{"enum": ["a", "ab"]}'), tools=[SIZES]),
}


def state(matcher: Matcher) -> tuple[Any, ...]:
    mask = matcher.allowed()
    told = matcher.accepts, matcher.finished, matcher.slack, matcher.failure, matcher.forced()
    return None if mask is None else mask.tobytes(), *told


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(picks=st.lists(st.integers(0, 10**6), min_size=1, max_size=40), cuts=st.lists(st.integers(0, 9), max_size=40))
def test_rolling_back_across_any_border_is_never_having_gone(kind: str, picks: list[int], cuts: list[int]) -> None:
    """Tags come often here, and so do tokens that may not."""
    matcher = KINDS[kind]()
    assert matcher is not None
    tags = [literal(tag) for tag in TAGS]
    path: list[int] = []
    states = [state(matcher)]
    for pick, cut in zip(picks, [*cuts, *[0] * len(picks)], strict=False):
        able = sorted(allowed(matcher) | (tokenizer().eos_ids if matcher.accepts else set()))
        wrong = pick % tokenizer().vocab_size
        if wrong not in able:  # it may be taken all the same, where the text is forced and it spells it otherwise
            matcher.rollback(int(matcher.advance(wrong)))
            assert state(matcher) == states[-1]
        able = [tag for tag in tags if tag in able] * (pick % 2) or able
        if able and matcher.advance(able[pick % len(able)]):
            path.append(able[pick % len(able)])
            states.append(state(matcher))
        back = min(cut, len(path)) if cut > 5 else 0
        matcher.rollback(back)
        del path[len(path) - back :], states[len(states) - back :]
        assert state(matcher) == states[-1]
    fresh = KINDS[kind]()
    assert takes(fresh, path)
    assert fresh is not None
    assert state(fresh) == states[-1]


@both_ways
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_phases_in_blocks_give_the_tokens_of_one_at_a_time(
    batch_type: type[SamplerBatch], kind: str, temperature: float
) -> None:
    """Whatever is drafted, forced or not (law L2)."""
    for seed in range(2):
        params = SamplingParams(
            temperature=temperature, seed=seed, stop_token_ids=tokenizer().eos_ids, presence_penalty=0.5
        )

        def sampler(params: SamplingParams = params) -> Sampler:
            return Sampler(params, tokenizer().vocab_size, (), KINDS[kind]())

        alone, expected = sampler(), list[int]()
        while len(expected) < 40 and not (expected and expected[-1] in tokenizer().eos_ids):
            row = torch.from_numpy(logits_of(tuple(expected), seed))[None, None]
            chosen = SamplerBatch([alone], [len(expected)]).verify(row, torch.empty(1, 0, dtype=torch.int64))
            expected.append(int(chosen[0, 0]))
            alone.accept(expected[-1])
        assert decode(sampler(), batch_type, seed, most=40) == expected


def test_thoughts_and_letters_are_the_plain_decoders() -> None:
    """The reference knows no phase: it looks at the whole answer so far."""
    end, newlines = literal("</think>"), tokenizer().plain("\n\n")
    pieces = {token: tokenizer().token_bytes(token).decode(errors="replace") for token in range(tokenizer().vocab_size)}
    letters = {token: text for token, text in pieces.items() if re.fullmatch("[a-f]{1,5}", text)}
    everything = set(pieces) - tokenizer().eos_ids

    def following(output: tuple[int, ...]) -> tuple[set[int], bool]:
        if end not in output:
            return ({end} if len(output) == 4 else everything), False
        after = output[output.index(end) + 1 :]
        if len(after) < len(newlines):
            return {newlines[len(after)]}, False
        length = sum(len(letters[token]) for token in after[len(newlines) :])
        return {token for token, text in letters.items() if length + len(text) <= 5}, length >= 2

    early = 0
    for seed in range(6):
        params = SamplingParams(temperature=1.0, seed=seed, stop_token_ids=tokenizer().eos_ids)

        def logits(tokens: tuple[int, ...], seed: int = seed) -> np.ndarray:
            row = logits_of(tokens, seed)
            row[end] += 3.5  # so that thoughts end before and at their limit
            return row

        expected = plain_decoder.decode(logits, (), params, 40, tokenizer().vocab_size, following)
        for batch_type in (SamplerBatch, DeviceBatch):
            sampler = Sampler(params, tokenizer().vocab_size, (), matcher_of(THINKING, LETTERS, thinking_budget=4))
            assert decode(sampler, batch_type, seed, most=40, logits=logits) == expected
        early += expected.index(end) < 4
    assert 0 < early < 6


def test_thoughts_before_a_grammar_may_be_anything_but_the_end() -> None:
    matcher = matcher_of(THINKING, LETTERS)
    assert matcher is not None
    everything = set(range(tokenizer().vocab_size)) - tokenizer().eos_ids
    for text in ("", "What? {", "<think>", "\n"):
        assert takes(matcher, ids(text))
        assert allowed(matcher) == everything
        assert not matcher.accepts
        assert not any(matcher.advance(token) for token in tokenizer().eos_ids)
    assert takes(matcher, ids("</think>"))
    assert matcher.forced() == tokenizer().plain("\n\n")
    assert allowed(matcher) == set(tokenizer().plain("\n\n")[:1])
    assert takes(matcher, [*ids("\n\n"), *ids("abc")])
    assert matcher.accepts
    assert literal("</think>") not in allowed(matcher)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_at_the_budget_thoughts_end_and_what_comes_then_is_free(budget: int) -> None:
    params = SamplingParams(temperature=0, stop_token_ids=tokenizer().eos_ids)
    sampler = Sampler(params, tokenizer().vocab_size, (), matcher_of(THINKING, thinking_budget=budget))
    word = tokenizer().plain(" list")[0]
    for _ in range(budget):
        assert sampler.forced(8) == []
        row = torch.zeros(1, sampler.vocab)
        row[0, word] = 9
        assert sampler.process(row, torch.empty(0, dtype=torch.int64)).equal(row)
        sampler.accept(word)
    assert sampler.forced(8) == [literal("</think>")]
    kept = sampler.process(torch.zeros(1, sampler.vocab), torch.empty(0, dtype=torch.int64))[0]
    assert (kept > -torch.inf).nonzero()[:, 0].tolist() == [literal("</think>")]
    assert not sampler.plain
    sampler.accept(literal("</think>"))
    assert sampler.plain  # it costs nothing any more


def test_thoughts_that_end_in_time_are_left_alone() -> None:
    sampler = Sampler(SamplingParams(), tokenizer().vocab_size, (), matcher_of(THINKING, thinking_budget=5))
    for token in ids("no</think>"):
        sampler.accept(token)
    assert sampler.plain


def test_far_from_their_budget_thoughts_read_no_value_on_the_way_from_logits_to_tokens() -> None:
    """Traced on a device without data, where reading a value is an error."""
    meta = torch.device("meta")
    for penalty in (0.0, 0.5):
        params = SamplingParams(seed=1, presence_penalty=penalty)
        sampler = Sampler(params, tokenizer().vocab_size, (), matcher_of(THINKING, thinking_budget=5))
        batch = SamplerBatch([sampler], [7])
        for _ in range(3):
            batch.draft(torch.empty(1, sampler.vocab, device=meta))
        drafts = torch.empty(1, 3, dtype=torch.int64, device=meta)
        assert batch.verify(torch.empty(1, 4, sampler.vocab, device=meta), drafts).shape == (1, 4)
        sampler.accept(9)
        sampler.accept(9)
        with pytest.raises(NotImplementedError):
            batch.verify(torch.empty(1, 4, sampler.vocab, device=meta), drafts)


def test_what_nothing_is_asked_of_has_no_matcher() -> None:
    assert matcher_of(THINKING) is None
    assert matcher_of(ANSWERING, thinking_budget=3) is None
    assert matcher_of(THINKING, tools=[SIZES]) is None
    assert matcher_of(THINKING, tools=[STRICT], tool_choice="none") is None
    assert matcher_of(THINKING, tools=[STRICT], tool_choice="none", parallel_tool_calls=False) is None


@pytest.mark.parametrize("prompt", [THINKING, ANSWERING], ids=["thinking", "answering"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_is_required_comes_first_and_alone(prompt: Prompt, parallel: bool) -> None:
    asked: dict[str, Any] = {"tools": [SIZES], "tool_choice": "required", "parallel_tool_calls": parallel}

    def started() -> Matcher:
        matcher = matcher_of(prompt, **asked)
        assert takes(matcher, ids("Well.</think>\n\n") if prompt is THINKING else [])
        assert matcher is not None
        return matcher

    one = call(unit="px", size=3)
    assert allowed(started()) == {literal("<tool_call>")}
    matcher = started()
    assert takes(matcher, ids(one))
    assert matcher.accepts
    assert matcher.finished is not parallel
    assert takes(matcher, ids(f"\n{one}")) is parallel
    assert not takes(started(), ids(f"{one} "))
    assert not takes(started(), ids(f"Here: {one}"))


def test_the_tool_that_is_named_is_the_one_called() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    matcher = matcher_of(ANSWERING, tools=[SIZES, other], tool_choice="required", tool_name="other")
    assert takes(matcher, ids("<tool_call>\n<function=other>\n</function>\n</tool_call>"))
    assert not takes(
        matcher_of(ANSWERING, tools=[SIZES, other], tool_choice="required", tool_name="other"),
        ids(call(unit="px", size=3)),
    )
    with pytest.raises(InvalidRequest, match="'third'") as refused:
        matcher_of(ANSWERING, tools=[SIZES, other], tool_choice="required", tool_name="third")
    assert refused.value.param == "tool_choice"
    with pytest.raises(InvalidRequest, match="tool"):
        matcher_of(ANSWERING, tool_choice="required")


def test_strict_tools_leave_the_text_free_and_hold_the_calls() -> None:
    loose = {"type": "function", "function": {**SIZES["function"], "name": "loose"}}  # type: ignore[dict-item]

    def fits(text: str, **asked: Any) -> bool:
        matcher = matcher_of(THINKING, tools=[STRICT, loose], **asked)
        return takes(matcher, ids(text)) and bool(matcher and matcher.accepts)

    good, bad = call(unit="em", size=12, keep="true"), call(unit="em", size="large")
    assert fits(f"Hm.</think>\n\nI do.\n{good}\n{good}\nDone. <b>")
    assert fits(f"Shall I write <tool_call>? Yes.</think>{good}")
    assert not fits(f"</think>{bad}")
    assert not fits(f"</think>{good} and {bad}")
    assert not fits(f"</think>{good[:-40]}")
    assert fits("</think>" + bad.replace("resize", "loose"))
    assert not fits("</think>" + bad.replace("resize", "unknown"))
    assert fits(f"</think>So: {good}", parallel_tool_calls=False)
    assert not fits(f"</think>So: {good}\n", parallel_tool_calls=False)


def test_where_one_call_is_allowed_its_end_is_the_answers() -> None:
    matcher = matcher_of(THINKING, tools=[SIZES], parallel_tool_calls=False)
    assert matcher is not None
    assert takes(matcher, ids("</tool_call> is how it ends.</think>I call. <tool_call>anything"))
    assert matcher.allowed() is None
    assert not matcher.finished
    assert takes(matcher, ids("</tool_call>"))
    assert matcher.finished


def test_an_answer_of_a_shape_may_be_calls_instead() -> None:
    shape = Grammar("json_schema", '{"type": "object", "properties": {}, "additionalProperties": false}')
    for good in ("{}", call(unit="px", size=3), "\n".join([call(unit="px", size=3)] * 2)):
        matcher = matcher_of(ANSWERING, shape, tools=[SIZES])
        assert takes(matcher, ids(good))
        assert matcher is not None
        assert matcher.accepts
    for bad in ("Well", "{}" + call(unit="px", size=3), call(unit="cm", size=3), call(unit="px", size=3) + "{}"):
        assert not takes(matcher_of(ANSWERING, shape, tools=[SIZES]), ids(bad))
    thinking = matcher_of(THINKING, shape, tools=[SIZES])
    assert not takes(thinking, ids("<tool_call>"))
    assert takes(thinking, ids("</think>\n\n" + call(unit="px", size=3)))
    whole = Grammar("regex", "[^<]+")
    assert not takes(matcher_of(ANSWERING, whole, tools=[SIZES]), ids("<tool_call>"))


@torch.inference_mode()
def test_phases_are_the_same_whoever_makes_room_and_whatever_is_drafted() -> None:
    """Preempted sequences run their tokens again, in blocks across the borders, and go on where they were (law L2)."""
    shape = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), k_heads=1, v_heads=2, seed=6)
    torch.set_num_threads(1)
    runner = Runner(factory.build(shape))
    assert probe(runner).lawful
    prompts = [tuple((i + 7 * at + at * at // 5) % 64 for at in range(488 + i)) for i in range(3)]

    def outcomes(draft_tokens: int, pages: int, sequences: int) -> tuple[list[Outcome], int]:
        drafter = mtp_drafter(runner.model, "block")
        loop = make_loop(runner, draft_tokens, [drafter], pages=pages, sequences=sequences)
        jobs = [
            Job(loop, Request(prompt, SamplingParams(temperature=2.0, seed=i), 50), drafter)
            for i, prompt in enumerate(prompts)
        ]
        for job in jobs:
            cycle = [partial(Free, 64, 7, 5), partial(Fixed, 64, (1, 2, 3)), partial(Free, 64, 9, 2, frozenset({7}))]
            job.sequence.sampler.matcher = Phases(frozenset(), cycle, again=0)
            loop.add(job.sequence)
        loop.finish()
        return [job.outcome for job in jobs], loop.scheduler.preemptions

    expected, _ = outcomes(0, pages=6, sequences=1)
    texts = [outcome.tokens for outcome in expected]
    assert all(len(tokens) == 50 for tokens in texts)
    assert all(tokens[at + 1 : at + 4] == (1, 2, 3) for tokens in texts for at in range(46) if tokens[at] == 7)
    assert all(7 in tokens[:6] for tokens in texts)
    for draft_tokens in (1, 3, 8):
        made, preemptions = outcomes(draft_tokens, pages=3, sequences=3)
        assert [outcome.seen for outcome in made] == [outcome.seen for outcome in expected]
        assert preemptions > 0


def test_a_tokenizer_that_cannot_end_thoughts_is_no_ground_for_rules() -> None:
    class Without(ChatTokenizer):
        def literal_id(self, literal: str) -> int | None:
            return None

    bare = Without.load(TINY)
    asked = ChatRequest("x", thinking_budget=3)
    for request in (asked, replace(asked, thinking_budget=None, sampling=SamplingRequest(grammar=LETTERS))):
        with pytest.raises(InvalidRequest, match="</think>"):
            constraint(request, THINKING, bare, GrammarCompiler(bare))
    required = replace(asked, tools=[SIZES], tool_choice="required")
    matcher = constraint(required, ANSWERING, bare, GrammarCompiler(bare))
    assert takes(matcher, bare.plain(call(unit="px", size=3)))  # the tags as text
    assert constraint(replace(required, tool_choice="auto"), ANSWERING, bare, GrammarCompiler(bare)) is None


def test_each_phase_refuses_what_is_no_id() -> None:
    size = tokenizer().vocab_size
    phases = [Free(size), Fixed(size, [5]), Either(Fixed(size, [5]), Fixed(size, [6]), 6)]
    for phase in (*phases, Phases(frozenset(), [lambda: Free(size)])):
        assert not any(phase.advance(token) for token in (-1, size, 10**9))
        phase.rollback(0)


def properties_of(tool: Mapping[str, Any]) -> Any:
    return tool["function"]["parameters"]["properties"]


@both_ways
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]), thinks=st.booleans())
def test_whatever_is_drawn_calls_a_tool_as_its_schema_says(
    batch_type: type[SamplerBatch], seed: int, temperature: float, thinks: bool
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, stop_token_ids=tokenizer().eos_ids)
    prompt = THINKING if thinks else ANSWERING
    matcher = matcher_of(
        prompt, tools=[SIZES], tool_choice="required", parallel_tool_calls=False, thinking_budget=seed % 5
    )
    output = decode(Sampler(params, tokenizer().vocab_size, (), matcher), batch_type, seed % 1000, most=300)
    answer = text_of(output)
    content = answer.partition("</think>\n\n")[2] if thinks else answer
    assert output[: seed % 5 + 1].count(literal("</think>")) == thinks
    parser = ToolCallParser([SIZES])
    assert (parser.push(content) + parser.finish(cut=False)).content == ""
    (made,) = parser.calls
    arguments = json.loads(made.arguments)
    assert made.name == "resize"
    assert {"unit", "size"} <= arguments.keys() <= properties_of(SIZES).keys()
    assert arguments["unit"] in ("px", "em")
    assert type(arguments["size"]) is int
    assert 0 <= arguments["size"] <= 99
    assert type(arguments.get("keep", False)) is bool
