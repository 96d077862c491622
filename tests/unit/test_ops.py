"""The delta rule's forms against its recurrence in float64, rows in any blocks and company against rows alone, and
what the start-up probe must be able to see.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.engine.cache import PromptState
from backend.engine.forms import VerifyForm
from backend.engine.memory import Memory
from backend.engine.probe import find_tile
from backend.models.config import ModelConfig
from backend.models.layers import Linear
from backend.ops.delta_replay import CHUNK, MAX_ROWS, RING, Window, base_of
from backend.ops.delta_rule import chunked_delta_rule, unit_lower_inverse
from backend.ops.linear import can_pack
from tests.factory import Shape
from tests.reference import recurrent_delta_rule


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_the_triangular_inverse_is_stable_even_for_repeated_keys(size: int, alike: float) -> None:
    """Equal keys make every entry below the diagonal alike: powers of the matrix then grow like binomials."""
    noise = torch.rand(size, size, generator=torch.Generator().manual_seed(size)) * (1 - alike)
    a = (alike + noise).tril(-1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + a.double())
    assert (unit_lower_inverse(a) - exact).abs().max() < 1e-5 * exact.abs().max()


def inputs(rows: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(2, rows, 3, 16, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(2, rows, 3, 8, generator=generator)
    g, beta = -torch.rand(2, rows, 3, generator=generator), torch.rand(2, rows, 3, generator=generator)
    return q, k, v, g, beta, torch.randn(2, 3, 16, 8, generator=generator)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_the_chunked_form_computes_what_the_recurrence_computes(rows: int) -> None:
    *rest, state = inputs(rows, seed=rows)
    for got, exact in zip(chunked_delta_rule(*rest, state, 32), recurrence(*rest, state), strict=True):
        assert (got - exact).abs().max() < 1e-5


def recurrence(*given: Tensor) -> tuple[Tensor, Tensor]:
    return recurrent_delta_rule(*(x.double() for x in given))


# -- the verify form: from a base state and records of the rows since -----------------------------------------------

LENGTH = 75  # rows of a sequence: its base moves five times, its ring turns twice
WIDTHS = {"narrow": (2, 16), "odd": (3, 24), "0.8B": (16, 128)}  # value heads, dk = dv


class Replayed:
    """Sequences of random rows in the slots of one layer, pushed through the engine's verify form in blocks."""

    def __init__(self, heads: int, width: int, seeds: list[int]) -> None:
        shape = Shape(layers=("linear",), k_heads=heads, v_heads=heads, linear_dim=width, mtp=False)
        self.config = ModelConfig.from_dict(shape.config())
        self.memory = Memory(self.config, len(seeds), len(seeds), torch.device("cpu"), torch.float32)
        self.rows = [sequence_of(heads, width, seed) for seed in seeds]
        self.out: list[list[Tensor]] = [[] for _ in seeds]
        self.done = [0] * len(seeds)
        self._garbage = torch.Generator().manual_seed(sum(seeds))
        for slot, (*_, state) in enumerate(self.rows):
            fresh = self.memory.slots.new_prompt_state()
            self.memory.slots.join(slot, PromptState(state[None], fresh.columns))

    def step(self, rows: int, counts: list[int]) -> None:
        """A block of `rows` of every sequence, of which the first counts[i] are its own and the rest mean nothing."""
        form = VerifyForm(
            self.config,
            self.memory.cache,
            self.memory.slots,
            tables=[[i + 1] for i in range(len(counts))],
            prompts=[1] * len(counts),
            starts=[1 + done for done in self.done],
            counts=counts,
            rows=rows,
        )
        blocks = []
        for kind, own in enumerate(zip(*(rows[:5] for rows in self.rows), strict=True)):
            block = torch.stack([x[:rows] for x in own])
            block.copy_(torch.randn(block.shape, generator=self._garbage) * 100)
            if kind == 3:  # a decay is never a growth
                block.copy_(-block.abs())
            for i, (x, done, count) in enumerate(zip(own, self.done, counts, strict=True)):
                block[i, :count] = x[done : done + count]
            blocks.append(block)
        out = form.delta_rule(0, *blocks)
        for i, count in enumerate(counts):
            self.out[i].append(out[i, :count].clone())
            self.done[i] += count

    def result(self, slot: int) -> tuple[Tensor, ...]:
        """Outputs, and all that rows to come depend on: base state, and the records since in the order of rows."""
        slots, done = self.memory.slots, self.done[slot]
        slots.advance(slot, done)
        since = [row % RING for row in range(slots.bases[slot] - 1, done)]
        kept = (x[0, slot, :, since] for x in (slots.k, slots.u, slots.G))
        return torch.cat(self.out[slot]), slots.S[0, slot], *kept


