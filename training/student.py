"""A student's first weights, cut out of the native MTP block and the trunk's output head.

The block's residual stream h [H] becomes Uᵀh [d], U orthonormal: what writes to it is multiplied by Uᵀ, what reads it
by U, and `out_up` is U. Attention heads and FFN columns are chosen. Knows of training only where it starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from backend.models.config import ModelConfig
from backend.models.draft_block import NativeBlock
from backend.models.forms import CausalForm
from backend.models.mtp import MTPBlock
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock, StudentConfig

How = Literal["slice", "random", "principal"]
_STD = 0.02  # of random weights
_RIDGE = 1e-3  # of the mean second moment
_READERS = {
    "layers.0.input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "layers.0.post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_STREAMS = (*_READERS, "norm")  # what enters these is the stream


@torch.no_grad()
def initialise(
    block: StudentBlock,
    model: Qwen35,
    how: How = "slice",
    calibration: Iterable[tuple[Tensor, Tensor]] = (),
    seed: int = 0,
) -> None:
    """Fill the block in place. Whatever `how`, the norms at the trunk's width and the head's rows are the model's.

    slice: U picks coordinates; they, heads and columns are those of the largest weights. Needs the weights alone.
    principal: U spans the top principal directions of the native block's stream over `calibration`, of which each is a
    document, its tokens int64 [T] and the trunk's hidden states [T, H]. Heads and columns are those that write the most
    there, and what writes is fitted (ridge regression) to what all of them wrote.
    random: U is random, and so is the layer; by `seed`.

    At full width U is the identity: with all heads, columns and rows that is the native block, bit for bit. Raises
    ValueError for a model without that block or made ready to decode with, for a block that is no cut of it, and for
    `principal` without calibration.
    """
    native = _native(block.config, model)
    rows = model.lm_head.weight[block.d2t.to(model.lm_head.weight.device, torch.int64)]  # [S, H]
    seen = _second_moments(model, native, calibration) if how == "principal" else {}
    basis = _basis(block.config, native, rows, seen, how, seed)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        _weight(block, name).copy_(_weight(native, name))
    if how == "random":
        _fill(block, seed)
    else:
        _cut(block, native, basis, seen)
    if block.out_up is not None:
        block.out_up.weight.copy_(basis)
    if block.inner_norm is not None:
        _norm(block, native, "inner_norm", "norm")
        rows = _reading(rows, native, "norm", basis, seen)
    block.head.weight.copy_(rows)


def _weight(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(f"{name}.weight")


def _native(config: StudentConfig, model: Qwen35) -> MTPBlock:
    native, target = model.mtp, model.config
    if native is None:
        raise ValueError("the model was loaded without its MTP block")
    if any(parameter.numel() == 0 for parameter in native.parameters()):
        raise ValueError("the model was made ready to decode with and has let its MTP block's weights go")
    check_cut(config, target)
    return native


def check_cut(config: StudentConfig, target: ModelConfig) -> None:
    """Raises ValueError for a student that is no cut of the model's MTP block."""
    groups = config.num_attention_heads // config.num_key_value_heads
    if (
        config.head_dim != target.head_dim
        or config.num_key_value_heads > target.num_key_value_heads
        or groups > target.query_groups
        or config.intermediate_size > target.intermediate_size
    ):
        raise ValueError(
            f"a student of {config.num_attention_heads} heads over {config.num_key_value_heads} of {config.head_dim} "
            f"and {config.intermediate_size} columns is no cut of the model's block ({target.num_attention_heads} over "
            f"{target.num_key_value_heads} of {target.head_dim}, {target.intermediate_size} columns)"
        )


def _second_moments(model: Qwen35, native: MTPBlock, calibration: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """XᵀX float32, X the native block's rows where they enter the module of that name."""
    moments: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2).float()
        moments[name] = x.T @ x + moments.get(name, 0.0)

    names = (*_STREAMS, *(f"layers.0.{name}" for name in _WRITERS))
    hooks = [native.get_submodule(name).register_forward_pre_hook(partial(add, name)) for name in names]
    draft = NativeBlock(model)
    try:
        for tokens, hidden in calibration:
            embedded = model.embed(tokens[None, 1:].to(model.lm_head.weight.device, torch.int64))
            form = CausalForm(1, len(tokens) - 1, start=1, device=embedded.device)
            draft(embedded, hidden[None, :-1].to(embedded), form)
    finally:
        for hook in hooks:
            hook.remove()
    if not moments:
        raise ValueError("principal directions are those of calibration documents, and there are none")
    return moments


def _basis(
    config: StudentConfig, native: MTPBlock, rows: Tensor, seen: dict[str, Tensor], how: How, seed: int
) -> Tensor:
    """U float32 [H, d]."""
    H, d = config.hidden_size, config.d_inner
    identity = torch.eye(H, device=rows.device)
    if d == H:
        return identity
    if how == "random":
        drawn = torch.randn(H, d, generator=torch.Generator().manual_seed(seed))
        orthonormal: Tensor = torch.linalg.qr(drawn)[0]
        return orthonormal.to(rows.device)
    if how == "slice":
        # How much of the logits hangs on each coordinate.
        weight = ((1 + _weight(native, "norm").float()) * rows.float()).square().sum(0)  # [H]
        return identity[:, weight.topk(d).indices.sort().values]
    total = sum((seen[name] / seen[name].trace() for name in _STREAMS), torch.zeros_like(identity))
    directions: Tensor = torch.linalg.eigh(total.double())[1]  # by ascending share
    return directions[:, -d:].float()


