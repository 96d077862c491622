"""L1 and L2 on random checkpoints: tokens and logprobs are bitwise the same with any drafter, any draft length, and
any company.

Every way the law could break silently is also broken here on purpose, and must be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import backend.engine.forms as forms_module
import backend.models.layers as layers_module
import backend.ops.attention as attention_module
import backend.ops.delta_replay as replay_module
import backend.ops.elementwise as elementwise_module
from backend.drafters.mtp import mtp_drafter
from backend.engine.cache import DeltaNetSlots
from backend.engine.memory import Memory
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplerBatch, SamplingParams
from backend.models.layers import products
from backend.models.weights import load_model
from backend.ops.delta_replay import Records
from backend.ops.linear import RowTile
from tests import checkpoints, factory
from tests.decoding import Outcome, Request, ScriptedDrafter, decode, make_loop, run
from tests.factory import WIDTHS_08B, Shape

LENGTHS = (1, 2, 3, 5, 8)
COMPANIES = ((2, 3), (5, 0), (16, 8))  # sequences at a time, and K
SMALL = Shape(seed=3)
TWO_LAYERS_08B = replace(WIDTHS_08B, layers=("linear", "full"))
MEDIUM = replace(  # wide enough for a mutant to show
    TWO_LAYERS_08B, vocab=320, hidden=384, heads=4, kv_heads=1, head_dim=128, k_heads=4, v_heads=4, linear_dim=64
)
MANY_HEADS = replace(SMALL, v_heads=16)  # their decays make more than a vector in a block, and no whole number of them
ODD = Shape(seed=4, hidden=72, intermediate=100, heads=2, kv_heads=2, v_heads=2, tied=False)
# Products of these widths are too small for threads to share them. Those of the 0.8B's are not: there drafters, or
# company, are tried with one thread and two, in both dtypes. All of it crossed with all is among the slow tests.
SHAPES = [pytest.param(SMALL, 1, id="small-1"), pytest.param(ODD, 2, id="odd-2")]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_runner(shape: Shape, dtype: torch.dtype, thread_count: int) -> Runner:
    torch.set_num_threads(thread_count)
    runner = Runner(factory.build(shape).to(dtype))
    with torch.inference_mode():
        report = probe(runner)
    assert report.lawful, report
    return runner


def requests(shape: Shape, count: int, max_tokens: int, longest: int = 140) -> list[Request]:
    """Prompts of many lengths, half greedy, half sampled in different ways; some answers are shorter than others."""
    generator = torch.Generator().manual_seed(42)
    out = []
    for i in range(count):
        prompt = torch.randint(0, shape.vocab, (1 + 11 * i % longest,), generator=generator).tolist()
        params = [
            SamplingParams(temperature=0),
            SamplingParams(temperature=1.0, seed=i),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2**63 + i),
        ][i % 4]
        out.append(Request((*prompt, i % shape.vocab), params, max_tokens - i % 3 * (max_tokens // 4)))
    return out


def differences(plain: list[Outcome], speculative: list[Outcome]) -> int:
    return sum(a.seen != b.seen for a, b in zip(plain, speculative, strict=True))


def scripted(wanted: list[Request], plain: list[Outcome], shape: Shape, hit_rate: float = 0.75) -> ScriptedDrafter:
    answers = {request.prompt: outcome.tokens[1:] for request, outcome in zip(wanted, plain, strict=True)}
    return ScriptedDrafter({p: (0, *a) for p, a in answers.items()}, hit_rate, shape.vocab)


def check(
    runner: Runner, shape: Shape, wanted: list[Request], lengths: tuple[int, ...], own_lengths: tuple[int, ...]
) -> set[int]:
    """Compare K = 0 with scripted and own drafts of these lengths; returns the acceptance lengths that occurred."""
    plain = decode(runner, None, 0, wanted)
    assert all(step.drafted == 0 for outcome in plain for step in outcome.steps)
    accepted: set[int] = set()
    for length in lengths:
        guesses = decode(runner, scripted(wanted, plain, shape), length, wanted)
        assert differences(plain, guesses) == 0, f"scripted drafter, K = {length}"
        accepted |= {step.accepted for outcome in guesses for step in outcome.steps}
    for length in own_lengths:
        own = decode(runner, mtp_drafter(runner.model, "x"), length, wanted)
        assert differences(plain, own) == 0, f"mtp, K = {length}"
    return accepted


def company(
    runner: Runner, shape: Shape, wanted: list[Request], plain: list[Outcome], together: int, draft_tokens: int
) -> list[Outcome]:
    """So many at a time, each with another drafter than the one before it: none, one that knows the answers, mtp."""
    mtp = mtp_drafter(runner.model, "x") if shape.mtp else None
    drafters = [None, scripted(wanted, plain, shape), mtp]
    positions = max(len(request.prompt) + request.max_tokens for request in wanted)
    loop = make_loop(runner, draft_tokens, [mtp] if mtp else [], positions=positions, sequences=together)
    return run(loop, [(request, drafters[i % 3]) for i, request in enumerate(wanted)])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("shape", "thread_count"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_output_is_bitwise_the_same_for_any_drafter(shape: Shape, dtype: torch.dtype, thread_count: int) -> None:
    runner = make_runner(shape, dtype, thread_count)
    assert check(runner, shape, requests(shape, 8, 40), (1, 3, 8), (3,)) == set(range(9))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "thread_count"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=["fp32-2", "bf16-1"])
def test_output_is_bitwise_the_same_at_the_08b_widths(dtype: torch.dtype, thread_count: int) -> None:
    runner = make_runner(WIDTHS_08B, dtype, thread_count)
    assert {0, 1, 2, 3} <= check(runner, WIDTHS_08B, requests(WIDTHS_08B, 4, 14, longest=60), (8,), (3,))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("shape", "thread_count"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_output_is_bitwise_the_same_in_any_company(shape: Shape, dtype: torch.dtype, thread_count: int) -> None:
    runner = make_runner(shape, dtype, thread_count)
    same_in_company(runner, shape, requests(shape, 18, 20), COMPANIES)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "thread_count"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=["fp32-1", "bf16-2"])
def test_output_is_bitwise_the_same_in_any_company_at_the_08b_widths(dtype: torch.dtype, thread_count: int) -> None:
    runner = make_runner(TWO_LAYERS_08B, dtype, thread_count)
    same_in_company(runner, TWO_LAYERS_08B, requests(TWO_LAYERS_08B, 16, 8, longest=60), ((16, 3),))


def same_in_company(
    runner: Runner, shape: Shape, wanted: list[Request], companies: tuple[tuple[int, int], ...]
) -> None:
    plain = decode(runner, None, 0, wanted)
    for together, draft_tokens in companies:
        among = company(runner, shape, wanted, plain, together, draft_tokens)
        assert differences(plain, among) == 0, f"{together} at a time, K = {draft_tokens}"
        assert draft_tokens in {step.accepted for outcome in among for step in outcome.steps}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDTHS_08B], ids=["small", "odd", "0.8B-widths"])
def test_output_is_bitwise_the_same_over_32_prompts_of_64_tokens(
    shape: Shape, dtype: torch.dtype, thread_count: int
) -> None:
    runner, wanted = make_runner(shape, dtype, thread_count), requests(shape, 32, 64)
    check(runner, shape, wanted, LENGTHS, LENGTHS)
    same_in_company(runner, shape, wanted, ((2, 1), (5, 3), (16, 0), (16, 3), (16, 8)))


QUESTIONS = (
    "What does os.path.join do?",
    "List the parameters of `shutil.copytree`.",
    "Show the signature of `textwrap.wrap`.",
    "How do I import `Counter`?",
    "Write a function that adds two numbers.",
    "Hi",
)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "thread_count"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=["fp32-2", "bf16-1"])
def test_the_bundled_models_own_drafts_and_company_change_nothing(dtype: torch.dtype, thread_count: int) -> None:
    """The same on a trained model, whose MTP head is accepted often: answers end by themselves inside blocks."""
    torch.set_num_threads(thread_count)
    bundled = checkpoints.tiny()
    runner = Runner(load_model(bundled.directory, torch.device("cpu"), dtype, with_mtp=True).model)
    with torch.inference_mode():
        assert probe(runner).lawful
    wanted = [
        Request(bundled.tokenizer.encode_chat([{"role": "user", "content": question}], {}).ids, params, 64, eos)
        for question in QUESTIONS
        for params in (SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_p=0.9, seed=len(question)))
        for eos in [bundled.tokenizer.eos_ids]
    ]
    plain = decode(runner, None, 0, wanted)
    assert "stop" in {outcome.finish for outcome in plain}
    accepted: set[int] = set()
    for length, together in ((2, 1), (3, 4), (8, 12)):
        own = decode(runner, mtp_drafter(runner.model, "x"), length, wanted, together=together)
        assert differences(plain, own) == 0, f"K = {length}, {together} at a time"
        accepted |= {step.accepted for outcome in own for step in outcome.steps}
    assert accepted >= {0, 1, 2, 3}


# -- mutants: each breaks the law in one way, and the same comparison must see it -----------------------------------


def few(shape: Shape) -> list[Request]:
    """Enough for a mutant to show; in the narrow ones, answers long enough for their recurrence's base to move."""
    return requests(shape, 4, 12, longest=60) if shape == MEDIUM else requests(shape, 6, 40)


