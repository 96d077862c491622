"""A student's first weights: what of the native block is in them, and what they cannot be made of."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend.engine.runner import Runner
from backend.models.draft_block import NativeBlock
from backend.models.forms import CausalForm
from backend.models.layers import Norm
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock, StudentConfig
from tests import factory
from training.student import How, initialise

SHAPE = factory.Shape(kv_heads=2, heads=4)
MODEL = factory.build(SHAPE)
IDS = torch.arange(0, 320, 5)
HOW: tuple[How, ...] = ("slice", "random", "principal")


def documents(count: int = 4, length: int = 40, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE.vocab, (count, length), generator=generator)
    with torch.no_grad():
        hidden = MODEL(tokens, CausalForm(count, length))
    return list(zip(tokens, hidden, strict=True))


def made(how: How, seed: int = 0, model: Qwen35 = MODEL, **changed: object) -> StudentBlock:
    config = StudentConfig.preset("sv", MODEL.config, len(IDS)).model_copy(update=changed)
    block = StudentBlock(config, MODEL.config, IDS)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(torch.nan)
    initialise(block, model, how, documents() if how == "principal" else (), seed)
    return block


def rows_of(block: StudentBlock | NativeBlock, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Outputs of every row after the first."""
    with torch.no_grad():
        out: Tensor = block(MODEL.embed(tokens[None, 1:]), hidden[None, :-1], CausalForm(1, len(tokens) - 1, start=1))
    return out


@pytest.mark.parametrize("how", ["slice", "principal"])
def test_at_full_width_it_is_the_native_block_bit_for_bit(how: How) -> None:
    config = StudentConfig.like_native(MODEL.config, SHAPE.vocab)
    block = StudentBlock(config, MODEL.config, torch.arange(SHAPE.vocab))
    initialise(block, MODEL, how, documents())
    tokens, hidden = documents(seed=1)[0]
    native = NativeBlock(MODEL)
    ours, theirs = rows_of(block, tokens, hidden), rows_of(native, tokens, hidden)
    assert torch.equal(block.readout(ours)[1], theirs)
    assert torch.equal(block.logits(block.readout(ours)[0]), native.logits(theirs))


@pytest.mark.parametrize("head", ["outer", "inner"])
@pytest.mark.parametrize("how", HOW)
def test_every_weight_is_filled(how: How, head: str) -> None:
    block = made(how, head=head)
    assert all(bool(parameter.isfinite().all()) for parameter in block.parameters())


@pytest.mark.parametrize("how", HOW)
def test_the_norms_at_the_trunks_width_and_the_heads_rows_are_the_models(how: How) -> None:
    block = made(how)
    assert MODEL.mtp is not None
    assert torch.equal(block.head.weight, MODEL.lm_head.weight[IDS])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        assert torch.equal(block.get_submodule(name).weight, MODEL.mtp.get_submodule(name).weight)


