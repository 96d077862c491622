"""Choices inside speculative blocks: whatever was drafted, in whatever company, the plain decoder's tokens come out."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.choose_on_device import DeviceChooser
from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from tests import plain_decoder

VOCAB, WIDTH = 40, 43  # the head's last three rows stand for nothing, and would always win
STOPS = frozenset({38, 39})


class DeviceBatch(SamplerBatch):
    """As on a device, over CPU tensors."""

    def _choose(self, logits: Tensor, drafts: Tensor) -> Tensor:
        return self.choose_on_device(logits[..., : self._samplers[0].vocab], drafts)


BATCHES: list[type[SamplerBatch]] = [SamplerBatch, DeviceBatch]
both_ways = pytest.mark.parametrize("batch_type", BATCHES)


def logits_of(tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """A model without weights: coarse logits, so that ties are common, of the last three tokens."""
    drawn = np.random.default_rng([len(tokens) % 7, *(token + 1 for token in tokens[-3:])]).standard_normal(WIDTH) * 2
    drawn[VOCAB:] = 50
    return np.round(drawn * 4).astype(np.float32) / 4


@dataclass
class Answer:
    """One answer, decoded in blocks."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params, VOCAB, self.prompt)
        self.output: list[int] = []

    @property
    def ended(self) -> bool:
        return len(self.output) >= self.max_tokens or self.output[-1:] in [
            [stop] for stop in self.params.stop_token_ids
        ]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.sampler.accept(token)
            self.output.append(token)
            if self.ended:
                return


def step(sequences: list[Answer], slots: int, chance: random.Random, batch_type: type[SamplerBatch]) -> None:
    """Draft with a model that is sometimes wrong, verify, accept."""
    batch = batch_type([s.sampler for s in sequences], [len(s.tokens) for s in sequences])
    drafts: list[list[int]] = [[] for _ in sequences]
    for _ in range(slots):
        rows = [
            logits_of((*s.tokens, *d, *[0] * (chance.random() < 0.3))) for s, d in zip(sequences, drafts, strict=True)
        ]
        for d, token in zip(drafts, batch.draft(torch.from_numpy(np.stack(rows))).tolist(), strict=True):
            d.append(token)
    if chance.random() < 0.2:  # drafts from elsewhere, among them what no sampler allows
        drafts = [[chance.randrange(-1, WIDTH) for _ in d] for d in drafts]
    rows = [
        [logits_of((*s.tokens, *d[:row])) for row in range(slots + 1)] for s, d in zip(sequences, drafts, strict=True)
    ]
    given_drafts = torch.tensor(drafts, dtype=torch.int64).reshape(len(sequences), slots)
    chosen = batch.verify(torch.from_numpy(np.array(rows)), given_drafts).tolist()
    for sequence, drafted, target in zip(sequences, drafts, chosen, strict=True):
        right = next((i for i, (a, b) in enumerate(zip(drafted, target, strict=False)) if a != b), slots)
        sequence.take(target[: right + 1])


def decode_in_blocks(
    requests: list[tuple[tuple[int, ...], SamplingParams]], seed: int, batch_type: type[SamplerBatch], most: int = 24
) -> list[list[int]]:
    """All requests together, joining and leaving, with block lengths that change."""
    chance = random.Random(seed)
    everyone = [Answer(prompt, params, most) for prompt, params in requests]
    while waiting := [s for s in everyone if not s.ended]:
        company = chance.sample(waiting, chance.randint(1, len(waiting)))
        step(company, chance.randint(0, 4), chance, batch_type)
    return [s.output for s in everyone]


tokens = st.integers(0, VOCAB - 1)
prompts = st.lists(tokens, min_size=1, max_size=6).map(tuple)
quarters = st.integers(-8, 8).map(lambda n: n / 4)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 0, 1, 5, 39, 100]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 0.6]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    presence_penalty=st.just(0.0) | quarters,
    frequency_penalty=st.just(0.0) | quarters,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.1, 0.7, 2.0]),
    logit_bias=st.just(()) | st.dictionaries(tokens, quarters, max_size=4).map(lambda d: tuple(d.items())),
    bad_words=st.just(()) | st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=12).map(tuple),
    min_tokens=st.sampled_from([0, 0, 1, 7]),
    stop_token_ids=st.sampled_from([frozenset(), STOPS]),
)


