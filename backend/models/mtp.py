"""Qwen3.5's multi-token-prediction block: one gated-attention layer over [embedding ; hidden state].

Row p pairs the embedding of x_p with H_{p-1}, the trunk's post-final-norm hidden state one position earlier, and
predicts x_{p+1} through the trunk's own output head. Recursive slots feed the block's output (after `norm`) back in.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backend.models.config import ModelConfig
from backend.models.forms import Form
from backend.models.layers import DecoderLayer, Linear, Norm
from backend.ops.rope import rotary_tables


class MTPBlock(nn.Module):
    """Parameters named as the checkpoint's `mtp.*`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rotary_dim, self.theta = config.rotary_dim, config.rope_theta
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.pre_fc_norm_embedding = Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(config, 0, "full_attention")])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, form: Form) -> Tensor:
        """embedded, hidden [B, T, hidden_size] → [B, T, hidden_size] after `norm`; the embedding half goes first."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1))
        x = self.layers[0](x, form, rotary_tables(form.positions, self.rotary_dim, self.theta))
        out: Tensor = self.norm(x)
        return out
