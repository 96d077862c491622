"""A student's first weights, taken from the native block: its heads and channels that do most, in the directions that
hold most of what it carries. With all of its widths that is the native block itself. Knows no loss and no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backend.models.draft_block import NativeBlock
from backend.models.layers import DecoderLayer, GatedAttention
from backend.models.mtp import MTPBlock
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock
from training.distillation.batches import Batch
from training.errors import TrainingError
from training.recursion import recursive_outputs


class _Observed:
    """Second moments over the anchors' rows of all slots, in float64."""

    def __init__(self, mtp: MTPBlock) -> None:
        layer = mtp.layers[0]
        assert isinstance(layer, DecoderLayer)
        self.heads: Tensor | None = None  # [heads · D, heads · D] of what o_proj reads
        self.channels: Tensor | None = None  # [F] of what down_proj reads
        self.carried: Tensor | None = None  # [H, H] of the residual stream's directions, each row of length 1
        self._rows: Tensor | None = None
        self._hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(self._see_heads),
            layer.mlp.down_proj.register_forward_pre_hook(self._see_channels),
            mtp.norm.register_forward_pre_hook(self._see_carried),
        ]

    @torch.no_grad()
    def run(self, model: Qwen35, batch: Batch, slots: int) -> None:
        rows = recursive_outputs(NativeBlock(model), model.embed, batch.tokens, batch.hidden, slots)
        for slot in range(slots):
            self._rows = batch.supervised(slot)
            next(rows)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _taken(self, inputs: tuple[Tensor, ...]) -> Tensor:
        assert self._rows is not None
        return inputs[0][self._rows].double()

    def _see_heads(self, module: object, inputs: tuple[Tensor, ...]) -> None:
        x = self._taken(inputs)
        self.heads = x.t() @ x + (0 if self.heads is None else self.heads)

    def _see_channels(self, module: object, inputs: tuple[Tensor, ...]) -> None:
        x = self._taken(inputs)
        self.channels = x.square().sum(0) + (0 if self.channels is None else self.channels)

    def _see_carried(self, module: object, inputs: tuple[Tensor, ...]) -> None:
        x = self._taken(inputs)
        x = x / x.norm(dim=-1, keepdim=True)
        self.carried = x.t() @ x + (0 if self.carried is None else self.carried)


