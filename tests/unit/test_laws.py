"""L1 and L2 on random checkpoints: tokens and logprobs are bitwise the same with any drafter and any draft length.

Every way the law could break silently is also broken here on purpose, and must be seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import backend.ops.elementwise as elementwise_module
from backend.drafters.mtp import MTPDrafter
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.engine.speculation import Speculation
from backend.models.layers import Linear
from backend.models.weights import load_model
from backend.ops.linear import RowTile
from tests import checkpoints, factory
from tests.decoding import Outcome, Request, ScriptedDrafter, decode
from tests.factory import WIDTHS_08B, Shape

LENGTHS = (1, 2, 3, 5, 8)
SMALL = Shape(seed=3)
NARROW_STACK = replace(WIDTHS_08B, layers=("linear", "full"))  # enough for a mutant to show
ODD = Shape(seed=4, hidden=72, intermediate=100, heads=2, kv_heads=2, v_heads=2, tied=False)


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


def requests(shape: Shape, count: int, max_tokens: int) -> list[Request]:
    """Prompts of many lengths, half greedy, half sampled in different ways."""
    generator = torch.Generator().manual_seed(42)
    out = []
    for i in range(count):
        prompt = torch.randint(0, shape.vocab, (1 + 11 * i % 140,), generator=generator).tolist()
        params = [
            SamplingParams(temperature=0),
            SamplingParams(temperature=1.0, seed=i),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2**63 + i),
        ][i % 4]
        out.append(Request((*prompt, i % shape.vocab), params, max_tokens))
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
        own = decode(runner, MTPDrafter(runner.model, "x"), length, wanted)
        assert differences(plain, own) == 0, f"mtp, K = {length}"
    return accepted


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["small", "odd"])
def test_output_is_bitwise_the_same_for_any_drafter(shape: Shape, dtype: torch.dtype, thread_count: int) -> None:
    runner = make_runner(shape, dtype, thread_count)
    assert check(runner, shape, requests(shape, 8, 40), LENGTHS, (3, 8)) == set(range(9))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_output_is_bitwise_the_same_at_the_08b_widths(dtype: torch.dtype, thread_count: int) -> None:
    runner = make_runner(WIDTHS_08B, dtype, thread_count)
    assert {0, 1, 2, 3} <= check(runner, WIDTHS_08B, requests(WIDTHS_08B, 4, 20), (3, 8), (3,))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDTHS_08B], ids=["small", "odd", "0.8B-widths"])
def test_output_is_bitwise_the_same_over_32_prompts_of_64_tokens(
    shape: Shape, dtype: torch.dtype, thread_count: int
) -> None:
    check(make_runner(shape, dtype, thread_count), shape, requests(shape, 32, 64), LENGTHS, LENGTHS)


QUESTIONS = (
    "What does os.path.join do?",
    "List the parameters of `shutil.copytree`.",
    "Show the signature of `textwrap.wrap`.",
    "How do I import `Counter`?",
    "Write a function that adds two numbers.",
    "Hi",
)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_bundled_models_own_drafts_change_nothing(dtype: torch.dtype, thread_count: int) -> None:
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
    for length in LENGTHS:
        own = decode(runner, MTPDrafter(runner.model, "x"), length, wanted)
        assert differences(plain, own) == 0, f"K = {length}"
        accepted |= {step.accepted for outcome in own for step in outcome.steps}
    assert accepted >= {0, 1, 2, 3}


# -- mutants: each breaks the law in one way, and the same comparison must see it -----------------------------------


def law_holds(shape: Shape, dtype: torch.dtype, runner: Runner | None = None, count: int = 6) -> bool:
    runner = runner or make_runner(shape, dtype, 1)
    wanted = requests(shape, count, 24)
    plain = decode(runner, None, 0, wanted)
    return all(differences(plain, decode(runner, scripted(wanted, plain, shape), k, wanted)) == 0 for k in (2, 5))


@pytest.mark.usefixtures("threads")
def test_the_unbroken_law_holds_where_the_mutants_do_not() -> None:
    assert law_holds(SMALL, torch.float32)
    assert law_holds(NARROW_STACK, torch.float32)


@pytest.mark.usefixtures("threads")
def test_an_unpadded_linear_is_seen() -> None:
    runner = make_runner(NARROW_STACK, torch.float32, 1)
    for module in runner.model.modules():
        if isinstance(module, Linear):
            module.tile = RowTile(1)
    assert not law_holds(NARROW_STACK, torch.float32, runner)


@pytest.mark.usefixtures("threads")
def test_keys_of_ragged_length_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(NARROW_STACK, torch.float32, 1)
    monkeypatch.setattr(cache_module, "KEY_BLOCK", 1)
    assert not law_holds(NARROW_STACK, torch.float32, runner)


@pytest.mark.usefixtures("threads")
def test_pending_rows_kept_in_bfloat16_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(SMALL, torch.float32, 1)

    def lossy(*rows: Tensor) -> PendingRows:
        return PendingRows(*(x.bfloat16().float() for x in rows))

    # K = 0 folds single rows too, so the loss itself is common; what differs is which rows of a block pass through it.
    monkeypatch.setattr(forms_module, "PendingRows", lossy)
    assert not law_holds(SMALL, torch.float32, runner)


@pytest.mark.usefixtures("threads")
def test_noise_keyed_by_the_row_in_the_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(SMALL, torch.float32, 1)
    row = itertools.count()
    emit, gumbel = Speculation._emit, sampling_module.gumbel

    def emit_from_row_zero(self: Speculation, *arguments: Any) -> int:
        nonlocal row
        row = itertools.count()
        return emit(self, *arguments)

    monkeypatch.setattr(Speculation, "_emit", emit_from_row_zero)
    monkeypatch.setattr(sampling_module, "gumbel", lambda seed, ids, position, choice: gumbel(seed, ids, next(row)))
    assert not law_holds(SMALL, torch.float32, runner)


@pytest.mark.usefixtures("threads")
def test_elementwise_loops_with_scalar_tails_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(NARROW_STACK, torch.float32, 1)
    monkeypatch.setattr(elementwise_module, "_rowwise", lambda function, x: function(x))
    assert not law_holds(NARROW_STACK, torch.float32, runner)


def test_the_plain_matrix_product_does_depend_on_its_row_count() -> None:
    """Why all this exists: if it ever passes on every machine, the padding can go."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    w = torch.randn(3584, 1024, generator=torch.Generator().manual_seed(1))
    if torch.equal(F.linear(x[:1], w), F.linear(x, w)[:1]):
        pytest.skip("this machine's BLAS is row-invariant for one row")
