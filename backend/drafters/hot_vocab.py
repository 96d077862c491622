"""A hot vocabulary: the token ids a drafter's head is cut to, as one safetensors file says, and the cut itself.

Defines the file's format for writer and reader; knows nothing of how ids are chosen and of no drafter's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from backend.drafters.recursive import RecursiveDrafter
from backend.interface import BackendError
from backend.models.draft_block import NativeBlock
from backend.models.fingerprint import hash_ids
from backend.models.qwen3_5 import Qwen35
from backend.whole_file import replace_whole

FORMAT_VERSION: Literal[1] = 1
# One entry, because safetensors writes several in an order that changes from run to run.
_METADATA = "draftloop_hot_vocab"


class Coverage(BaseModel):
    """How many of the own tokens of a split stand in the list."""

    model_config = ConfigDict(frozen=True, strict=True)
    covered: NonNegativeInt
    tokens: NonNegativeInt

    @property
    def share(self) -> float | None:
        """None where the split holds no token."""
        return self.covered / self.tokens if self.tokens else None


class Reach(BaseModel):
    """How far the list carries a drafter that is always right, over the held-out documents of one kind.

    `own`: own tokens in the list. `runs[j]`: of the anchors (own positions) with j + 1 own tokens after them, those
    whose next j + 1 tokens all are in the list: what no drafter's surv_j can pass.
    """

    model_config = ConfigDict(frozen=True, strict=True)
    kind: str
    documents: NonNegativeInt
    own: Coverage
    runs: list[Coverage]

    @property
    def chain_cap(self) -> float | None:
        """Mean of the runs' shares, what no drafter's chain can pass; None where a run has no anchor."""
        shares = [run.share for run in self.runs]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None


class Header(BaseModel):
    """What a file says about itself. `sources`: the fingerprints of each kind of shard counted (law L4), as the
    exported shards name them: weights, tokenizer, chat_template, drafters, builds. Files of before there were spare
    ids, reach or growth lack what has a default here, and load all the same."""

    model_config = ConfigDict(frozen=True, strict=True)
    format_version: Literal[1] = FORMAT_VERSION
    tokenizer: str  # sha256, as ChatTokenizer.fingerprint
    train: Coverage
    held_out: Coverage
    sources: list[dict[str, Any]]
    reach: list[Reach] = []  # of all held-out documents first, then of each kind
    kinds: str | None = None  # what tells the kinds apart
    spare: list[int] = []  # ids of the list, ascending, that growth replaces first
    parent: str | None = None  # fingerprint of the list that this one grew from
    generation: NonNegativeInt = 0  # how many times it grew


class _Version(BaseModel):
    format_version: int


@dataclass(frozen=True, eq=False)
class HotVocab:
    """`d2t` int32 [S]: full-vocabulary ids, strictly ascending. `counts` int64 [S]: each in the train split."""

    d2t: Tensor
    counts: Tensor
    header: Header

    @property
    def size(self) -> int:
        return len(self.d2t)

    @cached_property
    def fingerprint(self) -> str:
        return hash_ids(self.d2t)

    @classmethod
    def load(cls, path: Path, tokenizer_fingerprint: str, vocab_size: int) -> HotVocab:
        """Read a file for a model of `vocab_size` output rows, whose tokenizer has this fingerprint.

        Raises BackendError in one line where the file is missing, damaged, of an unknown version or of another
        tokenizer, or where its ids are not ascending ids of the model.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in ("d2t", "counts") if name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise BackendError(f"no hot vocabulary at {path}: `training hot-vocab` writes one") from None
        except (SafetensorError, OSError) as error:
            raise BackendError(f"cannot read the hot vocabulary {path}: {_one_line(error)}") from error
        hot = cls(
            header=_header(path, metadata),
            d2t=_checked(path, tensors, "d2t", torch.int32),
            counts=_checked(path, tensors, "counts", torch.int64),
        )
        ids = hot.d2t
        if hot.header.tokenizer != tokenizer_fingerprint:
            raise BackendError(
                f"the hot vocabulary {path} is of another tokenizer ({hot.header.tokenizer[:12]}) "
                f"than the model ({tokenizer_fingerprint[:12]})"
            )
        if len(ids) == 0 or len(ids) != len(hot.counts):
            raise BackendError(f"the hot vocabulary {path} has {len(ids)} ids and {len(hot.counts)} counts")
        if not bool((ids[1:] > ids[:-1]).all()):
            raise BackendError(f"the ids of the hot vocabulary {path} are not strictly ascending")
        if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise BackendError(f"the hot vocabulary {path} lists id {wrong}, the model has 0 to {vocab_size - 1}")
        spare = hot.header.spare
        if spare != sorted(set(spare)) or not set(spare) <= set(ids.tolist()):
            raise BackendError(f"the spare ids of the hot vocabulary {path} are not ascending ids of its list")
        return hot

    def save(self, path: Path) -> None:
        """Write the file whole or not at all; equal contents give equal bytes. Raises BackendError."""
        tensors = {"d2t": self.d2t.cpu().contiguous(), "counts": self.counts.cpu().contiguous()}
        content = save(tensors, metadata={_METADATA: self.header.model_dump_json()})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_whole(path, lambda temporary: temporary.write_bytes(content))
        except OSError as error:
            raise BackendError(f"cannot write the hot vocabulary {path}: {error.strerror or error}") from error


def hot_vocab_drafter(model: Qwen35, fingerprint: str, hot: HotVocab) -> RecursiveDrafter:
    """The checkpoint's MTP block, of that fingerprint, with the listed rows of the trunk's head."""
    block = NativeBlock(model, hot.d2t)
    return RecursiveDrafter(model, block, "hot_vocab", f"{fingerprint}+{hot.fingerprint}", fingerprint)


def _header(path: Path, metadata: dict[str, str]) -> Header:
    if _METADATA not in metadata:
        raise BackendError(f"{path} is not a hot vocabulary: it does not say {_METADATA}")
    text = metadata[_METADATA]
    try:
        version = _Version.model_validate_json(text).format_version
        if version != FORMAT_VERSION:
            raise BackendError(f"the hot vocabulary {path} has format {version}; this build reads {FORMAT_VERSION}")
        return Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or _METADATA
        raise BackendError(f"the header of the hot vocabulary {path} is damaged: {where}: {first['msg']}") from error


def _checked(path: Path, tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if name not in tensors:
        raise BackendError(f"the hot vocabulary {path} has no tensor {name!r}")
    tensor = tensors[name]
    if tensor.dtype != dtype or tensor.dim() != 1:
        found, wanted = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
        raise BackendError(f"{name} of the hot vocabulary {path} is {found} {list(tensor.shape)}, not {wanted} [S]")
    return tensor


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
