"""From a checkpoint directory of safetensors to a model on its device, fingerprinted as it streams (law L4).

Reads text-only and multimodal Qwen3.5 checkpoints, one file or sharded. Never fills a tensor it did not find.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from backend.interface import BackendError
from backend.models.config import ModelConfig
from backend.models.fingerprint import HashCache, TensorHash, combine, hash_tensor
from backend.models.qwen3_5 import Qwen35

_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
_VISION = ("model.visual.", "visual.", "model.vision_tower.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The recurrence computes with these in float32; casting them down would only lose bits.
_KEPT_FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


class _Index(BaseModel):
    """model.safetensors.index.json: tensor name → file name."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class LoadedModel:
    """`weights` fingerprints the trunk, `drafter` the `mtp.*` tensors ("none" where they were not loaded)."""

    model: Qwen35
    config: ModelConfig
    weights: str
    drafter: str


def load_model(directory: Path, device: torch.device, dtype: torch.dtype, *, with_mtp: bool) -> LoadedModel:
    """Load `directory` onto `device` in `dtype` (bfloat16 or float32), one tensor at a time.

    Raises BackendError naming the file or tensor that is missing, misshapen, unexpected or quantised.
    """
    config = ModelConfig.from_directory(directory)
    files = _weight_files(directory)
    with torch.device("meta"):
        model = Qwen35(config, with_mtp=with_mtp)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    hashes: dict[str, TensorHash] = {}
    cache = HashCache.open()
    for file in files:
        key = cache.key(file)
        known = cache.get(key)
        fresh: dict[str, TensorHash] = {}
        for raw_name, tensor in _tensors(file):
            name = _canonical(raw_name)
            if name is None:
                continue
            if name in hashes:
                raise BackendError(f"tensor {name!r} stands twice in {directory}")
            hashes[name] = fresh[raw_name] = known.get(raw_name) or hash_tensor(tensor)
            if name in wanted:
                _assign(model, name, _checked(name, tensor, wanted[name]), device, dtype)
            elif name == "lm_head.weight" and config.tie_word_embeddings:
                _checked(name, tensor, wanted["model.embed_tokens.weight"])
            elif not name.startswith("mtp."):
                raise BackendError(f"unexpected tensor {raw_name!r} in {file.name}: no part of an unquantised Qwen3.5")
            elif with_mtp:
                raise BackendError(f"unexpected tensor {raw_name!r} in {file.name}: one MTP layer is supported")
        cache.put(key, fresh)
    cache.save()
    _check_complete(wanted, hashes, config, with_mtp)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.requires_grad_(False).eval()
    trunk = {name: h for name, h in hashes.items() if not name.startswith("mtp.")}
    mtp = {name: h for name, h in hashes.items() if name.startswith("mtp.")}
    return LoadedModel(model, config, combine(trunk), combine(mtp) if with_mtp else "none")


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = _Index.model_validate_json(index.read_bytes()).weight_map.values()
        except ValidationError as error:
            raise BackendError(f"cannot read {index}: {error.errors()[0]['msg']}") from None
        except OSError as error:
            raise BackendError(f"cannot read {index}: {error}") from None
        files = [directory / name for name in sorted(set(names))]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise BackendError(f"checkpoint file {file} is missing (only safetensors are read)")
    return files


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                yield name, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise BackendError(f"cannot read {file}: {error}") from None


def _canonical(name: str) -> str | None:
    """The text model's name of a checkpoint tensor; None for the vision tower."""
    if name.startswith(_VISION):
        return None
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype not in _FLOATS:
        raise BackendError(f"tensor {name!r} is {tensor.dtype}: quantised checkpoints are not supported")
    if tuple(tensor.shape) != shape:
        raise BackendError(f"tensor {name!r} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
    return tensor


def _assign(model: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    owner, _, leaf = name.rpartition(".")
    kept = torch.float32 if name.endswith(_KEPT_FLOAT32) else dtype
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(device, kept), requires_grad=False))


def _check_complete(
    wanted: dict[str, tuple[int, ...]], found: dict[str, TensorHash], config: ModelConfig, with_mtp: bool
) -> None:
    if with_mtp and not any(name.startswith("mtp.") for name in found):
        raise BackendError("the checkpoint ships no mtp.* tensors, so it has no MTP drafter: use --drafter none")
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise BackendError(f"tensor {missing[0]!r} is missing from the checkpoint{more}")
    tied, head = found.get("model.embed_tokens.weight"), found.get("lm_head.weight")
    if config.tie_word_embeddings and head is not None and head != tied:
        raise BackendError("tensor 'lm_head.weight' differs from the embedding, yet config.json ties them")
