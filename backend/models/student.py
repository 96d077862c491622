"""StudentSV: a draft block narrower than the trunk, with an output head of its own over a hot vocabulary.

The MTP block's recursion (see `draft_block`) at an inner width; `out_up` brings its rows back to the trunk's, where the
next slot reads them. Shapes and arithmetic: the StudentSV of bw24 (commit f1395e90), whose sizes `presets` reproduces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from backend.models.config import ModelConfig
from backend.models.forms import Form
from backend.models.layers import DecoderLayer, Linear, Norm, weights_of
from backend.ops.rope import rotary_tables

PRESETS = ("sv", "sv-slim")


class StudentConfig(BaseModel):
    """All widths of a student, and the two conventions it may follow.

    `head`: what its output head reads, rows at the trunk's width (`outer`: W_S norm(out_up(h))) or at its own (`inner`:
    W_S inner_norm(h), with out_up for the carrier alone). `carrier`: whether the next slot gets out_up(h) after the
    norm or before it. `hidden_size`, rotary and eps are the trunk's.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    hidden_size: PositiveInt
    d_inner: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rotary_dim: PositiveInt
    rope_theta: PositiveFloat
    rms_norm_eps: PositiveFloat
    hot_rows: PositiveInt
    head: Literal["outer", "inner"] = "outer"
    carrier: Literal["post_norm", "pre_norm"] = "post_norm"

    @model_validator(mode="after")
    def _fits(self) -> StudentConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_key_value_heads} key heads do not divide {self.num_attention_heads} heads")
        if self.d_inner > self.hidden_size:
            raise ValueError(f"d_inner {self.d_inner} is wider than the trunk's {self.hidden_size}")
        if self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"a head of {self.head_dim} has no {self.rotary_dim} dimensions to rotate in pairs")
        return self

    @classmethod
    def preset(cls, name: str, target: ModelConfig, hot_rows: int) -> StudentConfig:
        """`sv` or `sv-slim`: half of every width of the target's own block. Raises ValueError for another name."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: expected {' or '.join(PRESETS)}")
        kv_heads = max(target.num_key_value_heads // 2, 1)
        return cls(
            hidden_size=target.hidden_size,
            d_inner=target.hidden_size // 2,
            intermediate_size=target.intermediate_size // 2,
            num_attention_heads=max(target.num_attention_heads // 2, kv_heads),
            num_key_value_heads=kv_heads,
            head_dim=target.head_dim,
            rotary_dim=target.rotary_dim,
            rope_theta=target.rope_theta,
            rms_norm_eps=target.rms_norm_eps,
            hot_rows=hot_rows,
            head="outer" if name == "sv" else "inner",
        )

    @classmethod
    def like_native(cls, target: ModelConfig, hot_rows: int) -> StudentConfig:
        """The target's own block, width for width: with its weights and all rows it is the native MTP head."""
        return cls(
            hidden_size=target.hidden_size,
            d_inner=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            rotary_dim=target.rotary_dim,
            rope_theta=target.rope_theta,
            rms_norm_eps=target.rms_norm_eps,
            hot_rows=hot_rows,
        )


class StudentBlock(nn.Module):
    """A `DraftBlock` with parameters named as the checkpoint's `mtp.*` where it has the same part.

    `d2t` int32 [S], ascending: the full-vocabulary id of each row of `head`. Embeddings are the trunk's, never its own.
    """

    def __init__(self, config: StudentConfig, target: ModelConfig, d2t: Tensor) -> None:
        """`target` gives what the attention layer asks of a model's config and a student does not decide."""
        super().__init__()
        if len(d2t) != config.hot_rows:
            raise ValueError(f"{len(d2t)} ids for {config.hot_rows} rows of the head")
        inner = replace(
            target,
            hidden_size=config.d_inner,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
        )
        H, d, eps = config.hidden_size, config.d_inner, config.rms_norm_eps
        self.config = config
        self.heads, self.kv_heads, self.head_dim = inner.num_attention_heads, inner.num_key_value_heads, inner.head_dim
        self.pre_fc_norm_embedding = Norm(H, eps)
        self.pre_fc_norm_hidden = Norm(H, eps)
        self.fc = Linear(2 * H, d)
        self.layers = nn.ModuleList([DecoderLayer(inner, 0, "full_attention")])
        self.out_up = Linear(d, H) if d != H else None
        self.norm = Norm(H, eps)
        self.inner_norm = Norm(d, eps) if config.head == "inner" else None
        self.head = Linear(H if config.head == "outer" else d, config.hot_rows)
        self.d2t: Tensor
        self.register_buffer("d2t", d2t.to(torch.int32))

    @property
    def ids(self) -> Tensor:
        return self.d2t

    @property
    def own(self) -> list[nn.Module]:
        return [self]

    def forward(self, embedded: Tensor, hidden: Tensor, form: Form) -> Tensor:
        """embedded, hidden [B, T, H] → [B, T, d_inner], the layer's residual stream."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1))
        rotary = rotary_tables(form.positions, self.config.rotary_dim, self.config.rope_theta)
        out: Tensor = self.layers[0](x, form, rotary)
        return out

    def readout(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        up: Tensor = rows if self.out_up is None else self.out_up(rows)
        normed: Tensor = self.norm(up)
        carried = normed if self.config.carrier == "post_norm" else up
        return (normed if self.inner_norm is None else self.inner_norm(rows)), carried

    def logits(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(rows)
        return out.float()

    @property
    def parameters_read(self) -> int:
        """Weights read per draft step: all of them (the embedding's one row left out, as for the native head)."""
        return weights_of(self)
