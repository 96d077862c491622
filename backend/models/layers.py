"""The layers of Qwen3.5: linear, norm, SwiGLU, gated attention, gated DeltaNet. Parameters are named as Hugging Face's.

Formulas: transformers' `models/qwen3_5`, arXiv 2412.06464 (gated DeltaNet). Knows no cache: see forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from backend.models.config import ModelConfig
from backend.models.forms import Form
from backend.ops.elementwise import exp, sigmoid, silu, softplus
from backend.ops.linear import RowTile, linear
from backend.ops.norm import gated_rms_norm, l2_norm, rms_norm
from backend.ops.rope import Rotary, rotate


class Linear(nn.Module):
    """weight [out, in], no bias. `tile` is what makes its rows invariant; the engine's probe sets it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.tile = RowTile()
        self.joined = False  # part of a Joined, which computes in its place

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.tile)


class Joined(nn.Module):
    """Linears of one input as one product, for decoding; their parameters become views of its weight."""

    def __init__(self, *linears: Linear) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.cat([one.weight.detach() for one in linears]), persistent=False)
        self.sizes = [one.weight.shape[0] for one in linears]
        self.tile = RowTile()
        for one, part in zip(linears, self.weight.split(self.sizes), strict=True):
            one.weight.data, one.joined = part, True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = linear(x, self.weight, self.tile).split(self.sizes, dim=-1)
        return parts


class Norm(nn.Module):
    """Zero-centred RMSNorm over the last dimension: Qwen3.5 stores its scale less one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps
        self.scale: Tensor | None = None  # float32, where the weight will not change any more

    def prepare(self) -> None:
        self.scale = 1.0 + self.weight.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1.0 + self.weight.float() if self.scale is None else self.scale, self.eps)


class GatedNorm(nn.Module):
    """Plain-weight RMSNorm gated by SiLU, the DeltaNet's output norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.joined: Joined | None = None

    def prepare(self) -> None:
        self.joined = Joined(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.joined(x) if self.joined else (self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(silu(gate) * up)
        return out


class GatedAttention(nn.Module):
    """Softmax attention with per-head q/k norm, partial rotary and a sigmoid output gate."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = Linear(config.hidden_size, 2 * self.heads * self.head_dim)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps)
        self.joined: Joined | None = None

    def prepare(self) -> None:
        self.joined = Joined(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x: Tensor, form: Form, rotary: Rotary) -> Tensor:
        B, T, _ = x.shape
        packed, k, v = self.joined(x) if self.joined else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        # Packed per head: [query | gate], not all queries and then all gates.
        q, gate = packed.view(B, T, self.heads, 2 * self.head_dim).chunk(2, dim=-1)
        k = k.view(B, T, self.kv_heads, self.head_dim)
        v = v.view(B, T, self.kv_heads, self.head_dim)
        q, k = rotate(self.q_norm(q), *rotary), rotate(self.k_norm(k), *rotary)
        o = form.attend(self.layer, q, k, v)  # [B, T, heads, head_dim]
        out: Tensor = self.o_proj((o * sigmoid(gate)).reshape(B, T, -1))
        return out


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule behind a short causal convolution."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.k_heads, self.v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.k_dim, self.v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        self.in_proj_qkv = Linear(config.hidden_size, 2 * keys + values)
        self.in_proj_z = Linear(config.hidden_size, values)
        self.in_proj_b = Linear(config.hidden_size, self.v_heads)
        self.in_proj_a = Linear(config.hidden_size, self.v_heads)
        self.conv1d = Convolution(2 * keys + values, config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.ones(self.v_heads))
        self.A_log = nn.Parameter(torch.zeros(self.v_heads))
        self.norm = GatedNorm(self.v_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size)
        self.joined: Joined | None = None

    def prepare(self) -> None:
        self.joined = Joined(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)

    def forward(self, x: Tensor, form: Form, rotary: Rotary) -> Tensor:
        B, T, _ = x.shape
        columns, z, b, a = (
            self.joined(x)
            if self.joined
            else (self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x))
        )
        mixed = form.convolve(self.layer, columns, self.conv1d.weight)  # [B, T, 2·keys + values]
        qk, v = mixed.split((2 * self.k_heads * self.k_dim, self.v_heads * self.v_dim), dim=-1)
        beta = sigmoid(b.float())  # [B, T, v_heads]
        g = -exp(self.A_log.float()) * softplus(a.float() + self.dt_bias.float())
        qk = l2_norm(qk.view(B, T, 2 * self.k_heads, self.k_dim))
        if self.v_heads != self.k_heads:  # value head h uses key head h // ratio
            qk = qk.repeat_interleave(self.v_heads // self.k_heads, dim=2)
        q, k = qk.chunk(2, dim=2)
        v = v.reshape(B, T, self.v_heads, self.v_dim).float()
        o = form.delta_rule(self.layer, q * self.k_dim**-0.5, k, v, g, beta)  # [B, T, v_heads, v_dim] float32
        z = z.reshape(B, T, self.v_heads, self.v_dim)
        out: Tensor = self.out_proj(self.norm(o, z).reshape(B, T, -1))
        return out


class Convolution(nn.Module):
    """Holds the depthwise weight [channels, 1, width]; forms apply it, because they own its history."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class DecoderLayer(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = GatedAttention(config, layer)
        else:
            self.linear_attn = GatedDeltaNet(config, layer)
        self.full_attention = kind == "full_attention"
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, form: Form, rotary: Rotary) -> Tensor:
        mixer = self.self_attn if self.full_attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x), form, rotary)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def products(model: nn.Module) -> Iterator[Linear | Joined]:
    """Every matrix product the model computes: its Joineds, and the Linears that are in none."""
    for module in model.modules():
        if isinstance(module, Joined) or (isinstance(module, Linear) and not module.joined):
            yield module


def prepare(model: nn.Module) -> None:
    """Make it ready to decode with weights that will not change: products joined, constants computed once."""
    for module in list(model.modules()):
        if isinstance(module, Norm | MLP | GatedAttention | GatedDeltaNet):
            module.prepare()
