"""`--draft-tokens auto` against simulated servers: costs and acceptance known, steps drawn by a seeded generator.

What is compared is expected tokens per second of the lengths chosen, so that luck in the drafts decides nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from backend.interface import Step

MOST = 8
SLOPES = (0.05, 0.1, 0.2, 0.4, 0.8)  # cost of a slot in steps of K = 0
RATES = (0.95, 0.6, 0.2, 0.0)  # acceptance of a slot, given those before it


def one(step: int) -> int:
    return 1


def falling(step: int) -> int:
    """From 16 sequences to 1 and back."""
    return 1 + abs(step // 50 % 30 - 15)


@dataclass(frozen=True)
class Server:
    """Seconds of a step by (step, batch, K), acceptance by (step, slot), sequences by step.

    The clock is read with lognormal jitter, and one reading in a hundred is ten times too long. `first`: how many
    times longer the first step of a (batch, K) takes. `undone`: how many times longer one takes that follows steps
    without drafts, whose rows a drafter has yet to run.
    """

    cost: Callable[[int, int, int], float]
    acceptance: Callable[[int, int], float]
    batch: Callable[[int], int] = one
    jitter: float = 0.05
    first: float = 1.0
    undone: float = 1.0

    def tokens(self, step: int, k: int) -> float:
        """Expected, of one sequence."""
        return sum(math.prod(self.acceptance(step, slot) for slot in range(n)) for n in range(k + 1))

    def run(self, policy: DraftLength, steps: int, seed: int = 0) -> Run:
        generator, run, seen = random.Random(seed), Run(self), set()
        for step in range(steps):
            batch = self.batch(step)
            k = policy.choose(batch)
            outcomes = [Step(k, self._accepted(generator, step, k)) for _ in range(batch)]
            seconds = self.cost(step, batch, k) * math.exp(generator.gauss(0, self.jitter))
            seconds *= 10 if generator.random() < 0.01 else 1
            seconds *= 1 if (batch, k) in seen else self.first
            seconds *= self.undone if k and run.lengths[-1:] == [0] else 1
            seen.add((batch, k))
            policy.observe(batch, k, seconds, outcomes)
            run.lengths.append(k)
        return run

    def _accepted(self, generator: random.Random, step: int, k: int) -> int:
        accepted = 0
        while accepted < k and generator.random() < self.acceptance(step, accepted):
            accepted += 1
        return accepted


@dataclass(frozen=True)
class Run:
    """The length of every step."""

    server: Server
    lengths: list[int] = field(default_factory=list)

    def seconds_per_token(self, first: int = 0, last: int | None = None, fixed: int | None = None) -> float:
        """Of steps first … last; `fixed`: had K been that."""
        seconds = tokens = 0.0
        for step in range(len(self.lengths))[first:last]:
            batch, k = self.server.batch(step), self.lengths[step] if fixed is None else fixed
            seconds += self.server.cost(step, batch, k)
            tokens += batch * self.server.tokens(step, k)
        return seconds / tokens

    def over_best(self, first: int = 0, last: int | None = None) -> float:
        """Time per token against the best fixed length's, chosen knowing all."""
        best = min(self.seconds_per_token(first, last, k) for k in range(MOST + 1))
        return self.seconds_per_token(first, last) / best

    def over_plain(self) -> float:
        return self.seconds_per_token() / self.seconds_per_token(fixed=0)


def linear(slope: float) -> Callable[[int, int, int], float]:
    return lambda step, batch, k: 0.02 * (1 + slope * k)


def steady(rate: float) -> Callable[[int, int], float]:
    return lambda step, slot: rate


def assert_close(run: Run) -> None:
    assert run.over_best() < 1.05
    assert run.over_plain() < 1.03


# -- a server that stays as it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("rate", RATES)
def test_it_is_close_to_the_best_fixed_length_and_never_far_behind_none(slope: float, rate: float) -> None:
    server = Server(linear(slope), steady(rate))
    for seed in range(3):
        assert_close(server.run(AutoDraftLength(MOST), 2500, seed))


