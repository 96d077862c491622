"""What a student is taught towards: the trunk's own distribution and, in a share, that of the native head's chain.

Both on the hot vocabulary S and computed on the fly from the stored hidden states. Knows no student.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.models.draft_block import NativeBlock
from backend.models.qwen3_5 import Qwen35
from training.distillation.batches import Batch
from training.recursion import recursive_outputs


class Teacher:
    """`ids` int64 [S]; slot j of base p is taught the trunk's distribution at p + j, that of x_{p+1+j}."""

    def __init__(self, model: Qwen35, ids: Tensor) -> None:
        self._model = model
        weight = model.lm_head.weight
        everything = len(ids) == len(weight)
        self.weight = weight if everything else weight.index_select(0, ids.to(weight.device))  # [S, H]
        self._everything = everything

    @torch.no_grad()
    def chain(self, batch: Batch, slots: int) -> list[Tensor]:
        """The native head's rows by slot, [B, L - 1, H], to be given to `target`."""
        block = NativeBlock(self._model)
        return list(recursive_outputs(block, self._model.embed, batch.tokens, batch.hidden, slots))

    @torch.no_grad()
    def target(self, trunk: Tensor, log_z: Tensor | None, native: Tensor | None, alpha: float) -> Tensor:
        """t(S) · (α t(x | S) + (1 - α) m(x | S)), float32 [n, S].

        trunk, native [n, H]: hidden states of the trunk and the native head's rows (None: α is 1). log_z float32 [n]:
        of the trunk's logits over the whole vocabulary, computed here where it is not given. What the trunk puts
        outside S no student can propose, so such a row weighs less and is not dropped.
        """
        logits = F.linear(trunk, self.weight).float()  # [n, S]
        if self._everything:
            mass = logits.new_ones(len(logits))
        else:
            whole = self._model.logits(trunk).logsumexp(-1) if log_z is None else log_z
            mass = (logits.logsumexp(-1) - whole).exp().clamp(max=1.0)
        mixed = logits.softmax(-1)
        if native is not None and alpha < 1:
            mixed = alpha * mixed + (1 - alpha) * F.linear(native, self.weight).float().softmax(-1)
        return mixed * mass[:, None]
