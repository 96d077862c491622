"""Grammars: what they allow, that blocks walk through them as one token at a time does, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from backend.interface import Grammar, InvalidRequest
from backend.text import grammar as grammar_module
from backend.text.grammar import GrammarCompiler, GrammarMatcher
from backend.text.tokenizer import ChatTokenizer
from tests import plain_decoder, qwen_tokenizer

TINY = Path(grammar_module.__file__).parents[1] / "tiny"


class DeviceBatch(SamplerBatch):
    """As on a device, over CPU tensors."""

    def _choose(self, logits: Tensor, drafts: Tensor) -> Tensor:
        return self.choose_on_device(logits[..., : self._samplers[0].vocab], drafts)


both_ways = pytest.mark.parametrize("batch_type", [SamplerBatch, DeviceBatch])


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(TINY)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def sampler_of(grammar: Grammar, params: SamplingParams | None = None) -> Sampler:
    params = params or SamplingParams(temperature=0, stop_token_ids=tokenizer().eos_ids)
    return Sampler(params, tokenizer().vocab_size, (), compiler().matcher(grammar))


def logits_of(tokens: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A model without weights. It likes ends of text, special tokens and the head's padding best."""
    drawn = np.random.default_rng([seed, *(t + 1 for t in tokens[-2:])]).standard_normal(tokenizer().vocab_size + 9)
    drawn[sorted(tokenizer().added_ids)] += 5
    drawn[tokenizer().vocab_size :] = 50
    return drawn.astype(np.float32)


def decode(
    sampler: Sampler,
    batch_type: type[SamplerBatch],
    seed: int,
    most: int = 80,
    logits: Callable[[tuple[int, ...], int], np.ndarray] = logits_of,
) -> list[int]:
    """The answer, in blocks with drafts of every kind: forced, drafted, of a wrong model, of no grammar."""
    chance, output = random.Random(seed), []
    while len(output) < most and not (output and output[-1] in tokenizer().eos_ids):
        batch = batch_type([sampler], [len(output)])
        drafts: list[int] = []
        kind = chance.choice(["forced", "drafted", "noise"])
        if kind == "forced":
            drafts = sampler.forced(4)
        else:
            for _ in range(chance.randint(0, 4)):
                wrong = chance.random() < 0.3
                row = torch.from_numpy(logits((*output, *drafts), seed + wrong))[None]
                token = int(batch.draft(row)[0])
                drafts.append(token if kind == "drafted" else chance.randrange(tokenizer().vocab_size))
        rows = np.stack([logits((*output, *drafts[:row]), seed) for row in range(len(drafts) + 1)])
        given_drafts = torch.tensor([drafts], dtype=torch.int64)
        chosen = batch.verify(torch.from_numpy(rows)[None], given_drafts)[0].tolist()
        for row, token in enumerate(chosen):
            output.append(token)
            sampler.accept(token)
            if len(output) == most or token in tokenizer().eos_ids or (row < len(drafts) and token != drafts[row]):
                break
    return output


def text_of(output: list[int]) -> str:
    assert not [token for token in output[:-1] if token in tokenizer().added_ids]
    return b"".join(tokenizer().text_bytes(token) for token in output).decode()


@both_ways
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_in_blocks_gives_the_plain_decoders_tokens(
    batch_type: type[SamplerBatch], temperature: float
) -> None:
    """The reference counts letters, and knows no grammar. Nowhere is the text forced, whose tokens are then too."""
    pieces = [tokenizer().token_bytes(token) for token in range(tokenizer().vocab_size)]
    letters = {
        token: piece.decode()
        for token, piece in enumerate(pieces)
        if re.fullmatch(b"[a-f]{1,9}", piece) and token not in tokenizer().added_ids
    }
    assert max(map(len, letters.values())) > 1

    def allowed(output: tuple[int, ...]) -> tuple[set[int], bool]:
        length = sum(len(letters[token]) for token in output)
        return {token for token, text in letters.items() if length + len(text) <= 9}, length >= 4

    for seed in range(12):
        params = SamplingParams(
            temperature=temperature, seed=seed, stop_token_ids=tokenizer().eos_ids, min_tokens=6, presence_penalty=0.5
        )
        expected = plain_decoder.decode(
            lambda tokens, seed=seed: logits_of(tokens, seed), (), params, 80, tokenizer().vocab_size, allowed
        )
        assert decode(sampler_of(Grammar("regex", "[a-f]{4,9}"), params), batch_type, seed) == expected


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "dry": {"type": "boolean"},
    },
    "required": ["city", "days", "dry"],
    "additionalProperties": False,
}
LARK = 'start: greeting " " NAME "."\ngreeting: "hello" | "good day"\nNAME: /[A-Z][a-z]{1,5}/\n'


