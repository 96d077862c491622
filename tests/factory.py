"""Random Qwen3.5 checkpoints of any shape, for tests: tied or not, with or without MTP, sharded, multimodal names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from backend.models.config import ModelConfig
from backend.models.qwen3_5 import Qwen35


@dataclass(frozen=True)
class Shape:
    """Widths of a random checkpoint. The defaults run in milliseconds."""

    vocab: int = 320
    hidden: int = 64
    intermediate: int = 96
    layers: tuple[str, ...] = ("linear", "linear", "linear", "full")
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    k_heads: int = 2
    v_heads: int = 4
    linear_dim: int = 16
    tied: bool = True
    mtp: bool = True
    max_len: int = 2048
    seed: int = 0
    std: float = 0.08
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The Hugging Face config.json (text part)."""
        pairs = self.head_dim // 8
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.layers),
            "layer_types": [f"{kind}_attention" for kind in self.layers],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attn_output_gate": True,
            "linear_num_key_heads": self.k_heads,
            "linear_num_value_heads": self.v_heads,
            "linear_key_head_dim": self.linear_dim,
            "linear_value_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            },
            "tie_word_embeddings": self.tied,
            "mtp_num_hidden_layers": 1 if self.mtp else 0,
            "max_position_embeddings": self.max_len,
            "eos_token_id": None,
            **self.extra,
        }


# Four layers at the 0.8B's widths (QWEN35.md §1.2), with a small vocabulary.
WIDTHS_08B = Shape(
    vocab=1024,
    hidden=1024,
    intermediate=3584,
    heads=8,
    kv_heads=2,
    head_dim=256,
    k_heads=16,
    v_heads=16,
    linear_dim=128,
    std=0.02,
)


BLOCK = ("linear", "linear", "linear", "full")
NINE_B = Shape(
    vocab=248_320,
    hidden=4096,
    intermediate=12_288,
    layers=BLOCK * 8,
    heads=16,
    kv_heads=4,
    head_dim=256,
    k_heads=16,
    v_heads=32,
    linear_dim=128,
    tied=False,
)


def build(shape: Shape) -> Qwen35:
    """A float32 model with random weights in which every parameter matters (norms and decays are not at identity)."""
    model = Qwen35(ModelConfig.from_dict(shape.config()), with_mtp=shape.mtp)
    model.initialise(std=shape.std, seed=shape.seed)
    generator = torch.Generator().manual_seed(shape.seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.requires_grad_(False).eval()


def save(
    model: Qwen35,
    shape: Shape,
    out: Path,
    *,
    shards: int = 1,
    multimodal: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config and safetensors in the layout of a text-only or of the full multimodal checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(dtype).contiguous() for name, p in model.named_parameters()}
    config = shape.config()
    if multimodal:
        tensors = {
            f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()
        }
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(8, 3)
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": config,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": shape.tied,
        }
    (out / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, out / "model.safetensors")
        return out
    weight_map = {}
    for i in range(shards):
        file = f"model.safetensors-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, out / file)
        weight_map.update(dict.fromkeys(part, file))
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out