@pytest.mark.parametrize("how", HOW)
def test_what_returns_to_the_trunks_width_is_orthonormal(how: How) -> None:
    block = made(how)
    assert block.out_up is not None
    basis = block.out_up.weight
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", HOW)
def test_an_inner_head_has_the_logits_of_an_outer_one(how: How) -> None:
    """They differ by a factor alone, where the stream's energy in U is not the share it was on the average."""
    outer, inner = made(how), made(how, head="inner")
    rows = torch.randn(7, outer.config.d_inner, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (block.logits(block.readout(rows)[0]) for block in (outer, inner))
    torch.testing.assert_close(torch.nn.functional.cosine_similarity(one, other), torch.ones(7))


def native_of_a_narrow_stream(width: int) -> Qwen35:
    """Whose block writes and reads nothing but the first coordinates, and scores and hands on all of it."""
    model = copy.deepcopy(MODEL)
    assert model.mtp is not None
    layer = model.mtp.layers[0]
    with torch.no_grad():
        for weight in (model.mtp.fc.weight, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):  # type: ignore[union-attr]
            weight[width:] = 0
    return model


def test_where_the_native_stream_is_as_narrow_as_the_students_the_two_are_one_drafter() -> None:
    model = native_of_a_narrow_stream(32)
    native = NativeBlock(model)
    whole = {"num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.kv_heads}
    block = made("principal", model=model, d_inner=32, intermediate_size=SHAPE.intermediate, **whole)
    tokens, hidden = documents(seed=1)[0]
    ours, theirs = rows_of(block, tokens, hidden), rows_of(native, tokens, hidden)
    torch.testing.assert_close(block.readout(ours)[1], theirs, atol=2e-4, rtol=2e-4)


def test_what_the_columns_left_out_wrote_is_written_by_those_like_them() -> None:
    """Every second FFN column does what its neighbour does, and writes something else that is smaller."""
    model = native_of_a_narrow_stream(32)
    assert model.mtp is not None
    mlp = model.mtp.layers[0].mlp
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):  # type: ignore[union-attr]
            weight[1::2] = weight[::2]
        mlp.down_proj.weight[:, 1::2] = 0.2 * mlp.down_proj.weight[:, 1::2].roll(1, dims=0)  # type: ignore[union-attr]
        mlp.down_proj.weight[32:] = 0  # type: ignore[union-attr]
    whole = {"num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.kv_heads}
    block = made("principal", model=model, d_inner=32, intermediate_size=SHAPE.intermediate // 2, **whole)
    tokens, hidden = documents(seed=1)[0]
    ours, theirs = rows_of(block, tokens, hidden), rows_of(NativeBlock(model), tokens, hidden)
    error = (block.readout(ours)[1] - theirs).norm() / theirs.norm()
    assert float(error.detach()) < 0.005


def test_columns_and_heads_that_write_nothing_are_those_left_out() -> None:
    model = copy.deepcopy(MODEL)
    assert model.mtp is not None
    layer = model.mtp.layers[0]
    D = SHAPE.head_dim
    with torch.no_grad():
        layer.mlp.down_proj.weight[:, ::2] = 0  # type: ignore[union-attr]
        layer.self_attn.o_proj.weight[:, : 2 * D] = 0  # the queries of the first key head  # type: ignore[union-attr]
    for how in ("slice", "principal"):
        block = made(how, model=model)
        attention = block.layers[0].self_attn
        assert isinstance(attention.q_norm, Norm)
        full = made(how, model=model, num_attention_heads=4, num_key_value_heads=2).layers[0].self_attn
        assert torch.equal(attention.k_proj.weight, full.k_proj.weight[D:])
        assert torch.equal(attention.q_proj.weight, full.q_proj.weight[4 * D :])
        gates = made(how, model=model, intermediate_size=SHAPE.intermediate).layers[0].mlp.gate_proj.weight
        assert torch.equal(block.layers[0].mlp.gate_proj.weight, gates[1::2])


def test_principal_directions_keep_more_of_the_native_block_than_a_slice() -> None:
    tokens, hidden = documents(seed=1)[0]
    native = rows_of(NativeBlock(MODEL), tokens, hidden)
    alike = {}
    for how in HOW:
        block = made(how)
        carried = block.readout(rows_of(block, tokens, hidden))[1].detach()
        alike[how] = float(torch.nn.functional.cosine_similarity(carried, native, dim=-1).mean())
    assert alike["principal"] > alike["slice"] > alike["random"]


def test_random_weights_are_the_seeds() -> None:
    one, same, other = made("random", 1), made("random", 1), made("random", 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_what_is_no_cut_of_the_model_is_refused() -> None:
    for changed in ({"num_key_value_heads": 4, "num_attention_heads": 4}, {"intermediate_size": 97}, {"head_dim": 64}):
        with pytest.raises(ValueError, match="no cut of the model's block"):
            made("slice", **changed)
    with pytest.raises(ValueError, match="without its MTP block"):
        made("slice", model=factory.build(replace(SHAPE, mtp=False)))
    ready = factory.build(SHAPE).to(torch.bfloat16)
    Runner(ready)
    with pytest.raises(ValueError, match="ready to decode with"):
        made("slice", model=ready)
    with pytest.raises(ValueError, match="calibration"):
        initialise(StudentBlock(StudentConfig.preset("sv", MODEL.config, 64), MODEL.config, IDS), MODEL, "principal")