def law_holds(runner: Runner, shape: Shape) -> bool:
    """For any draft length: alone, that is."""
    wanted = few(shape)
    plain = decode(runner, None, 0, wanted)
    return all(differences(plain, decode(runner, scripted(wanted, plain, shape), k, wanted)) == 0 for k in (2, 5))


def law_holds_in_company(runner: Runner, shape: Shape) -> bool:
    wanted = few(shape)
    plain = decode(runner, None, 0, wanted)
    return all(differences(plain, company(runner, shape, wanted, plain, 4, k)) == 0 for k in (0, 2))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [SMALL, MANY_HEADS, MEDIUM], ids=["small", "many-heads", "medium"])
def test_the_unbroken_law_holds_where_the_mutants_do_not(shape: Shape) -> None:
    runner = make_runner(shape, torch.float32, 1)
    assert law_holds(runner, shape)
    assert law_holds_in_company(runner, shape)


@pytest.mark.usefixtures("threads")
def test_an_unpadded_linear_is_seen() -> None:
    runner = make_runner(MEDIUM, torch.float32, 1)
    for product in products(runner.model):
        product.tile = RowTile(1)
    assert not law_holds(runner, MEDIUM)
    assert not law_holds_in_company(runner, MEDIUM)


@pytest.mark.usefixtures("threads")
def test_keys_of_ragged_length_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages read no further than the last key that any row sees."""
    runner = make_runner(MEDIUM, torch.float32, 1)
    attend = forms_module.cached_attention

    def ragged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        end = 1 + int((mask == 0).flatten(0, -2).any(0).nonzero().max())
        return attend(q, k[:, :, :end], v[:, :, :end], mask[..., :end])

    monkeypatch.setattr(forms_module, "cached_attention", ragged)
    assert not law_holds(runner, MEDIUM)
    assert not law_holds_in_company(runner, MEDIUM)


@pytest.mark.usefixtures("threads")
def test_unpadded_queries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(MEDIUM, kv_heads=4)  # elsewhere each key head has rows enough
    runner = make_runner(shape, torch.float32, 1)
    monkeypatch.setattr(attention_module, "QUERY_ROWS", 1)
    assert not law_holds(runner, shape)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kept", ["k", "u"])
def test_records_kept_in_bfloat16_are_seen(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose precision between one step and the next: what differs is which rows of a block are read before."""
    records = DeltaNetSlots.records

    def lossy(self: DeltaNetSlots, layer: int, batch: int) -> Records:
        found = records(self, layer, batch)
        getattr(found, kept).copy_(getattr(found, kept).bfloat16())
        return found

    runner = make_runner(SMALL, torch.float32, 1)
    monkeypatch.setattr(DeltaNetSlots, "records", lossy)
    assert not law_holds(runner, SMALL)


