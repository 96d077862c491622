"""Draft blocks that learn: students, and the native MTP block itself, in a copy under the trunk's frozen head."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save
from torch import Tensor, nn

from backend.models.draft_block import DraftBlock
from backend.models.forms import Form
from backend.models.mtp import MTPBlock
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock
from capture.export_folder import put_down
from training.errors import TrainingError


class TrainableBlock(DraftBlock, Protocol):
    """A draft block with float32 weights of its own."""

    @property
    def head_weight(self) -> Tensor:
        """[S, w'], frozen where it is not the block's."""

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its own parameters, in a fixed order."""


class LearningStudent:
    """A student as it is."""

    def __init__(self, student: StudentBlock) -> None:
        self.student = student.requires_grad_(True)
        self.heads, self.kv_heads, self.head_dim = student.heads, student.kv_heads, student.head_dim
        self.ids = student.ids
        self.own = student.own

    @property
    def parameters_read(self) -> int:
        return self.student.parameters_read

    @property
    def head_weight(self) -> Tensor:
        return self.student.head.weight

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.student.named_parameters()

    def __call__(self, embedded: Tensor, hidden: Tensor, form: Form) -> Tensor:
        out: Tensor = self.student(embedded, hidden, form)
        return out

    def readout(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.student.readout(rows)

    def logits(self, rows: Tensor) -> Tensor:
        return self.student.logits(rows)


class LearningNative:
    """A copy of the model's MTP block, which stays as it is. Raises TrainingError for a model without one."""

    ids = None

    def __init__(self, model: Qwen35) -> None:
        if model.mtp is None:
            raise TrainingError("the model has no MTP block to train")
        config = model.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.mtp: MTPBlock = copy.deepcopy(model.mtp).float().requires_grad_(True)
        self._model = model

    @property
    def own(self) -> list[nn.Module]:
        return [self.mtp]

    @property
    def parameters_read(self) -> int:
        return sum(parameter.numel() for parameter in self.mtp.parameters()) + self._model.lm_head.weight.numel()

    @property
    def head_weight(self) -> Tensor:
        return self._model.lm_head.weight

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.mtp.named_parameters()

    def __call__(self, embedded: Tensor, hidden: Tensor, form: Form) -> Tensor:
        out: Tensor = self.mtp(embedded, hidden, form)
        return out

    def readout(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, rows

    def logits(self, rows: Tensor) -> Tensor:
        return self._model.logits(rows)


def save_native(path: Path, mtp: MTPBlock, dtype: torch.dtype) -> None:
    """The block as a checkpoint has it: safetensors of `mtp.*`, which vLLM, SGLang and this project load."""
    tensors = {f"mtp.{name}": value.detach().to("cpu", dtype).contiguous() for name, value in mtp.named_parameters()}
    put_down(path, lambda file: file.write(save(tensors, metadata={"format": "pt"})))
