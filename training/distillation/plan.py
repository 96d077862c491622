"""What a run of distillation will take, told before it begins: sizes, steps, memory. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.models.qwen3_5 import Qwen35
from training.distillation.batches import epoch
from training.distillation.options import DistillOptions
from training.distillation.world import World

_FLOAT = 4
_MASTERS = 6  # float32 copies of each parameter: weights, gradients, two moments, mean, best
_KEPT = 5  # of them in a state: all but the gradients
_CHECKPOINT = 2  # bytes of a parameter


@dataclass(frozen=True)
class Plan:
    """`reads` of `native_reads`: weights read per draft step. Bytes are of one process."""

    parameters: int
    native_reads: int
    documents: int
    held_out: int
    left_out: int
    tokens: int
    anchors: int
    steps: int
    epochs: float
    state_bytes: int
    disk_bytes: int
    frozen_bytes: int
    step_bytes: int
    processes: int

    def rows(self) -> list[tuple[str, str]]:
        """Figures with their names, to be shown."""
        return [
            (
                "weights read per draft step",
                f"{self.parameters:,} ({self.parameters / self.native_reads:.3f} of native)",
            ),
            ("documents to learn from, held out", f"{self.documents:,}, {self.held_out:,}"),
            ("documents that repeat themselves, left out", f"{self.left_out:,}"),
            ("tokens, anchors", f"{self.tokens:,}, {self.anchors:,}"),
            ("steps, passes over the data", f"{self.steps:,}, {self.epochs:.1f}"),
            ("processes", str(self.processes)),
            ("memory: weights, gradients, moments, means", _megabytes(self.state_bytes)),
            ("memory: what stays as it is", _megabytes(self.frozen_bytes)),
            ("memory: one step, about", _megabytes(self.step_bytes)),
            ("disk, at the most", _megabytes(self.disk_bytes)),
        ]


def plan_of(
    options: DistillOptions,
    sizes: Mapping[str, int],
    model: Qwen35,
    lengths: Sequence[int],
    anchors: int,
    documents: int,
    held_out: int,
    left_out: int,
    world: World,
) -> Plan:
    """Of settled options, the sizes of the parameters that learn, and the windows' lengths."""
    assert options.tokens_per_step is not None
    config, own = model.config, sum(sizes.values())
    block = 0 if model.mtp is None else sum(parameter.numel() for parameter in model.mtp.parameters())
    head = config.vocab_size * config.hidden_size
    reads = own + (head if options.target == "mtp" else 0)
    batches = epoch(lengths, options.tokens_per_step, options.seed, 0)
    total = options.schedule().total
    frozen = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    tokens = max(options.tokens_per_step // world.size, max(lengths))
    rows = sizes.get("head.weight", head) // config.hidden_size
    # By slot: about 24 activations of the trunk's width a token, and the past's scores of every head.
    activations = (
        options.slots * tokens * _FLOAT * (24 * config.hidden_size + config.num_attention_heads * options.window)
    )
    logits = 5 * min(options.chunk, tokens) * rows * _FLOAT
    return Plan(
        parameters=reads,
        native_reads=block + head,
        documents=documents,
        held_out=held_out,
        left_out=left_out,
        tokens=sum(lengths),
        anchors=anchors,
        steps=total,
        epochs=total / len(batches),
        state_bytes=_MASTERS * _FLOAT * own,
        disk_bytes=disk_bytes(own),
        frozen_bytes=frozen,
        step_bytes=activations + logits,
        processes=world.size,
    )


def disk_bytes(parameters: int) -> int:
    """Of a run at the most: two checkpoints, the best and the last, and while a state is written the one before it."""
    return parameters * (2 * _CHECKPOINT + 2 * _KEPT * _FLOAT)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
