"""The trunk against transformers' Qwen3.5 on the same random weights: float32 logits and greedy continuations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.models.forms import CausalForm
from backend.models.weights import load_model
from tests import factory, reference
from tests.by_hand import ByHand
from tests.factory import Shape

SHAPES = {
    "tied": Shape(seed=1),
    "untied, more value heads": Shape(tied=False, v_heads=8, heads=8, kv_heads=2, seed=2),
    "two full layers": Shape(layers=("linear", "linear", "full", "linear", "linear", "full"), kv_heads=1, seed=3),
    "equal heads, wide": Shape(hidden=96, intermediate=160, heads=3, kv_heads=3, k_heads=4, v_heads=4, seed=4),
}
PROMPT_LENGTHS = (1, 5, 63, 64, 65, 128, 300)


@dataclass(frozen=True)
class Pair:
    runner: Runner
    oracle: object


@pytest.fixture(scope="module", params=list(SHAPES), ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    shape = SHAPES[request.param]
    directory = factory.save(factory.build(shape), shape, tmp_path_factory.mktemp("checkpoint"))
    runner = Runner(load_model(directory, torch.device("cpu"), torch.float32, with_mtp=True).model)
    with torch.inference_mode():
        probe(runner)
    return Pair(runner, reference.trunk(directory))


def tokens(count: int, seed: int, vocab: int = 320) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def test_training_form_logits_equal_transformers(pair: Pair) -> None:
    ids = tokens(260, seed=5)
    expected = reference.logits(pair.oracle, ids)
    model = pair.runner.model
    got = model.logits(model(torch.tensor([ids]), CausalForm(1, len(ids))))[0]
    assert (got - expected).abs().max() < 1e-4
    assert expected.std() > 0.1, "a model whose logits are all alike proves nothing"


@torch.inference_mode()
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_prefill_and_verify_logits_equal_transformers(pair: Pair, length: int) -> None:
    prompt, answer = tokens(length, seed=length), tokens(208, seed=length + 1)
    got = torch.cat([logits for logits, _ in pair.runner.force(prompt, answer, (1, 3, 9))])
    expected = reference.logits(pair.oracle, prompt + answer)[length - 1 :]
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_continuations_equal_transformers(pair: Pair, length: int) -> None:
    prompt = tokens(length, seed=1000 + length)
    expected = reference.greedy(pair.oracle, prompt, 64)
    margins = reference.logits(pair.oracle, prompt + expected)[length - 1 : -1].topk(2).values
    ours = greedy(pair.runner, prompt, 64)
    differing = [i for i in range(64) if ours[i] != expected[i]]
    if differing:
        first = differing[0]
        margin = float(margins[first, 0] - margins[first, 1])
        print(f"length {length}: first difference at {first}, reference margin {margin:.2e}")
        assert margin < 1e-4


def greedy(runner: Runner, prompt: list[int], count: int) -> list[int]:
    sequence = ByHand(runner, [prompt])
    out = [int(runner.model.logits(sequence.lasts[0])[0].argmax())]
    while len(out) < count:
        ((logits, _),) = sequence.verify([out[-1:]])
        sequence.keep([1])
        out.append(int(logits[0].argmax()))
    return out


def test_a_wrong_formula_would_be_seen(tmp_path: Path) -> None:
    """The tolerance separates: swapping query and gate halves, or dropping the (1 + w) of norms, is far beyond it."""
    shape = SHAPES["tied"]
    model = factory.build(shape)
    oracle = reference.trunk(factory.save(model, shape, tmp_path))
    ids = tokens(64, seed=9)
    expected = reference.logits(oracle, ids)
    norm = model.model.layers[3].input_layernorm.weight
    with torch.no_grad():
        norm.sub_(1e-2)
        got = model.logits(model(torch.tensor([ids]), CausalForm(1, len(ids))))[0]
    assert (got - expected).abs().max() > 1e-4