@both_ways
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 1.5]))
def test_whatever_is_drawn_matches_its_grammar(batch_type: type[SamplerBatch], seed: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, stop_token_ids=tokenizer().eos_ids)

    def answer(grammar: Grammar) -> str:
        output = decode(sampler_of(grammar, params), batch_type, seed % 1000, most=300)
        assert output[-1] in tokenizer().eos_ids
        return text_of(output)

    value = json.loads(answer(Grammar("json_schema", json.dumps(SCHEMA))))
    assert value["city"] in ("Oslo", "Lima")
    assert all(0 <= day <= 9 for day in value["days"])
    assert isinstance(value["dry"], bool)
    assert re.fullmatch(r"[0-9]{3}-[a-f]{1,9}x", answer(Grammar("regex", r"[0-9]{3}-[a-f]{1,9}x")))
    assert re.fullmatch(r"(hello|good day) [A-Z][a-z]{1,5}\.", answer(Grammar("lark", LARK)))


def test_a_json_object_is_a_json_object() -> None:
    matcher = compiler().matcher(Grammar("json_object"))
    assert not [token for token in tokenizer().plain('{"a": [1, "two", null]}') if not matcher.advance(token)]
    assert matcher.finished
    for text in ("[1]", "1", " {"):
        assert not compiler().matcher(Grammar("json_object")).advance(tokenizer().plain(text)[0])


def test_white_space_between_json_tokens_comes_to_an_end() -> None:
    matcher = compiler().matcher(Grammar("json_object"))
    matcher.advance(tokenizer().plain("{")[0])
    space = tokenizer().plain(" ")[0]
    taken = 0
    while matcher.advance(space):
        taken += 1
    assert 8 <= taken <= 32


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    sampler = sampler_of(Grammar("regex", "a+b?"))
    ends = tokenizer().eos_ids

    def allowed() -> set[int]:
        row = torch.zeros(1, sampler.vocab)
        kept = sampler.process(row, torch.empty(0, dtype=torch.int64))[0]
        return set((kept > -torch.inf).nonzero()[:, 0].tolist())

    (a,), (b,) = tokenizer().plain("a"), tokenizer().plain("b")
    assert a in allowed()
    assert not allowed() & ends
    sampler.accept(a)
    assert {a, b} | ends <= allowed()
    assert not sampler.finished
    sampler.accept(b)
    assert sampler.finished
    assert allowed() == ends
    sampler.accept(min(ends))
    assert sampler.finished
    assert allowed() == ends


def test_min_tokens_and_bans_yield_to_what_the_grammar_demands() -> None:
    word = tokenizer().plain("yes")
    params = SamplingParams(
        temperature=0, min_tokens=50, stop_token_ids=tokenizer().eos_ids, bad_words=tuple((t,) for t in word)
    )
    output = decode(sampler_of(Grammar("regex", "yes"), params), SamplerBatch, 0)
    assert text_of(output) == "yes"


def test_an_answer_that_may_not_end_by_itself_gets_the_models_end_when_its_grammar_is_complete() -> None:
    sampler = sampler_of(Grammar("regex", "ok"), SamplingParams(temperature=0))
    output = decode(sampler, SamplerBatch, 0)
    assert text_of(output) == "ok"
    assert output[-1] in tokenizer().eos_ids
    assert sampler.finished


