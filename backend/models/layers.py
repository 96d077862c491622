"""The layers of Qwen3.5: linear, norm, SwiGLU, gated attention, gated DeltaNet. Parameters are named as Hugging Face's.

Formulas: transformers' `models/qwen3_5`, arXiv 2412.06464 (gated DeltaNet). Knows no cache: see forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.models.config import ModelConfig
from backend.models.forms import Form
from backend.ops.elementwise import exp, sigmoid, silu, softplus
from backend.ops.linear import RowTile, can_pack, linear, pack
from backend.ops.norm import gated_rms_norm, l2_norm, rms_norm
from backend.ops.rope import Rotary, rotate

VECTOR = 32  # elements of a float32 vector loop: see `ops/elementwise`


class Linear(nn.Module):
    """weight [out, in], no bias. `tile` is what makes its rows invariant; the engine's probe sets it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.inputs, self.outputs = inputs, outputs
        self.tile = RowTile()
        self.packed: Tensor | None = None
        self.joined = False  # part of a Joined, which computes in its place

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.packed, self.tile)

    def pack(self, keep: bool) -> None:
        """Compute by a packed copy from now on; without `keep` the weight itself is let go."""
        if can_pack(self.weight):
            self.packed = pack(self.weight.detach())
            if not keep:
                self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


def _product(x: Tensor, weight: Tensor, packed: Tensor | None, tile: RowTile) -> Tensor:
    return linear(x, weight, tile) if packed is None else linear(x, packed, tile, packed=True)


class Joined(nn.Module):
    """Linears of one input as one product, for decoding. Their own weights are views of its, or gone once it is packed.

    Each part's outputs are padded to a multiple of `align`, by rows of zeros that `forward` cuts off where it is not
    asked for them.
    """

    def __init__(self, *linears: Linear, align: int = 1) -> None:
        super().__init__()
        self.sizes = [one.outputs + -one.outputs % align for one in linears]
        parts = [
            F.pad(one.weight.detach(), (0, 0, 0, size - one.outputs))
            for one, size in zip(linears, self.sizes, strict=True)
        ]
        weight = torch.cat(parts)
        self.inputs, self.outputs = linears[0].inputs, len(weight)
        self.tile = RowTile()
        self.packed = pack(weight) if can_pack(weight) else None
        self.weight: Tensor
        self.register_buffer("weight", weight if self.packed is None else weight[:0].clone(), persistent=False)
        for one, part in zip(linears, weight.split(self.sizes), strict=True):
            kept = part[: one.outputs] if self.packed is None else part[:0].clone()
            one.weight, one.joined = nn.Parameter(kept, requires_grad=False), True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = _product(x, self.weight, self.packed, self.tile)
        parts: tuple[Tensor, ...] = out.split(self.sizes, dim=-1)
        return parts


class Norm(nn.Module):
    """Zero-centred RMSNorm over the last dimension: Qwen3.5 stores its scale less one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps
        self.constant: Tensor | None = None  # the scale, where the weight will not change any more

    @property
    def scale(self) -> Tensor:
        """float32 [size]."""
        return 1.0 + self.weight.float() if self.constant is None else self.constant

    def prepare(self) -> None:
        self.constant = self.scale.detach()

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)


class GatedNorm(nn.Module):
    """Plain-weight RMSNorm gated by SiLU, the DeltaNet's output norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def prepare(self) -> None:
        self.weight = nn.Parameter(self.weight.detach().float(), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight.float(), self.eps)


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
        # One norm and one rotation for both: queries first, then keys.
        scale = torch.cat((self.q_norm.scale.expand(self.heads, -1), self.k_norm.scale.expand(self.kv_heads, -1)))
        qk = rotate(rms_norm(torch.cat((q, k), dim=2), scale, self.q_norm.eps), *rotary)
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
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
        self.split = (2 * keys, values)
        self.conv1d = Convolution(2 * keys + values, config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.ones(self.v_heads))
        self.A_log = nn.Parameter(torch.zeros(self.v_heads))
        self.norm = GatedNorm(self.v_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size)
        self.joined: Joined | None = None
        self.decay: tuple[Tensor, Tensor] | None = None  # -e^A_log and dt_bias, where they will not change any more

    def prepare(self) -> None:
        # The narrow parts padded to whole vectors: their exponentials then need no padding of their own.
        self.joined = Joined(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, align=VECTOR)
        width = self.joined.sizes[-1] - self.v_heads
        self.decay = F.pad(self._rate(), (0, width)), F.pad(self.dt_bias.detach().float(), (0, width))

    def _rate(self) -> Tensor:
        return -exp(self.A_log.float())

    def forward(self, x: Tensor, form: Form, rotary: Rotary) -> Tensor:
        B, T, _ = x.shape
        if self.joined and self.decay:
            columns, z, b, a = self.joined(x)
            columns, z = columns[..., : sum(self.split)], z[..., : self.split[1]]
            rate, bias = self.decay
        else:
            columns, z, b, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
            rate, bias = self._rate(), self.dt_bias.float()
        beta = sigmoid(b.float())[..., : self.v_heads]  # [B, T, v_heads]
        g = (rate * softplus(a.float() + bias))[..., : self.v_heads]
        mixed = form.convolve(self.layer, columns, self.conv1d.taps)  # [B, T, 2·keys + values]
        qk, v = mixed.split(self.split, dim=-1)
        qk = l2_norm(qk.view(B, T, 2 * self.k_heads, self.k_dim))
        ratio = self.v_heads // self.k_heads
        if ratio > 1:  # value head h uses key head h // ratio
            qk = qk[:, :, :, None].expand(-1, -1, -1, ratio, -1).reshape(B, T, 2 * self.v_heads, self.k_dim)
        q, k = qk.chunk(2, dim=2)
        v = v.reshape(B, T, self.v_heads, self.v_dim).float()
        o = form.delta_rule(self.layer, q * self.k_dim**-0.5, k, v, g, beta)  # [B, T, v_heads, v_dim] float32
        out: Tensor = self.out_proj(self.norm(o, z.reshape(B, T, self.v_heads, self.v_dim)).reshape(B, T, -1))
        return out


class Convolution(nn.Module):
    """Holds the depthwise weight [channels, 1, width]; forms apply it, because they own its history."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.constant: Tensor | None = None

    @property
    def taps(self) -> Tensor:
        """float32 [width, channels]."""
        return self.weight.float().squeeze(1).t() if self.constant is None else self.constant

    def prepare(self) -> None:
        self.constant = self.taps.detach().contiguous()


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


def weights_of(module: nn.Module) -> int:
    """How many it computes with, also after `prepare` has let their plain form go."""
    count = 0
    for one in module.modules():
        own = one.parameters(recurse=False)
        count += one.inputs * one.outputs if isinstance(one, Linear) else sum(parameter.numel() for parameter in own)
    return count


@torch.no_grad()
def prepare(model: nn.Module, keep: Sequence[Linear] = ()) -> None:
    """Make it ready to decode with weights that will not change: products joined and packed, constants computed once.

    Of packed products only `keep` still have a plain weight afterwards.
    """
    modules = list(model.modules())
    if any(isinstance(module, Joined) for module in modules):
        return
    for module in modules:
        if isinstance(module, Norm | GatedNorm | Convolution | MLP | GatedAttention | GatedDeltaNet):
            module.prepare()
    for module in modules:
        if isinstance(module, Linear) and not module.joined and module.packed is None:
            module.pack(keep=any(module is one for one in keep))
