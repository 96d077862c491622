"""The shape of a Qwen3.5 text model, read from a checkpoint's config.json through transformers' own config class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from backend.interface import BackendError

# transformers fills these silently with values that are wrong for every released checkpoint.
_MUST_BE_WRITTEN = ("rope_parameters", "max_position_embeddings")
_KINDS = {"linear_attention", "full_attention"}
_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "linear_conv_kernel_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)


@dataclass(frozen=True)
class ModelConfig:
    """Widths and counts of the text trunk; names follow the Hugging Face config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # "linear_attention" | "full_attention"
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def query_groups(self) -> int:
        """Query heads to one of keys and values."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the parsed config.json, text-only or multimodal. Raises BackendError naming what is wrong."""
        text = _text_part(config)
        try:
            hf = Qwen3_5TextConfig(**text)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise BackendError(f"config.json: {' '.join(str(error).split())}") from None
        _refuse_unsupported(hf)
        rope = hf.rope_parameters
        eos = text.get("eos_token_id")
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        return cls(
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            layer_types=tuple(hf.layer_types),
            num_attention_heads=hf.num_attention_heads,
            num_key_value_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            linear_num_key_heads=hf.linear_num_key_heads,
            linear_num_value_heads=hf.linear_num_value_heads,
            linear_key_head_dim=hf.linear_key_head_dim,
            linear_value_head_dim=hf.linear_value_head_dim,
            linear_conv_kernel_dim=hf.linear_conv_kernel_dim,
            rotary_dim=int(hf.head_dim * rope["partial_rotary_factor"]),
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=hf.rms_norm_eps,
            tie_word_embeddings=bool(tied),
            max_position_embeddings=hf.max_position_embeddings,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        )

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """From `directory`/config.json. Raises BackendError when it is absent or not JSON."""
        path = directory / "config.json"
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BackendError(f"{directory} is not a checkpoint directory: it has no config.json") from None
        except (OSError, ValueError) as error:
            raise BackendError(f"cannot read {path}: {error}") from None
        if not isinstance(parsed, dict):
            raise BackendError(f"{path} does not hold a JSON object")
        return cls.from_dict(parsed)


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping) or text.get("model_type") != "qwen3_5_text":
        raise BackendError(
            f"model_type {config.get('model_type')!r} is not supported: expected a Qwen3.5 dense checkpoint "
            "(qwen3_5 or qwen3_5_text)"
        )
    if config.get("quantization_config") or text.get("quantization_config"):
        raise BackendError("config.json has a quantization_config: quantised checkpoints are not supported")
    missing = [name for name in _MUST_BE_WRITTEN if text.get(name) is None]
    if missing:
        raise BackendError(f"config.json does not state {' or '.join(missing)}")
    rope = text["rope_parameters"]
    if not isinstance(rope, Mapping):
        raise BackendError("config.json: rope_parameters is not an object")
    for name, value in (("rope_theta", None), ("partial_rotary_factor", 0.25)):
        if not isinstance(rope.get(name, value), int | float):
            raise BackendError(f"config.json does not state a number as rope_parameters.{name}")
    return dict(text)


def _refuse_unsupported(hf: Any) -> None:
    if hf.hidden_act != "silu":
        raise BackendError(f"hidden_act {hf.hidden_act!r} is not supported: expected 'silu'")
    kind = hf.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise BackendError(f"rope_type {kind!r} is not supported: expected 'default'")
    unknown = sorted(set(hf.layer_types) - _KINDS)
    if unknown:
        raise BackendError(f"layer_types has {unknown[0]!r}: expected {' or '.join(sorted(_KINDS))}")
    for name in _COUNTS:
        if getattr(hf, name) < 1:
            raise BackendError(f"config.json: {name} is {getattr(hf, name)}, expected at least 1")
    if hf.num_attention_heads % hf.num_key_value_heads or hf.linear_num_value_heads % hf.linear_num_key_heads:
        raise BackendError("config.json: key heads must divide query (or value) heads")