@both_ways
def test_forced_tokens_are_the_tokens_that_come(batch_type: type[SamplerBatch]) -> None:
    schema = Grammar("json_schema", '{"const": {"a long constant": "with nothing to choose about it"}}')
    output = decode(sampler_of(schema), batch_type, 3, most=300)
    assert json.loads(text_of(output)) == {"a long constant": "with nothing to choose about it"}
    sampler, forced = sampler_of(Grammar("regex", "nothing to choose")), 0
    while not sampler.finished:
        ahead = sampler.forced(3)
        assert len(ahead) <= 3
        row = torch.from_numpy(logits_of(()))[None, None]
        token = int(batch_type([sampler], [sampler.count]).verify(row, torch.empty(1, 0, dtype=torch.int64))[0, 0])
        if ahead:
            forced += 1
            assert ahead[0] == token
        sampler.accept(token)
    assert forced
    assert sampler.forced(3) == []
    assert Sampler(SamplingParams(), 10).forced(3) == []


@both_ways
def test_trying_drafts_leaves_no_trace_in_a_grammar(batch_type: type[SamplerBatch]) -> None:
    sampler = sampler_of(Grammar("regex", "(ab)+c"))
    assert isinstance(sampler.matcher, GrammarMatcher)
    for token in tokenizer().plain("ab"):
        sampler.accept(token)
    before = sampler.matcher.allowed()
    (a,), (b,), (c,) = (tokenizer().plain(letter) for letter in "abc")
    end = max(tokenizer().eos_ids)
    for drafts in ([a, b, c, end], [c, end, end, a], [a, a, a, a], [end, -1, 10**6, b]):
        rows = torch.randn(1, 5, sampler.vocab)
        for row, token in enumerate(drafts):
            if 0 <= token < sampler.vocab:
                rows[0, row, token] = 90.0
        batch_type([sampler], [9]).verify(rows, torch.tensor([drafts]))
        assert (sampler.matcher.allowed() == before).all()
        assert not sampler.finished


