"""Student blocks and cut heads: what they have in common with the native MTP head, bit for bit, and what they weigh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.drafters.recursive import spread
from backend.models.config import ModelConfig
from backend.models.draft_block import DraftBlock, NativeBlock
from backend.models.forms import CausalForm
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock, StudentConfig
from tests import factory

SHAPE = factory.Shape()
NINE_B = ModelConfig.from_dict(factory.NINE_B.config())


def copied(model: Qwen35) -> StudentBlock:
    """Full width, all rows, the native block's weights and the trunk's head."""
    assert model.mtp is not None
    config = StudentConfig.like_native(model.config, model.config.vocab_size)
    student = StudentBlock(config, model.config, torch.arange(model.config.vocab_size))
    weights = {**dict(model.mtp.state_dict()), "head.weight": model.lm_head.weight}
    missing, unexpected = student.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["d2t"], [])
    return student.requires_grad_(False)


def slots(block: DraftBlock, model: Qwen35, tokens: Tensor, hidden: Tensor, count: int) -> list[Tensor]:
    """Logits of so many slots, each fed the next tokens and what the slot before it carried."""
    found = []
    for slot in range(count):
        fed = model.embed(tokens[:, slot : slot + hidden.shape[1]])
        rows = block(fed, hidden, CausalForm(len(tokens), hidden.shape[1], start=1 + slot))
        scored, hidden = block.readout(rows)
        found.append(block.logits(scored))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_of_full_width_with_copied_weights_is_the_native_head_bit_for_bit(dtype: torch.dtype) -> None:
    model = factory.build(SHAPE).to(dtype)
    student = copied(model).to(dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPE.vocab, (3, 24), generator=generator)
    hidden = torch.randn(3, 20, SHAPE.hidden, generator=generator).to(dtype)
    theirs, ours = (slots(block, model, tokens, hidden, 4) for block in (NativeBlock(model), student))
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(ours[0], ours[1])


@pytest.mark.parametrize(
    ("preset", "parameters", "ratio"), [("sv", 211_829_248, 0.168), ("sv-slim", 144_722_432, 0.115)]
)
def test_the_presets_of_the_9b_weigh_what_they_are_to_weigh(preset: str, parameters: int, ratio: float) -> None:
    config = StudentConfig.preset(preset, NINE_B, 32768)
    assert config.d_inner == 2048
    with torch.device("meta"):
        student = StudentBlock(config, NINE_B, torch.arange(32768))
        native = Qwen35(NINE_B)
    assert native.mtp is not None
    assert student.parameters_read == parameters
    of_native = sum(p.numel() for p in native.mtp.parameters()) + native.lm_head.weight.numel()
    assert of_native == 1_260_409_344
    assert round(parameters / of_native, 3) == ratio


@pytest.mark.parametrize("carrier", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("head", ["outer", "inner"])
def test_the_head_and_the_carrier_read_what_the_config_says(head: str, carrier: str) -> None:
    model = factory.build(SHAPE)
    config = StudentConfig.preset("sv", model.config, 40).model_copy(update={"head": head, "carrier": carrier})
    student = StudentBlock(config, model.config, torch.arange(0, 320, 8)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in student.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    rows = torch.randn(2, 5, config.d_inner, generator=generator)
    scored, carried = student.readout(rows)
    assert student.out_up is not None
    up = rows @ student.out_up.weight.T

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * (1 + weight)

    inner = None if student.inner_norm is None else normed(rows, student.inner_norm.weight)
    outer = normed(up, student.norm.weight)
    torch.testing.assert_close(scored, outer if inner is None else inner)
    torch.testing.assert_close(carried, up if carrier == "pre_norm" else outer)
    assert student.logits(scored).shape == (2, 5, 40)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, SHAPE.vocab - 1), min_size=1), st.integers(0, 2**16))
def test_logits_of_the_cut_head_are_those_of_the_whole_one_where_listed(ids: set[int], seed: int) -> None:
    model = factory.build(SHAPE)
    hidden = torch.randn(3, SHAPE.hidden, generator=torch.Generator().manual_seed(seed))
    cut = NativeBlock(model, torch.tensor(sorted(ids), dtype=torch.int32))
    full = spread(cut.logits(hidden), torch.tensor(sorted(ids)), SHAPE.vocab)
    listed = torch.tensor([index in ids for index in range(SHAPE.vocab)])
    torch.testing.assert_close(full, torch.where(listed, NativeBlock(model).logits(hidden), -torch.inf))


def test_the_cut_rows_share_no_memory_with_the_head() -> None:
    model = factory.build(SHAPE)
    cut = NativeBlock(model, torch.arange(4, dtype=torch.int32))
    before = model.lm_head.weight.clone()
    assert cut.rows is not None
    cut.rows.weight.data += 1
    assert torch.equal(model.lm_head.weight, before)


def test_widths_that_cannot_be_are_refused() -> None:
    config = StudentConfig.preset("sv", NINE_B, 8).model_dump()
    for changed in ({"num_key_value_heads": 3}, {"d_inner": 8192}, {"hot_rows": 0}, {"head": "both"}, {"more": 1}):
        with pytest.raises(ValueError):
            StudentConfig(**{**config, **changed})
    with pytest.raises(ValueError, match="preset"):
        StudentConfig.preset("sv-fat", NINE_B, 8)
    with pytest.raises(ValueError, match="7 ids"):
        StudentBlock(StudentConfig(**{**config, "hot_rows": 8}), NINE_B, torch.arange(7))


def test_a_model_without_the_block_has_no_native_head() -> None:
    model = factory.build(replace(SHAPE, mtp=False))
    with pytest.raises(ValueError, match="MTP"):
        NativeBlock(model)
