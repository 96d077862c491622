"""The tiny model's shape and its checkpoint directory: files `transformers` and `serve --model` load as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

import backend.tiny
from backend.models.config import ModelConfig
from backend.models.qwen3_5 import Qwen35
from training.pretraining.tokenizer import CONTEXT, VOCABULARY, save


def tiny_config(end_of_turn: int, end_of_text: int) -> dict[str, Any]:
    """config.json of the bundled model. The arguments are token ids."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 704,
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
    }


def generation_config(end_of_turn: int, end_of_text: int) -> dict[str, Any]:
    """generation_config.json: stops on both ends, as the larger Qwen3.5 checkpoints do, and gentle sampling."""
    return {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
    }


def special_ids(tokenizer: Qwen3_5Tokenizer) -> tuple[int, int]:
    """(`<|im_end|>`, `<|endoftext|>`)."""
    return tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")


def model_config(tokenizer: Qwen3_5Tokenizer) -> ModelConfig:
    """The tiny shape as the trunk reads it."""
    return ModelConfig.from_dict(tiny_config(*special_ids(tokenizer)))


def export(model: Qwen35, tokenizer: Qwen3_5Tokenizer, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model.safetensors (Hugging Face names, `mtp.*` at top level), configs, tokenizer and chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ids = special_ids(tokenizer)
    for name, content in (("config", tiny_config(*ids)), ("generation_config", generation_config(*ids))):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save(tokenizer, directory)
    shutil.copy(Path(backend.tiny.__file__).parent / "chat_template.jinja", directory)