@both_ways
@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(prompts, parameters), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_blocks_give_the_plain_decoders_tokens(
    batch_type: type[SamplerBatch], requests: list[tuple[tuple[int, ...], SamplingParams]], seed: int
) -> None:
    """Greedy and sampled, every sampler in random mixture, alone and in company."""
    expected = [plain_decoder.decode(logits_of, prompt, params, 24, VOCAB) for prompt, params in requests]
    assert decode_in_blocks(requests, seed, batch_type) == expected


ONE_EACH = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": ((3, 4.0), (5, -3.0))},
    "bad words": {"bad_words": ((7,), (1, 2), *((a, b) for a in range(0, 40, 2) for b in range(0, 40, 3)))},
    "min tokens": {"min_tokens": 12, "stop_token_ids": frozenset(range(0, 40, 4))},
}


@both_ways
@pytest.mark.parametrize("name", list(ONE_EACH))
def test_each_processor_alone_is_greedily_the_plain_decoders(name: str, batch_type: type[SamplerBatch]) -> None:
    params = SamplingParams(temperature=0, **ONE_EACH[name])  # type: ignore[arg-type]
    requests = [((n, n + 1, n), params) for n in range(6)]
    expected = [plain_decoder.decode(logits_of, prompt, params, 24, VOCAB) for prompt, _ in requests]
    unprocessed = [
        plain_decoder.decode(logits_of, prompt, SamplingParams(temperature=0), 24, VOCAB) for prompt, _ in requests
    ]
    assert expected != unprocessed
    assert decode_in_blocks(requests, 1, batch_type) == expected


