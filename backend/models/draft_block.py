"""What a recursive drafter runs: one attention layer over [embedding ; hidden state], a head, and what it carries on.

The recursion contract of server, training and evaluation alike. Row p pairs the embedding of x_p with a hidden state
one position earlier, at position p, and predicts x_{p+1}; rows start at 1. The hidden state of slot 0 is the trunk's
own, after its final norm; that of slot j + 1 is what slot j carried. Knows no cache: see `models/forms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from backend.models.forms import Form
from backend.models.layers import Linear, weights_of
from backend.models.qwen3_5 import Qwen35


class DraftBlock(Protocol):
    """H is the trunk's hidden size, w the block's own width of an output row."""

    heads: int  # of its attention layer: queries, keys and values, and their width
    kv_heads: int
    head_dim: int

    @property
    def ids(self) -> Tensor | None:
        """Which full-vocabulary id each logit is of, integers [S], ascending; None: all of them in order."""

    @property
    def own(self) -> Sequence[nn.Module]:
        """Modules that are not the trunk's: to be made ready to decode with."""

    @property
    def parameters_read(self) -> int:
        """Weights that one draft step reads, but for the one row of the trunk's embedding."""

    def __call__(self, embedded: Tensor, hidden: Tensor, form: Form) -> Tensor:
        """embedded, hidden [B, T, H] → output rows [B, T, w]."""

    def readout(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Output rows [..., w] → what `logits` reads, [..., w'], and the next slot's hidden states [..., H]."""

    def logits(self, rows: Tensor) -> Tensor:
        """[..., w'] → float32 [..., S]."""


class NativeBlock:
    """The checkpoint's own MTP block with the trunk's output head, or with those rows of it that `ids` names.

    Post-norm rows are scored and carried (QWEN35: vLLM, SGLang). Raises ValueError for a model without the block.
    """

    def __init__(self, model: Qwen35, ids: Tensor | None = None) -> None:
        if model.mtp is None:
            raise ValueError("the model was loaded without its MTP block")
        config = model.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.ids = ids
        self._model, self._mtp = model, model.mtp
        self.rows: Linear | None = None
        if ids is not None:
            self.rows = Linear(config.hidden_size, len(ids))
            weight = model.lm_head.weight
            cut = weight.detach().index_select(0, ids.to(weight.device, torch.int64))
            self.rows.weight = nn.Parameter(cut, requires_grad=False)

    @property
    def own(self) -> list[nn.Module]:
        return [] if self.rows is None else [self.rows]

    @property
    def parameters_read(self) -> int:
        return weights_of(self._mtp) + weights_of(self._model.lm_head if self.rows is None else self.rows)

    def __call__(self, embedded: Tensor, hidden: Tensor, form: Form) -> Tensor:
        out: Tensor = self._mtp(embedded, hidden, form)
        return out

    def readout(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, rows

    def logits(self, rows: Tensor) -> Tensor:
        if self.rows is None:
            return self._model.logits(rows)
        out: Tensor = self.rows(rows)
        return out.float()
