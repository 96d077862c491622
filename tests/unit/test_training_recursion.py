"""The recursion that trains is the one that serves; in stage B only the head learns, and only own tokens count."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from backend.drafters.recursive import RecursiveDrafter
from backend.engine.memory import Memory
from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.forms import CausalForm
from backend.models.qwen3_5 import Qwen35
from backend.models.student import PRESETS, StudentBlock, StudentConfig
from tests.factory import Shape, build
from training.pretraining.own_answers import Documents
from training.pretraining.stage_b import Settings, batches, hit_rates
from training.recursion import recursive_loss, recursive_outputs

SHAPE = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), head_dim=16, linear_dim=8, std=0.2)
SLOTS = 4


@pytest.fixture
def model() -> Qwen35:
    return build(SHAPE)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(seed))


def test_every_slot_equals_drafting_step_by_step(model: Qwen35) -> None:
    B, T = 2, 9
    tokens = random_tokens(B, T)
    hidden = model(tokens, CausalForm(B, T))
    outputs = list(recursive_outputs(NativeBlock(model), model.embed, tokens, hidden, SLOTS))
    assert model.mtp is not None
    compared = 0
    for base in range(1, T):
        # The rows of committed tokens, then one provisional row for each draft.
        embedded, previous = model.embed(tokens[:, 1 : base + 1]), hidden[:, :base]
        for slot in range(min(SLOTS, T - base)):
            if slot:
                embedded = torch.cat((embedded, model.embed(tokens[:, base + slot, None])), dim=1)
                previous = torch.cat((previous, last), dim=1)  # noqa: F821 (set by slot 0)
            out = model.mtp(embedded, previous, CausalForm(B, embedded.shape[1], start=1))
            last = out[:, -1:]  # noqa: F841
            torch.testing.assert_close(outputs[slot][:, base - 1], out[:, -1], atol=1e-5, rtol=1e-4)
            compared += 1
    assert compared == 8 + 7 + 6 + 5


def served(model: Qwen35, block: DraftBlock, tokens: Tensor, hidden: Tensor, prompt: int) -> dict[int, list[Tensor]]:
    """By base, the logits [V] of each slot that the drafter itself computes over pages when it is fed these tokens."""
    drafter = RecursiveDrafter(model, block, "b", "b", "b")
    memory = Memory(model.config, 1, 1, torch.device("cpu"), torch.float32)
    drafter.attach(memory)
    pages: list[int] = []
    memory.take(pages)
    memory.hidden[memory.places(pages, 0, len(tokens))] = hidden
    state = drafter.new_state(tokens[:prompt].tolist(), pages)
    drafter.prefill(state, tokens[None, :prompt], hidden[None, :prompt], 0, prompt)
    found: dict[int, list[Tensor]] = {}
    for base in range(prompt, len(tokens)):
        drafter.observe(state, [int(tokens[base])], hidden[base - 1 : base])
        seen: list[Tensor] = []

        def choose(logits: Tensor, base: int = base, seen: list[Tensor] = seen) -> Tensor:
            seen.append(logits[0])
            return tokens[[min(base + len(seen), len(tokens) - 1)]]

        drafter.propose([state], [min(SLOTS, len(tokens) - base)], choose)
        found[base] = seen
    return found


@pytest.mark.parametrize(
    ("kind", "carrier"),
    [("native", ""), ("cut", ""), *((kind, carrier) for kind in PRESETS for carrier in ("post_norm", "pre_norm"))],
)
def test_training_and_serving_compute_the_same_logits_in_every_slot(model: Qwen35, kind: str, carrier: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = random_tokens(14)
    hidden = torch.randn(14, SHAPE.hidden, generator=generator)
    ids = torch.arange(0, SHAPE.vocab, 2, dtype=torch.int32)
    block: DraftBlock
    if kind in PRESETS:
        config = StudentConfig.preset(kind, model.config, len(ids)).model_copy(update={"carrier": carrier})
        block = StudentBlock(config, model.config, ids).requires_grad_(False)
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    else:
        block = NativeBlock(model, ids if kind == "cut" else None)
    with torch.no_grad():
        rows = list(recursive_outputs(block, model.embed, tokens[None], hidden[None], SLOTS))
        trained = [block.logits(row)[0] for row in rows]  # [T - 1, S]
        for base, seen in served(model, block, tokens, hidden, prompt=5).items():
            for slot, logits in enumerate(seen):
                ours = logits if block.ids is None else logits[block.ids.long()]
                torch.testing.assert_close(trained[slot][base - 1], ours, atol=2e-5, rtol=1e-4)


def test_only_rows_that_predict_the_models_own_tokens_count(model: Qwen35) -> None:
    tokens = random_tokens(2, 10)
    own = torch.zeros(2, 10, dtype=torch.bool)
    own[0, 4:9] = True  # 5 own tokens, the first predicted by the row before them
    _, counts = recursive_loss(model, tokens, own, SLOTS, 0.8)
    assert counts.rows == [5, 4, 3, 2]


def test_padding_on_the_right_changes_nothing(model: Qwen35) -> None:
    tokens = random_tokens(1, 10)
    own = torch.ones(1, 10, dtype=torch.bool)
    padded = torch.cat((tokens, torch.zeros(1, 5, dtype=torch.int64)), dim=1)
    padded_own = torch.cat((own, torch.zeros(1, 5, dtype=torch.bool)), dim=1)
    loss, counts = recursive_loss(model, tokens, own, SLOTS, 0.8)
    padded_loss, padded_counts = recursive_loss(model, padded, padded_own, SLOTS, 0.8)
    assert padded_counts.rows == counts.rows
    assert float(padded_loss) == pytest.approx(float(loss), rel=1e-4)


def test_learning_raises_the_hits_and_leaves_the_trunk_alone(model: Qwen35) -> None:
    tokens = random_tokens(4, 12)
    own = torch.ones(4, 12, dtype=torch.bool)
    trunk = {name: p.clone() for name, p in model.named_parameters() if not name.startswith("mtp.")}
    assert model.mtp is not None
    model.mtp.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.mtp.parameters(), lr=1e-2)
    first = None
    for _ in range(40):
        loss, counts = recursive_loss(model, tokens, own, SLOTS, 0.8)
        first = first or counts
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(now < before for now, before in zip(counts.loss, first.loss, strict=True))
    assert sum(counts.hits) > sum(first.hits)
    assert all(torch.equal(p, trunk[name]) for name, p in model.named_parameters() if name in trunk)
    assert all(p.grad is None for name, p in model.named_parameters() if name in trunk)


def documents(lengths: list[tuple[int, int]]) -> Documents:
    return Documents.join([([1] * prompt, list(range(2, 2 + answer))) for prompt, answer in lengths])


def test_a_pass_holds_every_document_once_with_its_own_tokens_marked() -> None:
    lengths = [(3, 5), (2, 9), (4, 4), (6, 1), (2, 2)]
    seen = []
    for ids, own in batches(documents(lengths), tokens=20, rng=random.Random(0)):
        assert ids.numel() <= 20 or len(ids) == 1
        for row, mine in zip(ids, own, strict=True):
            answer = row[mine].tolist()
            assert answer == list(range(2, 2 + len(answer)))
            seen.append((int((row == 1).sum()), len(answer)))
    assert sorted(seen) == sorted(lengths)


def test_hit_rates_are_shares_per_slot(model: Qwen35) -> None:
    rates = hit_rates(model, documents([(3, 12), (2, 9)]), Settings(tokens_per_step=64))
    assert len(rates) == Settings().slots
    assert all(0.0 <= rate <= 1.0 for rate in rates)


def test_documents_survive_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    written = documents([(3, 5), (2, 9)])
    written.save(tmp_path / "documents.npz")
    read = Documents.load(tmp_path / "documents.npz")
    assert read.tokens.tolist() == written.tokens.tolist()
    assert read.doc_offsets.tolist() == [0, 8, 19]
    assert read.prompt_lengths.tolist() == [3, 2]
