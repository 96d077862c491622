"""Coupled sampling, one choice: noise against published vectors, truncation against a plain sort, distributions.

Everything is asked of the host's way of choosing and of the device's, which also runs on CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from backend.engine import choose_on_device, choose_on_host
from backend.engine.noise import GUMBEL_MAX, Stream, host_gumbel, host_noise, philox4x32
from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams, leading
from tests import plain_decoder

Choose = Callable[[Tensor, SamplingParams, range], list[int]]

# Random123's kat_vectors for philox4x32-10: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def on_host(logits: Tensor, params: SamplingParams, positions: range) -> list[int]:
    """The tokens one row of logits gives at each position."""
    row = logits.numpy()
    return [choose_on_host.choose(row, params, position) for position in positions]


def on_device(logits: Tensor, params: SamplingParams, positions: range) -> list[int]:
    sampler = Sampler(params, len(logits))
    rows, drafts = logits.expand(1, len(positions), -1), torch.zeros(1, len(positions) - 1, dtype=torch.int64)
    return SamplerBatch([sampler], [positions.start]).choose_on_device(rows, drafts)[0].tolist()


both_ways = pytest.mark.parametrize("choose", [on_host, on_device])


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    token=st.integers(0, 248319),
    position=st.integers(0, 2**20),
    choice=st.integers(0, 7),
)
def test_noise_is_the_designs_formula(seed: int, token: int, position: int, choice: int) -> None:
    expected = float(plain_decoder.gumbel(seed, token, position, choice))
    got = float(host_noise(Stream(seed, position, choice), np.array([token]))[0])
    params = choose_on_device.RowParams.of(
        [SamplingParams(seed=seed, choice=choice)], [position], 248_320, torch.device("cpu")
    )
    drawn = float(choose_on_device.device_noise(params, torch.tensor([[token]]))[0, 0])
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert drawn == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert got < GUMBEL_MAX


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    stream, everyone = Stream(7, 42), np.arange(1003)
    noise = host_noise(stream, everyone)
    for start in range(1, 40):
        for step in (1, 2, 7):
            some = everyone[start::step]
            assert (host_noise(stream, some) == noise[some]).all()


def test_the_whole_vocabularys_noise_is_each_tokens() -> None:
    params = choose_on_device.RowParams.of([SamplingParams(seed=9)] * 3, [4, 5, 6], 1002, torch.device("cpu"))
    whole = choose_on_device.device_vocabulary_noise(params, 1002)
    each = choose_on_device.device_noise(params, torch.arange(1002).expand(3, -1))
    assert torch.allclose(whole, each, rtol=1e-6, atol=1e-6)


def test_no_noise_exceeds_the_bound_that_spares_drawing_it() -> None:
    assert 22.8 < float(host_gumbel(np.array([0]))[0]) < GUMBEL_MAX


logit_rows = st.integers(0, 2**32).flatmap(
    lambda seed: st.sampled_from([0.0, 0.3, 3.0, 30.0]).map(
        lambda scale: (torch.randn(301, generator=torch.Generator().manual_seed(seed)) * scale).half().float()
    )
)


def kept_on_device(z: Tensor, params: SamplingParams, width: int | None) -> set[int]:
    """Ids that a device's choice can fall on: those that win when they alone are given all the noise."""

    def favour(rows: choose_on_device.RowParams, ids: Tensor) -> Tensor:
        return torch.where(ids == torch.arange(len(z))[:, None], 1e6, 0.0)

    rows = choose_on_device.RowParams.of([params], [0], len(z), torch.device("cpu")).block(len(z), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_on_device, "device_noise", favour)
        patch.setattr(
            choose_on_device, "device_vocabulary_noise", lambda r, vocab: favour(r, torch.arange(vocab)[None])
        )
        x = z.expand(len(z), -1)
        if width is None:
            chosen = choose_on_device.choose_among_all(x, rows, cuts=True)
        else:
            chosen = choose_on_device.choose_among_leading(x, rows, width)
    return set(chosen[chosen == torch.arange(len(z))].tolist())


