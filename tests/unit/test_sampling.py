"""Coupled sampling: the noise against published vectors, each truncation against a plain oracle, the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.engine.noise import GUMBEL_MAX, gumbel, philox4x32
from backend.engine.sampling import Sampler, SamplingParams, leading, token_logprobs, truncate
from backend.interface import GenerationFailed

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


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key[0] | key[1] << 32)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def plain_philox(counter: list[int], key: int) -> list[int]:
    """Philox4x32-10 in Python integers, written from the paper."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    token=st.integers(0, 248319),
    position=st.integers(0, 2**20),
    choice=st.integers(0, 7),
)
def test_noise_is_the_designs_formula(seed: int, token: int, position: int, choice: int) -> None:
    word = plain_philox([token >> 2, position, choice, 0], seed % 2**64)[token & 3]
    expected = -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
    got = float(gumbel(seed, torch.tensor([token]), position, choice)[0])
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert got < GUMBEL_MAX


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    everyone = gumbel(7, torch.arange(1000), 42)
    some = torch.tensor([3, 999, 500, 4])
    assert torch.allclose(gumbel(7, some, 42), everyone[some], rtol=0, atol=1e-6)


def oracle(z: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Sort everything by (z descending, id ascending), then cut prefixes; in Python floats."""
    order = sorted(range(len(z)), key=lambda i: (-float(z[i]), i))
    if min_p > 0:
        order = [i for i in order if float(z[i]) >= float(z[order[0]]) + math.log(min_p)]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        weights = [math.exp(float(z[i]) - float(z[order[0]])) for i in order]
        total, cumulative, kept = sum(weights), 0.0, []
        for i, weight in zip(order, weights, strict=True):
            kept.append(i)
            cumulative += weight
            if cumulative / total >= top_p:
                break
        order = kept
    return order


logit_rows = st.integers(0, 2**32).flatmap(
    lambda seed: st.sampled_from([0.3, 3.0, 30.0]).map(
        lambda scale: (torch.randn(300, generator=torch.Generator().manual_seed(seed)) * scale).half().float()
    )
)


@settings(max_examples=300, deadline=None)
@given(
    z=logit_rows,
    top_k=st.sampled_from([0, 1, 2, 20, 299, 300, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_truncation_keeps_what_a_full_sort_keeps(z: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    kept, expected = truncate(z, top_k, top_p, min_p).tolist(), oracle(z, top_k, top_p, min_p)
    if kept != expected:  # float32 and float64 sums may disagree about one token exactly at top_p
        assert top_p < 1
        assert abs(len(kept) - len(expected)) == 1
        assert kept[: len(expected)] == expected[: len(kept)]


@pytest.mark.parametrize("scale", [0.01, 8.0])
@pytest.mark.parametrize("top_p", [0.5, 0.99])
def test_top_p_over_a_large_vocabulary_agrees_beyond_the_first_candidates(scale: float, top_p: float) -> None:
    """A flat row needs far more than the 1,024 leading tokens: the exact path must take over."""
    z = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * scale
    kept, expected = truncate(z, 0, top_p, 0.0), oracle(z, 0, top_p, 0.0)
    assert abs(len(kept) - len(expected)) <= 1
    assert (len(expected) > 1024) == (scale < 1)


def test_top_k_keeps_exactly_k_among_ties_the_lowest_ids() -> None:
    z = torch.zeros(5000)
    z[4000] = 1.0
    assert leading(z, 4).tolist() == [4000, 0, 1, 2]
    assert truncate(z, 3, 1.0, 0.0).tolist() == [4000, 0, 1]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    z = torch.zeros(248_320)
    z[[7, 9, 200_000]] = 2.0
    assert Sampler(SamplingParams(temperature=0), len(z)).choose(z, 0) == 7


def test_padding_rows_of_the_head_are_never_chosen() -> None:
    z = torch.zeros(100)
    z[90:] = 50.0
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.9)):
        assert all(Sampler(params, 90).choose(z, position) < 90 for position in range(50))


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(GenerationFailed):
        Sampler(SamplingParams(), 4).choose(torch.tensor([0.0, float("nan"), 1.0, 2.0]), 0)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected).square() / expected).sum())


CASES = {
    "untruncated": SamplingParams(temperature=1.0, seed=1),
    "hot": SamplingParams(temperature=1.7, seed=2),
    "cold, top_k": SamplingParams(temperature=0.7, top_k=5, seed=3),
    "top_p": SamplingParams(top_p=0.8, seed=4),
    "min_p": SamplingParams(min_p=0.1, seed=5),
    "all": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, seed=6),
}
DRAWS = 20_000


def distribution(z: Tensor, params: SamplingParams) -> Tensor:
    scaled = z.double() / params.temperature
    kept = oracle(scaled, params.top_k, params.top_p, params.min_p)
    probabilities = torch.zeros(len(z), dtype=torch.float64)
    probabilities[kept] = torch.softmax(scaled[kept], 0)
    return probabilities


def draws(z: Tensor, params: SamplingParams, count: int = DRAWS) -> Tensor:
    sampler = Sampler(params, len(z))
    return torch.bincount(torch.tensor([sampler.choose(z, p) for p in range(count)]), minlength=len(z)).double()


def fits(z: Tensor, params: SamplingParams, counts: Tensor) -> bool:
    """Chi-square at about five standard deviations; nothing outside the support."""
    probabilities = distribution(z, params)
    support = probabilities > 0
    if counts[~support].any():
        return False
    freedom = int(support.sum()) - 1
    expected = probabilities[support] * counts.sum()
    return chi_square(counts[support], expected) < freedom + 5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("name", list(CASES))
def test_positions_draw_from_the_processed_distribution(name: str) -> None:
    z = torch.randn(24, generator=torch.Generator().manual_seed(11)) * 1.5
    assert fits(z, CASES[name], draws(z, CASES[name]))


@pytest.mark.parametrize("broken", ["temperature", "top_k", "noise"])
def test_the_chi_square_would_see_a_broken_sampler(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(24, generator=torch.Generator().manual_seed(11)) * 1.5
    params, used = CASES["all"], CASES["all"]
    if broken == "temperature":
        used = SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02, seed=6)
    elif broken == "top_k":
        used = SamplingParams(temperature=0.8, top_k=8, top_p=0.9, min_p=0.02, seed=6)
    else:
        monkeypatch.setattr(
            "backend.engine.sampling.gumbel", lambda seed, ids, position, choice: 0.9 * gumbel(seed, ids, position)
        )
    assert not fits(z, params, draws(z, used))


def test_positions_seeds_and_choices_are_independent() -> None:
    """Draws at neighbouring positions, seeds and choices agree as often as chance has it."""
    z = torch.zeros(16)

    def stream(seed: int, choice: int) -> Tensor:
        sampler = Sampler(SamplingParams(seed=seed, choice=choice), 16)
        return torch.tensor([sampler.choose(z, position) for position in range(4000)])

    base = stream(1, 0)
    for other in (stream(2, 0), stream(1, 1), base.roll(1)):
        agreement = float((base == other).double().mean())
        assert abs(agreement - 1 / 16) < 5 * math.sqrt(1 / 16 * 15 / 16 / 4000)


def test_logprobs_are_the_log_softmax_of_the_raw_row() -> None:
    z = torch.randn(500, generator=torch.Generator().manual_seed(3)) * 4
    expected = torch.log_softmax(z.double(), 0)
    logprob, alternatives = token_logprobs(z, 123, 5)
    assert logprob == pytest.approx(float(expected[123]), abs=1e-5)
    assert [i for i, _ in alternatives] == expected.topk(5).indices.tolist()
    assert [value for _, value in alternatives] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
