"""A student's checkpoint: one directory of weights and what they say of themselves, written whole, read with distrust.

Defines the format for writer and reader. Knows nothing of how a student is trained, and of no sequence's state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backend.drafters.recursive import RecursiveDrafter
from backend.interface import BackendError
from backend.models.fingerprint import combine, hash_ids, hash_tensor
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock, StudentConfig
from backend.whole_file import replace_whole

FORMAT_VERSION: Literal[1] = 1
MODEL_TYPE: Literal["studentsv"] = "studentsv"
WEIGHTS, HEADER = "model.safetensors", "config.json"
# What drafts by these names is no student; the API's address of an "active" one is that of whichever is the default.
RESERVED = ("mtp", "none", "hot_vocab", "prediction", "grammar", "active")
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_STORED = (torch.bfloat16, torch.float32)
_TRUNKS = ("hidden_size", "rotary_dim", "rope_theta", "rms_norm_eps")  # fields of the architecture it does not choose

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Target(BaseModel):
    """Fingerprints (law L4) of the model whose tokens the student was made to propose."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    weights: str
    tokenizer: str
    chat_template: str


class StudentHeader(BaseModel):
    """What config.json says. `name`: of the drafter, the directory's where there is none. `training`, `evaluation`:
    how it came about and what it is worth, as their makers say it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    model_type: Literal["studentsv"] = MODEL_TYPE
    format_version: Literal[1] = FORMAT_VERSION
    name: str | None = None
    architecture: StudentConfig
    d2t_kind: Literal["absolute"] = "absolute"  # full-vocabulary ids; others store differences to the row's number
    d2t_sha256: Sha256
    weights_sha256: Sha256
    target: Target
    training: dict[str, JsonValue] = {}
    evaluation: dict[str, JsonValue] = {}

    @classmethod
    def of(
        cls,
        block: StudentBlock,
        target: Target,
        name: str | None = None,
        training: dict[str, JsonValue] | None = None,
        evaluation: dict[str, JsonValue] | None = None,
    ) -> StudentHeader:
        """The header of a block as it is now, hashes and all."""
        return cls(
            name=name,
            architecture=block.config,
            d2t_sha256=hash_ids(block.d2t),
            weights_sha256=_weights_hash(_weights(block)),
            target=target,
            training=training or {},
            evaluation=evaluation or {},
        )

    @property
    def fingerprint(self) -> str:
        """sha256 over weights, ids and architecture: whatever makes a draft another one."""
        return combine(
            {
                "architecture": self.architecture.model_dump_json(),
                "d2t": self.d2t_sha256,
                "weights": self.weights_sha256,
            }
        )


class _Kind(BaseModel):
    model_type: str
    format_version: int


@dataclass(frozen=True, eq=False)
class Student:
    """A block on the model's device and in its dtype. `name` is what requests, promotions and metrics call it."""

    block: StudentBlock
    name: str
    header: StudentHeader

    @cached_property
    def fingerprint(self) -> str:
        return self.header.fingerprint


def student_drafter(model: Qwen35, student: Student) -> RecursiveDrafter:
    """Makes the block ready to decode with, after which it can be neither trained nor saved: give it a copy of one that
    is still to be."""
    prints, worth = student.fingerprint, student.header.evaluation
    return RecursiveDrafter(model, student.block, student.name, prints, prints, worth or None)


def check_name(name: str) -> str:
    """The name itself. Raises BackendError where no drafter of a file may have it."""
    if not re.fullmatch(_NAME, name):
        raise BackendError(f"{name!r} cannot be a drafter's name: up to 64 letters, digits, '.', '_' and '-' are")
    if name in RESERVED:
        raise BackendError(f"a student cannot be named {name!r}: that means another drafter")
    return name