@settings(max_examples=30, deadline=None)
@given(picks=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_rolling_back_is_never_having_gone(picks: list[int], cut: int) -> None:
    """Through ends, refusals and completion."""
    matcher = compiler().matcher(Grammar("json_schema", json.dumps(SCHEMA)))
    path: list[int] = []
    states = [(matcher.allowed().tobytes(), matcher.accepts, matcher.finished)]
    for pick in picks:
        allowed = np.flatnonzero(matcher.allowed())
        able = [*allowed.tolist(), *(tokenizer().eos_ids if matcher.accepts and not matcher.finished else ())]
        assert not matcher.advance(min(tokenizer().added_ids - tokenizer().eos_ids))
        if not able:
            break
        path.append(able[pick % len(able)])
        assert matcher.advance(path[-1])
        states.append((matcher.allowed().tobytes(), matcher.accepts, matcher.finished))
    back = min(cut, len(path))
    matcher.rollback(back)
    assert (matcher.allowed().tobytes(), matcher.accepts, matcher.finished) == states[len(path) - back]
    for step, token in enumerate(path[len(path) - back :], len(path) - back + 1):
        assert matcher.advance(token)
        assert (matcher.allowed().tobytes(), matcher.accepts, matcher.finished) == states[step]


def test_answers_share_a_compiled_grammar_but_not_their_progress() -> None:
    one, other = (compiler().matcher(Grammar("regex", "abc")) for _ in range(2))
    for token in tokenizer().plain("abc"):
        assert one.advance(token)
    assert one.finished
    assert not other.finished
    assert not other.accepts


def test_the_text_of_special_tokens_is_text() -> None:
    """A string may spell `<|im_end|>`, in the tokens of its letters."""
    matcher = compiler().matcher(Grammar("json_schema", '{"type": "string"}'))
    for token in tokenizer().plain('"<|im_end|></think>"'):
        assert matcher.advance(token)
    assert matcher.finished


@pytest.mark.parametrize(
    ("grammar", "reason", "param"),
    [
        (Grammar("json_schema", "{"), "JSON schema", "response_format"),
        (Grammar("json_schema", "[1]"), "not an object", "response_format"),
        (Grammar("json_schema", '{"type": "strange"}'), "strange", "response_format"),
        (Grammar("json_schema", '{"$ref": "http://example.com/x"}'), "Resource", "response_format"),
        (Grammar("json_schema", '{"type": "string", "pattern": "("}'), "unclosed group", "response_format"),
        (Grammar("json_schema", '{"dependentSchemas": 1}'), "dependentSchemas", "response_format"),
        (Grammar("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "too deeply", "response_format"),
        (Grammar("json_schema", '{"enum": ["' + "x" * 70_000 + '"]}'), "longer than 65536", "response_format"),
        (Grammar("regex", "("), "unclosed group", "structured_outputs"),
        (Grammar("regex", r"[^\s\S]"), "no text matches", "structured_outputs"),
        (Grammar("lark", "start: other"), 'unknown name: "other"', "structured_outputs"),
        (Grammar("lark", ""), "Lark grammar", "structured_outputs"),
        (Grammar("lark", 'start: <|im_end|> "a"'), "special tokens", "structured_outputs"),
        (Grammar("lark", 'start: "<b>" <[5]>'), "special tokens", "structured_outputs"),
        (Grammar("lark", "start: x\nx: " + ' "a" x |' * 5000 + ' "b"'), "longer than 8192", "structured_outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_does_not_compile_is_refused_in_one_line(grammar: Grammar, reason: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiler().matcher(grammar)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.param == param


def test_a_grammar_that_grows_too_complex_says_so_and_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(Grammar("regex", "[ab]*c"))
    assert sampler.failure is None
    matcher = sampler.matcher
    assert isinstance(matcher, GrammarMatcher)
    matcher._matcher.rollback(10**6)  # any error of the library, which it never leaves
    assert sampler.failure
    assert "\n" not in sampler.failure
    row = torch.zeros(1, 1, sampler.vocab)
    chosen = SamplerBatch([sampler], [0]).verify(row, torch.empty(1, 0, dtype=torch.int64))
    assert int(chosen[0, 0]) in tokenizer().eos_ids


@both_ways
def test_the_real_vocabulary_is_masked_to_its_last_id(batch_type: type[SamplerBatch]) -> None:
    """248,077 ids, 248,320 rows of the head, 33 added tokens: none but text, the ends and a call's tags ever wins."""
    real = qwen_tokenizer.loaded()
    real_compiler = GrammarCompiler(real)
    matcher = real_compiler.matcher(Grammar("json_schema", json.dumps(SCHEMA)))
    params = SamplingParams(seed=3, temperature=2.0, stop_token_ids=real.eos_ids)
    sampler = Sampler(params, real.vocab_size, (), matcher)
    output: list[int] = []
    while not (output and output[-1] in real.eos_ids):
        row = torch.randn(1, 1, 248_320, generator=torch.Generator().manual_seed(len(output)))
        row[..., sorted(real.added_ids)] += 30
        row[..., real.vocab_size :] += 60
        chosen = batch_type([sampler], [len(output)]).verify(row, torch.empty(1, 0, dtype=torch.int64))
        output.append(int(chosen[0, 0]))
        sampler.accept(output[-1])
        assert len(output) < 500
    assert not set(output[:-1]) & real.added_ids
    assert json.loads(b"".join(map(real.text_bytes, output)))["city"] in ("Oslo", "Lima")
    calls = real_compiler.calls([{"type": "function", "function": {"name": "act"}}], many=False)
    begin, end = real.literal_id("<tool_call>"), real.literal_id("</tool_call>")
    for token in (begin, *real.plain("\n<function=act>\n</function>\n"), end):
        assert np.flatnonzero(calls.allowed()).tolist() == [token]
        assert token is not None
        assert calls.advance(token)
    assert calls.finished


@both_ways
def test_a_right_drafter_drafts_what_the_grammar_lets_the_target_choose(batch_type: type[SamplerBatch]) -> None:
    params = SamplingParams(seed=4, stop_token_ids=tokenizer().eos_ids)
    sampler = sampler_of(Grammar("regex", "[a-f]{2}[0-9]{2}[a-f]{2}"), params)
    rows = torch.randn(1, 5, sampler.vocab, generator=torch.Generator().manual_seed(2))
    batch = batch_type([sampler], [0])
    drafts = torch.stack([batch.draft(rows[:, row]) for row in range(5)], -1)
    assert batch_type([sampler], [0]).verify(rows, drafts[:, :-1]).tolist() == drafts.tolist()