@pytest.mark.parametrize("slope", SLOPES[:4])
@pytest.mark.parametrize(
    "rates", [(0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1), (0.7, 0.8, *[0.9] * 6), (0.95, *[0.0] * 7)]
)
def test_acceptance_may_differ_by_slot(slope: float, rates: tuple[float, ...]) -> None:
    assert_close(Server(linear(slope), lambda step, slot: rates[slot]).run(AutoDraftLength(MOST), 2500))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    "cost",
    [
        pytest.param(lambda step, batch, k: 1.0 if not k else 1.5 + 0.05 * k, id="the first slot is dear"),
        pytest.param(lambda step, batch, k: (1.0, 1.6, 2.2)[k // 4] + 0.08 * k, id="rows come in tiles of four"),
    ],
)
def test_cost_need_not_be_a_straight_line(cost: Callable[[int, int, int], float], rate: float) -> None:
    for seed in range(3):
        assert_close(Server(cost, steady(rate)).run(AutoDraftLength(MOST), 2500, seed))


@pytest.mark.parametrize("rate", [0.95, 0.0])
def test_a_slow_first_step_of_each_shape_is_no_measurement(rate: float) -> None:
    assert_close(Server(linear(0.2), steady(rate), first=200.0).run(AutoDraftLength(MOST), 2500))


@pytest.mark.parametrize("seed", range(3))
def test_what_a_drafter_left_undone_is_not_held_against_drafting(seed: int) -> None:
    server = Server(linear(0.4), lambda step, slot: 0.0 if step < 1500 else 0.7, undone=1.5)
    assert server.run(AutoDraftLength(MOST), 3000, seed).over_best(2000) < 1.05


@pytest.mark.parametrize("seed", range(3))
def test_a_disturbance_while_a_length_is_first_measured_is_overcome(seed: int) -> None:
    server = Server(lambda step, batch, k: (30 if 6 <= step < 10 else 1) * (1 + 0.2 * k), steady(0.8))
    assert server.run(AutoDraftLength(MOST), 1000, seed).over_best(400) < 1.06


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.4])
def test_within_a_hundred_steps_it_has_found_that_speculation_wins(slope: float) -> None:
    server = Server(linear(slope), steady(0.95))
    for seed in range(5):
        assert server.run(AutoDraftLength(MOST), 400, seed).over_best(100) < 1.1


def test_it_seldom_changes_the_length() -> None:
    for slope, rate in ((0.1, 0.95), (0.1, 0.6), (0.4, 0.6), (0.4, 0.0)):
        lengths = Server(linear(slope), steady(rate)).run(AutoDraftLength(MOST), 2500).lengths
        changes = sum(a != b for a, b in pairwise(lengths))
        assert changes < len(lengths) / 10