@both_ways
def test_penalties_smeared_over_a_block_would_be_seen(
    batch_type: type[SamplerBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that forgets what was accepted earlier in the block is not the plain decoder."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    requests = [((n,), params) for n in range(6)]
    expected = [plain_decoder.decode(logits_of, prompt, params, 24, VOCAB) for prompt, _ in requests]
    process = Sampler.process
    monkeypatch.setattr(
        Sampler, "process", lambda self, logits, drafts: process(self, logits, torch.full_like(drafts, 39))
    )
    assert decode_in_blocks(requests, 1, batch_type) != expected


@both_ways
@settings(max_examples=40, deadline=None)
@given(params=st.lists(parameters, min_size=2, max_size=6), seed=st.integers(0, 2**32))
def test_a_row_is_chosen_alike_alone_and_in_any_company(
    batch_type: type[SamplerBatch], params: list[SamplingParams], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    samplers = [Sampler(p, VOCAB, (1, 2, 3)) for p in params]
    logits = torch.from_numpy(rng.standard_normal((len(params), 4, WIDTH)).astype(np.float32) * 3)
    together_drafts = torch.zeros(len(params), 0, dtype=torch.int64)
    # Each row's own choices as the drafts, so that every row counts.
    for rows in range(1, 5):
        together = batch_type(samplers, range(len(params))).verify(logits[:, :rows], together_drafts)
        for i, sampler in enumerate(samplers):
            alone = batch_type([sampler], [i]).verify(logits[i : i + 1, :rows], together_drafts[i : i + 1])
            assert alone.tolist() == together[i : i + 1].tolist()
        together_drafts = together
    drafting = batch_type(samplers, range(len(params)))
    drafted = torch.stack([drafting.draft(logits[:, row]) for row in range(4)], -1)
    assert drafted.tolist() == together_drafts.tolist()


@both_ways
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_quarter_million_tokens_are_chosen_alike_in_any_company(
    batch_type: type[SamplerBatch], threads: int
) -> None:
    vocab = 248_077
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=2),
        SamplingParams(top_p=0.9, presence_penalty=1.5, seed=3),
        SamplingParams(temperature=0),
    ]
    samplers = [Sampler(p, vocab) for p in params]
    logits = torch.randn(4, 2, 248_320, generator=torch.Generator().manual_seed(0)) * 2.5
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = batch_type(samplers, [9] * 4).verify(logits[:, :1], torch.empty(4, 0, dtype=torch.int64))
        together = batch_type(samplers, [9] * 4).verify(logits, first)  # right drafts: every row counts
        assert together[:, :1].tolist() == first.tolist()
        for i in range(4):
            alone = batch_type([samplers[i]], [9]).verify(logits[i : i + 1], first[i : i + 1])
            assert alone.tolist() == together[i : i + 1].tolist()
    finally:
        torch.set_num_threads(before)


@both_ways
def test_choosing_leaves_no_trace(batch_type: type[SamplerBatch]) -> None:
    """Neither in the samplers nor in the logits handed over."""
    params = SamplingParams(
        seed=1, presence_penalty=1.0, repetition_penalty=1.2, bad_words=((4, 5),), min_tokens=3, stop_token_ids=STOPS
    )
    sampler = Sampler(params, VOCAB, (1, 2))
    sampler.accept(4)
    before = copy.deepcopy(sampler)
    logits = torch.randn(1, 3, WIDTH)
    kept = logits.clone()
    batch = batch_type([sampler], [3])
    first = [batch.draft(logits[:, row]).tolist() for row in range(3)]
    batch.verify(logits, torch.tensor([[4, 5]]))
    assert torch.equal(logits, kept)
    assert sampler.count == before.count == 1
    again = batch_type([before], [3])
    assert [again.draft(logits[:, row]).tolist() for row in range(3)] == first
    again = batch_type([sampler], [3])
    assert [again.draft(logits[:, row]).tolist() for row in range(3)] == first


def test_a_replayed_history_chooses_as_the_one_that_was_lived() -> None:
    """A preempted sequence's sampler is made anew and told its tokens."""
    params = SamplingParams(seed=5, frequency_penalty=0.5, bad_words=((1, 2), (3,)), min_tokens=9, stop_token_ids=STOPS)
    prompt = (1, 2, 3)
    output = plain_decoder.decode(logits_of, prompt, params, 12, VOCAB)
    sampler = Sampler(params, VOCAB, prompt)
    for token in output[:6]:
        sampler.accept(token)
    row = torch.from_numpy(logits_of((*prompt, *output[:6])))[None, None]
    chosen = SamplerBatch([sampler], [9]).verify(row, torch.empty(1, 0, dtype=torch.int64))
    assert chosen.tolist() == [[output[6]]]


def test_plain_sequences_read_no_value_on_the_way_from_logits_to_tokens() -> None:
    """Traced on a device without data, where reading a value is an error."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(top_k=20, top_p=0.95, seed=2),
        SamplingParams(top_p=0.9, seed=3),
        SamplingParams(min_p=0.1, top_k=2000, seed=4),
    ]
    meta = torch.device("meta")
    for group in (params, *[[p] * 3 for p in params]):
        samplers = [Sampler(p, 5000) for p in group]
        batch = SamplerBatch(samplers, [7] * len(group))
        first = batch.draft(torch.empty(len(group), 5010, device=meta))
        assert first.shape == (len(group),)
        second = batch.draft(torch.empty(len(group), 5010, device=meta))
        drafts = torch.stack((first, second), -1)
        assert batch.verify(torch.empty(len(group), 3, 5010, device=meta), drafts).shape == (len(group), 3)


def test_processors_read_no_value_either() -> None:
    params = SamplingParams(
        presence_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias=((3, 1.0),),
        bad_words=((1,), (2, 3)),
        min_tokens=5,
        stop_token_ids=STOPS,
    )
    sampler = Sampler(params, 5000, (1, 2, 3))
    sampler.accept(4)
    batch = SamplerBatch([sampler, Sampler(replace(params, top_k=20), 5000)], [4, 9])
    meta = torch.device("meta")
    drafts = torch.empty(2, 2, dtype=torch.int64, device=meta)
    assert batch.verify(torch.empty(2, 3, 5010, device=meta), drafts).shape == (2, 3)


def test_an_empty_batch_chooses_nothing() -> None:
    assert SamplerBatch([], []).verify(torch.empty(0, 2, 10), torch.empty(0, 1, dtype=torch.int64)).shape == (0, 2)
    assert DeviceChooser([], [], 10, torch.device("cpu"))(torch.empty(0, 2, 10)).shape == (0, 2)