@pytest.mark.usefixtures("threads")
def test_a_base_that_depends_on_how_rows_were_cut_into_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a block from the first one's base: equal in exact arithmetic, and one state less to compute."""

    def of_the_first(zero: int, chunks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.maximum(zero, np.broadcast_to(chunks[:, :1], chunks.shape))

    runner = make_runner(SMALL, torch.float32, 1)
    numpy = SimpleNamespace(**{**vars(np), "maximum": of_the_first})
    monkeypatch.setattr(replay_module, "np", numpy)
    monkeypatch.setattr(replay_module, "_table", cache(replay_module._table.__wrapped__))
    monkeypatch.setattr(forms_module, "base_of", lambda index: 0)
    assert not law_holds(runner, SMALL)


@pytest.mark.usefixtures("threads")
def test_rejected_rows_that_stay_in_the_convolution_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ring addressed by what was written and not by position."""
    runner = make_runner(SMALL, torch.float32, 1)
    monkeypatch.setattr(forms_module, "COLUMN_RING", 4)  # of one row and its history: blocks overwrite themselves
    assert not law_holds(runner, SMALL)


@pytest.mark.usefixtures("threads")
def test_noise_keyed_by_the_row_in_the_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(SMALL, torch.float32, 1)
    verify = SamplerBatch.verify

    def from_row_zero(self: SamplerBatch, logits: Tensor, drafts: Tensor) -> Tensor:
        self._positions = [0] * len(logits)
        return verify(self, logits, drafts)

    monkeypatch.setattr(SamplerBatch, "verify", from_row_zero)
    assert not law_holds(runner, SMALL)


@pytest.mark.usefixtures("threads")
def test_elementwise_loops_with_scalar_tails_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "VECTOR", 1)
    runner = make_runner(MANY_HEADS, torch.float32, 1)
    assert law_holds(runner, MANY_HEADS)
    monkeypatch.setattr(elementwise_module, "_rowwise", lambda function, x: function(x))
    assert not law_holds(runner, MANY_HEADS)
    assert not law_holds_in_company(runner, MANY_HEADS)


# Those that a sequence alone never meets.


@pytest.mark.usefixtures("threads")
def test_noise_keyed_by_the_place_in_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(SMALL, torch.float32, 1)
    verify = SamplerBatch.verify

    def by_place(self: SamplerBatch, logits: Tensor, drafts: Tensor) -> Tensor:
        self._positions = [position + place for place, position in enumerate(self._positions)]
        return verify(self, logits, drafts)

    monkeypatch.setattr(SamplerBatch, "verify", by_place)
    assert law_holds(runner, SMALL)
    assert not law_holds_in_company(runner, SMALL)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("forgotten", ["S", "k", "u", "G", "columns"])
def test_a_slot_that_moves_without_all_it_holds_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(SMALL, torch.float32, 1)
    move = DeltaNetSlots.move

    def forgetful(self: DeltaNetSlots, source: int, target: int) -> None:
        kept = getattr(self, forgotten)[:, target].clone()
        move(self, source, target)
        getattr(self, forgotten)[:, target] = kept

    monkeypatch.setattr(DeltaNetSlots, "move", forgetful)
    assert law_holds(runner, SMALL)
    assert not law_holds_in_company(runner, SMALL)


@pytest.mark.usefixtures("threads")
def test_a_page_that_two_sequences_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(SMALL, torch.float32, 1)
    take = Memory.take

    def shared(self: Memory, pages: list[int]) -> None:
        take(self, pages)
        pages[-1] = 1

    monkeypatch.setattr(Memory, "take", shared)
    assert law_holds(runner, SMALL)
    assert not law_holds_in_company(runner, SMALL)


def test_the_plain_matrix_product_does_depend_on_its_row_count() -> None:
    """Why all this exists: if it ever passes on every machine, the padding can go."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    w = torch.randn(3584, 1024, generator=torch.Generator().manual_seed(1))
    if torch.equal(F.linear(x[:1], w), F.linear(x, w)[:1]):
        pytest.skip("this machine's BLAS is row-invariant for one row")