def _fill(block: StudentBlock, seed: int) -> None:
    """Random matrices and norms at identity, below the carrier."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in block.named_parameters():
        if name.startswith(("fc.", "layers.")):
            drawn = torch.randn(parameter.shape, generator=generator) * _STD
            parameter.copy_(drawn if parameter.dim() > 1 else torch.zeros_like(drawn))


@dataclass(frozen=True)
class _Kept:
    """Indices of heads (of queries, of keys) and of FFN columns, each ascending."""

    queries: Tensor
    keys: Tensor
    columns: Tensor

    def of(self, name: str, head_dim: int) -> Tensor:
        """Rows of a map that reads the stream, columns of one that writes it."""
        match name.rpartition(".")[2]:
            case "q_proj":
                return _spans(self.queries, 2 * head_dim)  # each with its gate
            case "k_proj" | "v_proj":
                return _spans(self.keys, head_dim)
            case "o_proj":
                return _spans(self.queries, head_dim)
            case _:
                return self.columns


def _spans(index: Tensor, width: int) -> Tensor:
    return (index[:, None] * width + torch.arange(width, device=index.device)).flatten()


def _cut(block: StudentBlock, native: MTPBlock, basis: Tensor, seen: dict[str, Tensor]) -> None:
    """The layer, and the projection into it."""
    theirs, ours, D = native.layers[0], block.layers[0], block.config.head_dim
    kept = _kept(block.config, native, basis, seen)
    block.fc.weight.copy_(basis.T @ native.fc.weight.float())
    for norm, readers in _READERS.items():
        _norm(block, native, norm, norm)
        for name in readers:
            rows = _weight(theirs, name)[kept.of(name, D)]
            _weight(ours, name).copy_(_reading(rows, native, norm, basis, seen))
    for name in _WRITERS:
        moment = seen.get(f"layers.0.{name}")
        _weight(ours, name).copy_(_writing(basis.T @ _weight(theirs, name).float(), kept.of(name, D), moment))
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        _weight(ours, name).copy_(_weight(theirs, name))


def _norm(block: StudentBlock, native: MTPBlock, ours: str, theirs: str) -> None:
    """Of another width than the native one, a norm of the stream is at identity: `_reading` has its scale."""
    same = block.out_up is None
    _weight(block, ours).copy_(_weight(native, theirs) if same else torch.zeros(block.config.d_inner))


def _reading(weight: Tensor, native: MTPBlock, norm: str, basis: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Rows [n, H] that read the native norm's output → [n, d] that read the student's.

    h ≈ Uh', and U keeps the share e of its energy: rms(h)² = |h|²/H ≈ |h'|²/(e H) = rms(h')² d/(e H).
    """
    H, d = basis.shape
    if d == H:
        return weight
    moment = seen.get(norm)
    share = d / H if moment is None else float((basis * (moment @ basis)).sum() / moment.trace())
    scale = 1 + _weight(native, norm).float()
    scaled: Tensor = (weight.float() * scale) @ basis
    return scaled * math.sqrt(share * H / d)


def _writing(weight: Tensor, kept: Tensor, moment: Tensor | None) -> Tensor:
    """A map into the stream [d, n] → of its inputs the kept ones alone, [d, m].

    With second moments M of the inputs: argmin_V E|W x - V x_kept|² = W M[:, kept] (M[kept, kept] + λ)⁻¹.
    """
    if moment is None or len(kept) == weight.shape[1]:
        return weight[:, kept]
    among = moment[kept][:, kept].double()
    ridge = _RIDGE * among.diagonal().mean() * torch.eye(len(kept), device=among.device)
    fitted: Tensor = torch.linalg.solve(among + ridge, (weight @ moment[:, kept]).double().T)  # [m, d]
    return fitted.T.float()


def _kept(config: StudentConfig, native: MTPBlock, basis: Tensor, seen: dict[str, Tensor]) -> _Kept:
    """The heads and columns of which the most arrives in the student's stream. Queries stay with their keys."""
    layer, D = native.layers[0], config.head_dim
    kv, groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    key_heads = len(_weight(layer, "self_attn.k_proj")) // D
    out = basis.T @ _weight(layer, "self_attn.o_proj").float()  # [d, Hq·D]
    moment = seen.get("layers.0.self_attn.o_proj")
    within = (
        _blocks(moment, D) if moment is not None else torch.eye(D, device=out.device).expand(out.shape[1] // D, D, D)
    )
    heads = out.unflatten(1, (-1, D))  # [d, Hq, D]
    arriving = torch.einsum("iha,hab,ihb->h", heads, within, heads).view(key_heads, -1)  # [Hkv, groups]
    best = arriving.topk(groups, dim=1)
    keys = best.values.sum(1).topk(kv).indices.sort().values
    queries = (best.indices[keys].sort(dim=1).values + keys[:, None] * arriving.shape[1]).flatten()
    down = (basis.T @ _weight(layer, "mlp.down_proj").float()).square().sum(0)
    moment = seen.get("layers.0.mlp.down_proj")
    if moment is not None:
        size = moment.diagonal()
    else:
        gate, up = (
            _weight(layer, name).float().square().sum(1) for name in _READERS["layers.0.post_attention_layernorm"]
        )
        size = gate * up
    return _Kept(queries, keys, (down * size).topk(config.intermediate_size).indices.sort().values)


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal: [n·size, n·size] → [n, size, size]."""
    return torch.stack([part[:, i * size : (i + 1) * size] for i, part in enumerate(matrix.split(size))])