def save_student(directory: Path, block: StudentBlock, header: StudentHeader) -> None:
    """Write weights as they are stored in the block (bfloat16 or float32), then config.json.

    Each file is whole or not there, and what a reader might find of two checkpoints at once does not fit by its hashes.
    Raises ValueError where the header is not this block's, BackendError where it cannot be written.
    """
    if (expected := StudentHeader.of(block, header.target)) != header.model_copy(
        update={"name": None, "training": {}, "evaluation": {}}
    ):
        changed = [name for name, value in expected if value != getattr(header, name)]
        raise ValueError(f"the header is of another block: {', '.join(changed)}")
    tensors = {**_weights(block), "d2t": block.d2t.detach().cpu().contiguous()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # One entry of metadata: several are written in an order that changes from run to run.
        replace_whole(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        text = header.model_dump_json(indent=2) + "\n"
        replace_whole(directory / HEADER, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise BackendError(f"cannot write the student {directory}: {_one_line(error)}") from error


def load_student(directory: Path, model: Qwen35, weights: str, tokenizer: str) -> Student:
    """Read a checkpoint for a model of these fingerprints (those of its weights and of its tokenizer).

    Raises BackendError in one line for whatever is not exactly as its header says, and for a header of another model.
    """
    header = read_header(directory)
    name = check_name(directory.resolve().name if header.name is None else header.name)
    _check_target(directory, header, model, weights, tokenizer)
    tensors = _read_tensors(directory / WEIGHTS)
    d2t = tensors.pop("d2t", None)
    if d2t is None:
        raise BackendError(f"the student {directory} has no tensor 'd2t'")
    _check_ids(directory, d2t, header, model.config.vocab_size)
    block = _empty_block(directory, header, model, d2t)
    like = model.model.embed_tokens.weight
    _check_weights(directory, tensors, block, header, like.dtype)
    block.load_state_dict(
        {name: tensor.to(like.device, like.dtype) for name, tensor in tensors.items()} | {"d2t": d2t.to(like.device)},
        assign=True,
    )
    return Student(block.requires_grad_(False).eval(), name, header)


def _empty_block(directory: Path, header: StudentHeader, model: Qwen35, d2t: Tensor) -> StudentBlock:
    """On the meta device. Raises BackendError for widths whose product is no number of bytes."""
    try:
        with torch.device("meta"):
            return StudentBlock(header.architecture, model.config, d2t)
    except (RuntimeError, TypeError) as error:
        raise BackendError(f"the student {directory} is too large for any machine, by its architecture") from error


def _weights(block: StudentBlock) -> dict[str, Tensor]:
    """Every parameter on the host. Raises ValueError for a block that was made ready to decode with."""
    if any(parameter.numel() == 0 for parameter in block.parameters()):
        raise ValueError("a block that was made ready to decode with has let its weights go")
    return {name: parameter.detach().cpu().contiguous() for name, parameter in block.named_parameters()}


def _weights_hash(tensors: dict[str, Tensor]) -> str:
    return combine({name: hash_tensor(tensor) for name, tensor in tensors.items()})


def read_header(directory: Path) -> StudentHeader:
    """What a checkpoint says of itself, its tensors unread. Raises BackendError in one line."""
    path = directory / HEADER
    try:
        if not path.is_file():  # a pipe would be waited for
            raise BackendError(f"no student at {directory}: there is no {HEADER} in it")
        text = path.read_bytes()
    except OSError as error:
        raise BackendError(f"cannot read {path}: {_one_line(error)}") from error
    try:
        kind = _Kind.model_validate_json(text)
        if kind.model_type != MODEL_TYPE:
            raise BackendError(f"{directory} is no student: its model_type is {kind.model_type!r}, not {MODEL_TYPE!r}")
        if kind.format_version != FORMAT_VERSION:
            raise BackendError(
                f"the student {directory} has format {kind.format_version}; this build reads {FORMAT_VERSION}"
            )
        return StudentHeader.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or HEADER
        raise BackendError(f"{path} is not a student's: {where}: {_one_line(first['msg'])}") from error


def _check_target(directory: Path, header: StudentHeader, model: Qwen35, weights: str, tokenizer: str) -> None:
    for what, theirs, ours in (
        ("weights", header.target.weights, weights),
        ("tokenizer", header.target.tokenizer, tokenizer),
    ):
        if theirs != ours:
            raise BackendError(
                f"the student {directory} was made for another model: its {what} are {theirs[:12]}, here {ours[:12]}"
            )
    for field in _TRUNKS:
        theirs, ours = getattr(header.architecture, field), getattr(model.config, field)
        if theirs != ours:
            raise BackendError(f"the student {directory} does not fit this model: {field} {theirs}, here {ours}")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Copies: the file's own pages would change under a server with whatever is written into it, or end its process."""
    try:
        if not path.is_file():
            raise BackendError(f"checkpoint file {path} is missing (only safetensors are read)")
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise BackendError(f"cannot read {path}: {_one_line(error)}") from error


def _check_ids(directory: Path, d2t: Tensor, header: StudentHeader, vocab_size: int) -> None:
    rows = header.architecture.hot_rows
    if d2t.dtype != torch.int32 or d2t.shape != (rows,):
        raise BackendError(f"d2t of the student {directory} is {_kind(d2t)}, not int32 [{rows}]")
    if hash_ids(d2t) != header.d2t_sha256:
        raise BackendError(f"d2t of the student {directory} is not the one that its {HEADER} names")
    if not bool((d2t[1:] > d2t[:-1]).all()):
        raise BackendError(f"d2t of the student {directory} is not strictly ascending")
    first, last = int(d2t[0]), int(d2t[-1])
    if first < 0 or last >= vocab_size:
        wrong = first if first < 0 else last
        raise BackendError(f"d2t of the student {directory} lists id {wrong}, the model has 0 to {vocab_size - 1}")


def _check_weights(
    directory: Path, tensors: dict[str, Tensor], block: StudentBlock, header: StudentHeader, dtype: torch.dtype
) -> None:
    """`dtype`: what they are served in, which holds less than the file may."""
    wanted = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise BackendError(f"the student {directory} has no tensor {missing[0]!r}")
    if unexpected := sorted(tensors.keys() - wanted.keys()):
        raise BackendError(f"the student {directory} has a tensor {unexpected[0]!r} that its architecture has not")
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED or tuple(tensor.shape) != wanted[name]:
            raise BackendError(
                f"tensor {name!r} of the student {directory} is {_kind(tensor)}, "
                f"not bfloat16 or float32 {list(wanted[name])}"
            )
    if _weights_hash(tensors) != header.weights_sha256:
        raise BackendError(f"the weights of the student {directory} are not those that its {HEADER} names")
    for name, tensor in tensors.items():
        if not bool(tensor.to(dtype).isfinite().all()):
            raise BackendError(f"tensor {name!r} of the student {directory} holds values that are not finite")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
