"""The Qwen3.5 text trunk with its optional MTP block. Written once for training, prefill and verify: see forms.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.models.config import ModelConfig
from backend.models.forms import Form
from backend.models.layers import DecoderLayer, Linear, Norm
from backend.models.mtp import MTPBlock
from backend.ops.rope import rotary_tables


class Embedding(nn.Module):
    """weight [vocab, hidden]; tied models use it as the output head too."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Trunk(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, i, kind) for i, kind in enumerate(config.layer_types)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Qwen35(nn.Module):
    """Causal language model; `mtp` is None when the checkpoint ships none or no drafter needs it."""

    def __init__(self, config: ModelConfig, with_mtp: bool = True) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.mtp = MTPBlock(config) if with_mtp else None

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] → [B, T, hidden]."""
        out: Tensor = self.model.embed_tokens(tokens)
        return out

    def forward(self, tokens: Tensor, form: Form) -> Tensor:
        """tokens int64 [B, T] → hidden states after the final norm, [B, T, hidden] in the model's dtype."""
        x = self.embed(tokens)
        rotary = rotary_tables(form.positions, self.config.rotary_dim, self.config.rope_theta)
        for layer in self.model.layers:
            x = layer(x, form, rotary)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] → logits float32 [..., vocab]."""
        out: Tensor = self.lm_head(hidden)
        return out.float()

    @torch.no_grad()
    def initialise(self, std: float = 0.02, seed: int = 0) -> None:
        """Random weights for training from scratch: matrices N(0, std), norms at identity, decay spread over heads."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std if "conv1d" not in name else 0.3, generator=generator)
            elif name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(1.0, 16.0, generator=generator).log())
            elif name.endswith("dt_bias"):
                # softplus(dt_bias) log-uniform in 1e-3 … 1e-1, as Mamba-2 initialises its time steps
                dt = torch.empty_like(parameter).uniform_(-6.9, -2.3, generator=generator).exp()
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