@settings(max_examples=200, deadline=None)
@given(
    z=logit_rows,
    top_k=st.sampled_from([0, 1, 2, 20, 299, 301, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_truncation_keeps_what_a_full_sort_keeps(z: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    order = plain_decoder.kept(list(z.numpy()), params)
    expected = sorted(order)
    kept = choose_on_host.truncate(z.numpy(), top_k, top_p, min_p).tolist()
    if kept != expected:  # sums of different precision may disagree about one token exactly at top_p
        assert top_p < 1
        assert abs(len(kept) - len(expected)) == 1
        assert set(kept) >= set(order[: len(kept)])
    assert kept_on_device(z, params, None) == set(kept)
    if 0 < top_k < len(z):
        assert kept_on_device(z, params, top_k + 1) == set(kept)


@pytest.mark.parametrize("scale", [0.0, 0.01, 8.0])
@pytest.mark.parametrize("top_p", [0.5, 0.99])
def test_top_p_over_a_large_vocabulary_agrees_beyond_the_first_candidates(scale: float, top_p: float) -> None:
    """A flat row needs far more than the leading thousand: the exact path must take over."""
    z = np.random.default_rng(1).standard_normal(40_000).astype(np.float32) * np.float32(scale)
    order = np.argsort(-z, kind="stable")
    mass = np.exp(z[order].astype(np.float64)).cumsum()
    expected = 1 + int((mass < top_p * mass[-1]).sum())
    kept = choose_on_host.truncate(z, 0, top_p, 0.0)
    assert abs(len(kept) - expected) <= 1
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    assert (expected > 1024) == (scale < 1)


def test_top_p_over_equal_tokens_keeps_exactly_its_share_of_the_lowest_ids() -> None:
    z = np.zeros(40_000, np.float32)
    assert choose_on_host.truncate(z, 0, 0.5, 0.0).tolist() == list(range(20_000))
    z[30_000:] = 1.0  # e times as likely, and first
    kept = choose_on_host.truncate(z, 0, 0.75, 0.0)
    assert kept[-10_000:].tolist() == list(range(30_000, 40_000))
    assert kept[:-10_000].tolist() == list(range(math.ceil(0.75 * (30_000 + 10_000 * math.e) - 10_000 * math.e)))


@pytest.mark.parametrize("count", [1, 2, 50, 1024, 39_999, 40_000])
def test_the_leading_ids_are_those_of_a_full_sort(count: int) -> None:
    for scale in (0.0, 1.0, 30.0):
        z = (torch.randn(40_000, generator=torch.Generator().manual_seed(count)) * scale).half().float()
        expected = np.argsort(-z.numpy(), kind="stable")[:count].tolist()
        assert leading(z, count).tolist() == expected
        assert choose_on_device.leading(z[None], count)[0].tolist() == expected


def test_top_k_keeps_exactly_k_among_ties_the_lowest_ids() -> None:
    z = torch.zeros(5000)
    z[4000] = 1.0
    z[1] = -0.0
    assert leading(z, 4).tolist() == [4000, 0, 1, 2]
    assert choose_on_host.truncate(z.numpy(), 3, 1.0, 0.0).tolist() == [0, 1, 4000]
    assert kept_on_device(z[:4001], SamplingParams(top_k=3), 32) == {4000, 0, 1}


@both_ways
def test_greedy_takes_the_lowest_id_of_a_tie(choose: Choose) -> None:
    z = torch.zeros(248_320)
    z[[7, 9, 200_000]] = 2.0
    assert choose(z, SamplingParams(temperature=0), range(1)) == [7]


def test_equal_scores_go_to_the_lowest_id_on_the_host_even_against_the_likeliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z, noise = np.zeros(100, np.float32), np.zeros(100, np.int64)
    z[[50, 10, 70]], noise[[50, 10, 70]] = [2, 1, 1], [1, 2, 2]
    monkeypatch.setattr(choose_on_host, "host_words", lambda stream, counters: noise.reshape(-1, 4)[counters])
    monkeypatch.setattr(choose_on_host, "host_gumbel", lambda words: words.astype(np.float32))
    monkeypatch.setattr(choose_on_host, "host_noise", lambda stream, ids: noise[ids].astype(np.float32))
    assert choose_on_host.choose(z, SamplingParams(), 0) == 10


@both_ways
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=4),
        SamplingParams(temperature=1.3, top_p=0.9, seed=5),
        SamplingParams(min_p=0.01, seed=6),
        SamplingParams(top_k=5000, seed=7),
    ],
    ids=["untruncated", "top_k and top_p", "top_p", "min_p", "large top_k"],
)
def test_a_choice_among_a_quarter_million_tokens_is_the_plain_argmax(choose: Choose, params: SamplingParams) -> None:
    """Every token's noise drawn, everything sorted: the shortcuts must not show."""
    for scale in (0.5, 3.0):
        z = torch.randn(248_320, generator=torch.Generator().manual_seed(8)) * scale
        scaled = z.numpy() / np.float32(params.temperature)
        order = np.argsort(-scaled, kind="stable")
        if params.min_p:
            order = order[scaled[order] >= scaled[order[0]] + np.float32(math.log(params.min_p))]
        order = order[: params.top_k or None]
        mass = np.exp((scaled[order] - scaled[order[0]]).astype(np.float64)).cumsum()
        ids = np.sort(order[: 1 + int((mass < params.top_p * mass[-1]).sum())] if params.top_p < 1 else order)
        expected = [
            int(ids[(scaled[ids] + host_noise(Stream(params.seed, position), ids)).argmax()]) for position in range(3)
        ]
        assert choose(z, params, range(3)) == expected


@both_ways
def test_logits_that_are_not_numbers_give_some_token(choose: Choose) -> None:
    for value in (math.nan, math.inf):
        row = torch.tensor([0.0, value, 1.0, 2.0])
        for params in (
            SamplingParams(),
            SamplingParams(temperature=0),
            SamplingParams(top_k=2),
            SamplingParams(top_p=0.9),
        ):
            assert 0 <= choose(row, params, range(1))[0] < 4


def chi_square(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def fits(probabilities: NDArray[np.float64], counts: NDArray[np.float64]) -> bool:
    """Chi-square at about five standard deviations; nothing outside the support."""
    support = probabilities > 0
    if counts[~support].any():
        return False
    freedom = int(support.sum()) - 1
    statistic = chi_square(counts[support], probabilities[support] * counts.sum())
    return statistic < freedom + 5 * math.sqrt(2 * freedom) + 10


DRAWS, BLOCK = 20_000, 50
VOCAB, NEUTRAL, STOP = 25, 24, 23  # NEUTRAL has no probability: as a draft it changes no other token's
PROMPT, OUTPUT = (1, 2, 3, 3), (2, 21, 21, 21, 7, NEUTRAL)

CASES = {
    "untruncated": SamplingParams(seed=1),
    "hot": SamplingParams(temperature=1.7, seed=2),
    "top_k": SamplingParams(temperature=0.7, top_k=5, seed=3),
    "top_p": SamplingParams(top_p=0.8, seed=4),
    "min_p": SamplingParams(min_p=0.1, seed=5),
    "presence": SamplingParams(presence_penalty=0.7, seed=6),
    "frequency": SamplingParams(frequency_penalty=0.4, seed=7),
    "repetition": SamplingParams(repetition_penalty=1.4, seed=8),
    "bias": SamplingParams(logit_bias=((4, 1.0), (6, -2.0)), seed=9),
    "bad words": SamplingParams(bad_words=((8,), (NEUTRAL, 9), (21, 10)), seed=10),
    "min tokens": SamplingParams(min_tokens=10**6, stop_token_ids=frozenset({STOP}), seed=11),
    "all": SamplingParams(
        temperature=0.8,
        top_k=12,
        top_p=0.95,
        min_p=0.01,
        seed=12,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((4, 1.0),),
        bad_words=((8,),),
    ),
}


def row() -> Tensor:
    z = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * 1.5
    z[NEUTRAL] = -torch.inf
    return z


def draws(
    params: SamplingParams, prompt: tuple[int, ...] = PROMPT, output: tuple[int, ...] = OUTPUT
) -> NDArray[np.float64]:
    """How often each token is chosen after the given history, over so many positions."""
    sampler = Sampler(params, VOCAB, prompt)
    for token in output:
        sampler.accept(token)
    logits, drafts = row().expand(1, BLOCK, -1), torch.full((1, BLOCK - 1), NEUTRAL)
    chosen = [SamplerBatch([sampler], [start]).choose_on_device(logits, drafts)[0] for start in range(0, DRAWS, BLOCK)]
    return torch.bincount(torch.cat(chosen), minlength=VOCAB).double().numpy()


@pytest.mark.parametrize("name", list(CASES))
def test_positions_draw_from_the_processed_distribution(name: str) -> None:
    params = CASES[name]
    assert fits(plain_decoder.probabilities(row().numpy(), params, PROMPT, OUTPUT), draws(params))


@pytest.mark.parametrize("name", ["untruncated", "top_p", "all"])
def test_the_hosts_choices_are_the_devices(name: str) -> None:
    params, z = CASES[name], row()
    edited = Sampler(params, VOCAB, PROMPT).process(z[None], torch.empty(0, dtype=torch.int64))[0]
    plain = SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p, params.seed)
    assert on_host(edited, plain, range(2000)) == on_device(edited, plain, range(2000))


def test_the_hosts_own_draws_fit() -> None:
    probabilities = plain_decoder.probabilities(row().numpy(), CASES["untruncated"], (), ())
    chosen = on_host(row(), CASES["untruncated"], range(DRAWS))
    assert fits(probabilities, np.bincount(chosen, minlength=VOCAB).astype(np.float64))


MUTANTS: dict[str, tuple[str, dict[str, object]]] = {
    "a temperature a tenth too high": ("hot", {"temperature": 1.87}),
    "one fewer of top_k": ("top_k", {"top_k": 4}),
    "top_p a twentieth off": ("top_p", {"top_p": 0.75}),
    "min_p forgotten": ("min_p", {"min_p": 0.0}),
    "presence forgotten": ("presence", {"presence_penalty": 0.0}),
    "presence for frequency": ("frequency", {"frequency_penalty": 0.0, "presence_penalty": 0.4}),
    "frequency for presence": ("presence", {"presence_penalty": 0.0, "frequency_penalty": 0.7}),
    "repetition forgotten": ("repetition", {"repetition_penalty": 1.0}),
    "bias forgotten": ("bias", {"logit_bias": ()}),
    "a bad phrase forgotten": ("bad words", {"bad_words": ((8,), (21, 10))}),
    "a bad phrase out of place": ("bad words", {"bad_words": ((8,), (NEUTRAL, 9), (NEUTRAL, 10))}),
    "min_tokens forgotten": ("min tokens", {"min_tokens": 0}),
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_the_chi_square_would_see_a_broken_sampler(mutant: str) -> None:
    name, change = MUTANTS[mutant]
    probabilities = plain_decoder.probabilities(row().numpy(), CASES[name], PROMPT, OUTPUT)
    assert not fits(probabilities, draws(replace(CASES[name], **change)))  # type: ignore[arg-type]


def test_the_chi_square_would_see_a_history_cut_short() -> None:
    expected = plain_decoder.probabilities(row().numpy(), CASES["repetition"], PROMPT, OUTPUT)
    assert not fits(expected, draws(CASES["repetition"], prompt=()))
    expected = plain_decoder.probabilities(row().numpy(), CASES["frequency"], PROMPT, OUTPUT)
    assert not fits(expected, draws(CASES["frequency"], output=(2, 21, 7)))


def test_the_chi_square_would_see_noise_that_is_not_gumbels(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = choose_on_device.device_vocabulary_noise
    monkeypatch.setattr(choose_on_device, "device_vocabulary_noise", lambda rows, vocab: 0.9 * noise(rows, vocab))
    probabilities = plain_decoder.probabilities(row().numpy(), CASES["untruncated"], PROMPT, OUTPUT)
    assert not fits(probabilities, draws(CASES["untruncated"]))


def test_positions_seeds_and_choices_are_independent() -> None:
    """Draws at neighbouring positions, seeds and choices agree as often as chance has it, and no oftener."""
    count, tokens = 20_000, 16
    z = torch.zeros(tokens)

    def stream(seed: int, choice: int = 0) -> NDArray[np.int64]:
        return np.array(on_device(z, SamplingParams(seed=seed, choice=choice), range(count)))

    base = stream(1)
    others = [stream(2), stream(1 + 2**32), stream(1, choice=1), np.roll(base, 1), np.roll(base, 4)]
    for other in others:
        agreement = float((base == other).mean())
        assert abs(agreement - 1 / tokens) < 5 * math.sqrt(1 / tokens * (1 - 1 / tokens) / count)
        pairs = np.bincount(base * tokens + other, minlength=tokens**2).astype(np.float64)
        assert fits(np.full(tokens**2, 1 / tokens**2), pairs)