@torch.no_grad()
def from_native(student: StudentBlock, model: Qwen35, batches: Iterable[Batch], slots: int) -> None:
    """Fill the student with the part of the model's MTP block and output head that does most on these batches.

    Its residual stream is the native one in the d_inner directions U with the most of it: what reads the stream becomes
    W diag(1 + norm) U √(H / d), since a norm over fewer directions divides by less, what writes it Uᵀ W, and out_up U.
    Raises TrainingError where the student has more heads or channels than the native block.
    """
    mtp = model.mtp
    if mtp is None:
        raise TrainingError("the model has no MTP block to start a student from: start from random weights")
    layer = mtp.layers[0]
    assert isinstance(layer, DecoderLayer)
    native = layer.self_attn
    H, d, D = student.config.hidden_size, student.config.d_inner, student.head_dim
    _check_nested(student, native, layer.mlp.gate_proj.outputs)
    observed = _Observed(mtp)
    try:
        for batch in batches:
            observed.run(model, batch, slots)
    finally:
        observed.close()
    if observed.carried is None or observed.heads is None or observed.channels is None:
        raise TrainingError("a student cannot be started from the native block without documents to watch it on")
    if d == H:
        U = torch.eye(H, dtype=torch.float64, device=observed.carried.device)
    else:
        U = torch.linalg.eigh(observed.carried).eigenvectors[:, -d:].flip(1)  # [H, d]
    scale = (H / d) ** 0.5

    def reads(weight: Tensor, norm: Tensor) -> Tensor:
        return weight.double() * (1 + norm.double()) @ U * scale if d != H else weight.double()

    def writes(weight: Tensor) -> Tensor:
        return U.t() @ weight.double() if d != H else weight.double()

    def norm_of(weight: Tensor) -> Tensor:
        return weight if d == H else torch.zeros_like(weight[:d])

    o = writes(native.o_proj.weight)  # [d, heads · D]
    queries, keys = _chosen_heads(student, native, o, observed.heads)
    q_rows = torch.cat([torch.arange(2 * D) + 2 * D * head for head in queries])  # packed [query | gate] per head
    o_columns = torch.cat([torch.arange(D) + D * head for head in queries])
    k_rows = torch.cat([torch.arange(D) + D * head for head in keys])
    down = writes(layer.mlp.down_proj.weight)  # [d, F]
    worth = observed.channels * down.square().sum(0)
    channels = worth.topk(student.config.intermediate_size).indices.sort().values
    before, after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    head = model.lm_head.weight[student.d2t.to(model.lm_head.weight.device, torch.int64)]
    values = {
        "pre_fc_norm_embedding.weight": mtp.pre_fc_norm_embedding.weight,
        "pre_fc_norm_hidden.weight": mtp.pre_fc_norm_hidden.weight,
        "fc.weight": writes(mtp.fc.weight),
        "norm.weight": mtp.norm.weight,
        "layers.0.input_layernorm.weight": norm_of(before),
        "layers.0.post_attention_layernorm.weight": norm_of(after),
        "layers.0.self_attn.q_norm.weight": native.q_norm.weight,
        "layers.0.self_attn.k_norm.weight": native.k_norm.weight,
        "layers.0.self_attn.q_proj.weight": reads(native.q_proj.weight[q_rows], before),
        "layers.0.self_attn.k_proj.weight": reads(native.k_proj.weight[k_rows], before),
        "layers.0.self_attn.v_proj.weight": reads(native.v_proj.weight[k_rows], before),
        "layers.0.self_attn.o_proj.weight": o[:, o_columns],
        "layers.0.mlp.gate_proj.weight": reads(layer.mlp.gate_proj.weight[channels], after),
        "layers.0.mlp.up_proj.weight": reads(layer.mlp.up_proj.weight[channels], after),
        "layers.0.mlp.down_proj.weight": down[:, channels],
    }
    if student.out_up is not None:
        values["out_up.weight"] = U
    if student.inner_norm is None:
        values["head.weight"] = head
    else:
        values["inner_norm.weight"] = norm_of(mtp.norm.weight)
        values["head.weight"] = reads(head, mtp.norm.weight)
    for name, parameter in student.named_parameters():
        parameter.copy_(values.pop(name))
    assert not values


@torch.no_grad()
def at_random(student: StudentBlock, model: Qwen35, seed: int) -> None:
    """Matrices N(0, 1 / fan in), norms at identity; a head at the trunk's width still starts from its rows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in student.parameters():
        if parameter.dim() == 1:
            parameter.zero_()
        else:
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            parameter.copy_(drawn)
    if student.inner_norm is None:
        ids = student.d2t.to(model.lm_head.weight.device, torch.int64)
        student.head.weight.copy_(model.lm_head.weight[ids])


def _check_nested(student: StudentBlock, native: GatedAttention, channels: int) -> None:
    config = student.config
    for what, ours, theirs in (
        ("key heads", student.kv_heads, native.kv_heads),
        ("query heads to a key head", student.heads // student.kv_heads, native.heads // native.kv_heads),
        ("channels", config.intermediate_size, channels),
    ):
        if ours > theirs:
            raise TrainingError(
                f"a student of {ours} {what} cannot start from a native block of {theirs}: start from random weights"
            )
    if student.head_dim != native.head_dim:
        raise TrainingError(
            f"a student of head_dim {student.head_dim} cannot start from a native block of {native.head_dim}: "
            f"start from random weights"
        )


def _chosen_heads(
    student: StudentBlock, native: GatedAttention, o: Tensor, moments: Tensor
) -> tuple[list[int], list[int]]:
    """The key heads whose queries write most, and of each its queries that write most: query heads, key heads."""
    D, group, wanted = native.head_dim, native.heads // native.kv_heads, student.heads // student.kv_heads
    worth = []  # E ‖o_h x_h‖²
    for head in range(native.heads):
        span = slice(head * D, (head + 1) * D)
        worth.append(float(((o[:, span] @ moments[span, span]) * o[:, span]).sum()))
    best = [sorted(range(k * group, (k + 1) * group), key=lambda h: -worth[h])[:wanted] for k in range(native.kv_heads)]
    keys = sorted(range(native.kv_heads), key=lambda k: -sum(worth[h] for h in best[k]))[: student.kv_heads]
    keys.sort()
    return [head for key in keys for head in sorted(best[key])], keys