# -- a server that changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", SLOPES)
def test_it_follows_acceptance_that_changes_with_the_text(slope: float) -> None:
    texts = (0.95, 0.0, 0.6, 0.95, 0.2, 0.95)
    server = Server(linear(slope), lambda step, slot: texts[step // 1000])
    for seed in range(2):
        run = server.run(AutoDraftLength(MOST), 1000 * len(texts), seed)
        assert_close(run)
        for text in range(len(texts)):  # against the best of each text, some hundred steps after it began
            assert run.over_best(1000 * text + 400, 1000 * text + 1000) < 1.1


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("rate", RATES)
def test_it_follows_a_machine_that_changes_pace(slope: float, rate: float) -> None:
    pace = (1.0, 2.0, 1.5, 3.0, 1.0)  # as other work comes and goes
    server = Server(lambda step, batch, k: pace[step // 500] * (1 + slope * k), steady(rate))
    assert_close(server.run(AutoDraftLength(MOST), 500 * len(pace)))


@pytest.mark.parametrize("slope", [0.1, 0.8])
@pytest.mark.parametrize("rate", RATES)
def test_a_machine_that_stutters_does_not_mislead_it(slope: float, rate: float) -> None:
    generator, pace = random.Random(0), []
    while len(pace) < 2500:
        pace += [generator.choice((1.0, 1.0, 3.0))] * generator.randint(3, 60)
    assert_close(
        Server(lambda step, batch, k: pace[step] * (1 + slope * k), steady(rate)).run(AutoDraftLength(MOST), 2500)
    )


@pytest.mark.parametrize("seed", range(3))
def test_drafts_found_dear_are_tried_again(seed: int) -> None:
    server = Server(lambda step, batch, k: 1 + (50 if step < 300 else 0.1) * k, steady(0.95))
    assert server.run(AutoDraftLength(MOST), 2500, seed).over_best(1500) < 1.05


@pytest.mark.parametrize("slope", [0.1, 0.8])
@pytest.mark.parametrize("rate", RATES)
def test_steps_that_lengthen_with_the_context_do_not_mislead_it(slope: float, rate: float) -> None:
    server = Server(lambda step, batch, k: (1 + step % 300 / 150) * (1 + slope * k), steady(rate))
    assert_close(server.run(AutoDraftLength(MOST), 2400))


@pytest.mark.parametrize("rate", RATES)
def test_each_batch_size_has_its_own_length(rate: float) -> None:
    # Alone a slot costs a tenth of a step; of sixteen sequences, nearly as much as a step.
    server = Server(lambda step, batch, k: 1 + 0.06 * batch * (k + 1) + 0.05 * k, steady(rate), falling)
    run = server.run(AutoDraftLength(MOST), 5000)
    assert_close(run)
    if rate == 0.6:
        alone = [k for step, k in enumerate(run.lengths) if step > 1000 and falling(step) == 1]
        crowded = [k for step, k in enumerate(run.lengths) if step > 1000 and falling(step) == 16]
        assert sum(alone) / len(alone) > sum(crowded) / len(crowded) + 0.5


# -- the interface -------------------------------------------------------------------------------------------------


def test_a_fixed_length_stays_whatever_is_observed() -> None:
    policy = FixedDraftLength(3)
    assert set(Server(linear(0.8), steady(0.0)).run(policy, 50).lengths) == {3}


def test_the_same_observations_give_the_same_lengths() -> None:
    server = Server(linear(0.2), steady(0.6), falling, jitter=0.3)
    assert server.run(AutoDraftLength(MOST), 500).lengths == server.run(AutoDraftLength(MOST), 500).lengths


def test_the_unit_of_time_does_not_matter() -> None:
    lengths = [
        Server(lambda step, batch, k, unit=unit: unit * (1 + 0.2 * k), steady(0.6))
        .run(AutoDraftLength(MOST), 500)
        .lengths
        for unit in (2.0**-20, 2.0**10)
    ]
    assert lengths[0] == lengths[1]


def test_at_most_zero_never_drafts() -> None:
    assert set(Server(linear(0.1), steady(0.95)).run(AutoDraftLength(0), 50).lengths) == {0}


@given(
    st.integers(0, MOST),
    st.lists(
        st.tuples(
            st.integers(1, 20),
            st.none() | st.floats(0, 1e3),
            st.lists(st.integers(0, MOST), max_size=20),
            st.none() | st.integers(0, MOST),
        ),
        max_size=60,
    ),
)
def test_whatever_happens_the_length_is_one_it_may_choose(
    most: int, happenings: list[tuple[int, float | None, list[int], int | None]]
) -> None:
    """Unmeasured steps, clocks that stand still, steps that end sequences, and a K that was not the one chosen."""
    policy = AutoDraftLength(most)
    for batch, seconds, accepted, other in happenings:
        k = policy.choose(batch)
        assert k == policy.choose(batch)
        assert 0 <= k <= most
        k = min(k if other is None else other, most)
        policy.observe(batch, k, seconds, [Step(k, min(a, k)) for a in accepted])


def test_steps_beside_a_prompt_show_acceptance_but_no_cost() -> None:
    policy = AutoDraftLength(MOST)
    Server(linear(0.1), steady(0.95)).run(policy, 300)
    assert policy.choose(1) >= 6
    for _ in range(100):  # the text is no longer easily drafted, and every step also runs a prompt chunk
        k = policy.choose(1)
        policy.observe(1, k, None, [Step(k, 0)])
    assert policy.choose(1) <= 1