def sequence_of(heads: int, width: int, seed: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of LENGTH rows, [T, H, …], and the state before them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(LENGTH + MAX_ROWS, heads, width, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g = -(torch.rand(LENGTH + MAX_ROWS, heads, generator=generator) ** 3) * (1 + seed % 3)
    beta = torch.rand(LENGTH + MAX_ROWS, heads, generator=generator)
    return q, k, v, g, beta, torch.randn(heads, width, width, generator=generator)


def alone(widths: str, seed: int) -> Replayed:
    """One sequence, one row at a time."""
    replayed = Replayed(*WIDTHS[widths], [seed])
    for _ in range(LENGTH):
        replayed.step(1, [1])
    return replayed


@torch.inference_mode()
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_verify_form_computes_what_the_recurrence_computes(widths: str) -> None:
    replayed = alone(widths, seed=1)
    *rows, state = sequence_of(*WIDTHS[widths], seed=1)
    out, S, *_ = replayed.result(0)
    base = replayed.memory.slots.bases[0]
    assert 0 < base < LENGTH - CHUNK
    exact, _ = recurrence(*(x[None, :LENGTH] for x in rows), state[None])
    _, exact_base = recurrence(*(x[None, :base] for x in rows), state[None])
    assert (out - exact[0]).abs().max() < 2e-6 * exact.abs().max()
    assert (S - exact_base[0]).abs().max() < 2e-6 * exact_base.abs().max()


@pytest.mark.parametrize("widths", WIDTHS)
def test_rows_are_bitwise_the_same_in_any_blocks_and_any_company(widths: str) -> None:
    """Sequences at different places, blocks of any size, any number kept, garbage behind what is kept."""
    rounds = {"narrow": 25, "odd": 15, "0.8B": 3}[widths]

    @settings(max_examples=rounds, deadline=None)
    @given(sequences=st.integers(1, 4), most=st.integers(1, MAX_ROWS), seed=st.integers(0, 2**32))
    def check(sequences: int, most: int, seed: int) -> None:
        seeds, choices = list(range(sequences)), random.Random(seed)
        together = Replayed(*WIDTHS[widths], seeds)
        while min(together.done) < LENGTH:
            rows = choices.randint(1, most)
            together.step(rows, [min(choices.randint(0, rows), LENGTH - done) for done in together.done])
        for slot, seed in enumerate(seeds):
            single = expected.setdefault(seed, alone(widths, seed).result(0))
            for got, wanted in zip(together.result(slot), single, strict=True):
                assert torch.equal(got, wanted)

    expected: dict[int, tuple[Tensor, ...]] = {}
    with torch.inference_mode():
        check()


@pytest.mark.parametrize("rows", [1, 2, 5, MAX_ROWS])
def test_a_window_says_where_every_row_of_an_answer_looks_however_long_it_is(rows: int) -> None:
    """Record by record, over more rows than it takes for bases and ring to come round together, and far beyond."""
    starts = [*range(CHUNK * RING + 4 * CHUNK), *range(100_000, 100_000 + 3 * RING)]
    window = Window.at(starts, rows, heads=2, device=torch.device("cpu"))
    assert window.padded % 4 == 0
    reach, counted = (window.reach == 0).tolist(), window.counted.bool().tolist()
    written, before = window.rows.view(len(starts), 2, rows).tolist(), window.previous.view(-1, 2).tolist()
    for i, start in enumerate(starts):
        places = [(2 * i + head) * RING for head in range(2)]
        assert written[i] == [[place + row % RING for row in range(start, start + rows)] for place in places]
        assert before[i] == [place + (start - 1) % RING for place in places]
        for t, row in enumerate(range(start, start + rows)):
            base = base_of(row)
            own, earlier = ({r % RING for r in range(base, end)} for end in (row + 1, row))
            assert set_of(reach[i][0][t]) == own | {(base - 1) % RING}
            assert set_of(counted[i][0][0][t]) == own
            assert set_of(counted[i][0][1][t]) == earlier
            assert window.base[i, :, t].unique().tolist() == [(base - 1) % RING]
    assert [one.tolist() for one in window.row] == window.rows.view(-1, rows).t().tolist()


def set_of(flags: list[bool]) -> set[int]:
    return {i for i, flag in enumerate(flags) if flag}


def test_every_row_has_its_base_by_its_index_and_enough_records() -> None:
    for index in range(10 * RING):
        base = base_of(index)
        assert base % CHUNK == 0
        assert base == 0 or CHUNK <= index - base < 2 * CHUNK
        # What is needed still stands in the ring when the longest block that holds this row has been written: the
        # base's own G, and the records folded into the base after it.
        assert (index + MAX_ROWS - 1) - (base - 1) < RING + (base == 0)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inputs_", "outputs"), [(2048, 1024), (3584, 1024), (1024, 16), (64, 96)])
def test_under_the_probed_tile_no_rounding_depends_on_the_row_count(
    inputs_: int, outputs: int, dtype: torch.dtype, packed: bool
) -> None:
    """Products that cancel exactly: what is left is each kernel's own rounding, which ordinary data hides in bf16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, inputs_ // 2, generator=generator).to(dtype)
    w = torch.randn(outputs, inputs_ // 2, generator=generator).to(dtype)
    x, w = torch.cat((x, x.roll(1, 1)), dim=1), torch.cat((w, -w.roll(1, 1)), dim=1)
    product = Linear(inputs_, outputs)
    product.weight = torch.nn.Parameter(w, requires_grad=False)
    if packed:
        if not can_pack(product.weight):
            pytest.skip("this dtype has no other layout here")
        product.pack(keep=False)
    product.tile = find_tile(product)
    whole = product(x)
    for count in range(1, 18):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[7 : 7 + count]), whole[7 : 7 + count])
