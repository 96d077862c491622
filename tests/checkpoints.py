"""Checkpoint directories that a server can be started on, made once in a test process: random ones, and the bundled.

A random trunk would hardly ever choose one token among its thousands: the ids that end an answer or its reasoning are
made loud in its head, so that answers end by themselves after some dozens of tokens.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import backend.tiny
from backend.text.tokenizer import ChatTokenizer
from tests import factory, qwen_tokenizer

BUNDLED = Path(backend.tiny.__file__).parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
QWEN_VOCAB = 248_320  # rows of the real models' heads: more than the tokenizer has ids


@dataclass(frozen=True)
class Checkpoint:
    """`thinks`: its chat template opens the reasoning unless told not to."""

    name: str
    directory: Path
    thinks: bool

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.directory)


@cache
def random_qwen() -> Checkpoint:
    """The real Qwen3.5 vocabulary over a random trunk, thinking by default."""
    made = Checkpoint("random-qwen", qwen_tokenizer.build(_place("random-qwen")), thinks=True)
    _random_weights(made, vocab=QWEN_VOCAB, loudness={"<|im_end|>": 7.5, "</think>": 8.0})
    return made


@cache
def random_small() -> Checkpoint:
    """The bundled model's tokenizer over a random trunk, which starts and decodes fast."""
    return _small("random-small", loudness={"<|im_end|>": 4.0, "</think>": 4.5})


@cache
def random_endless() -> Checkpoint:
    """As `random_small`, with nothing loud: an end is as rare as any other token (`ignore_eos` rules it out). Room for
    long prompts."""
    return _small("random-endless", loudness={}, max_len=16_384)


@cache
def without_mtp(source: Checkpoint) -> Checkpoint:
    """The very same trunk, shipped without its MTP head."""
    directory = _place(f"{source.name}-headless")
    shutil.copytree(source.directory, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    trunk = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    save_file(trunk, directory / "model.safetensors")
    return Checkpoint(f"{source.name}-headless", directory, thinks=source.thinks)


@cache
def tiny() -> Checkpoint:
    """The bundled model; only where `has_tiny`."""
    return Checkpoint("tiny", BUNDLED, thinks=False)


has_tiny = (BUNDLED / "model.safetensors").is_file()


def _place(name: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=f"draftloop-{name}-"))
    atexit.register(shutil.rmtree, directory)
    return directory


def _small(name: str, *, loudness: Mapping[str, float], max_len: int = 2048) -> Checkpoint:
    directory = _place(name)
    for file in TOKENIZER_FILES:
        shutil.copy(BUNDLED / file, directory)
    vocab = json.loads((BUNDLED / "config.json").read_text())["vocab_size"]
    made = Checkpoint(name, directory, thinks=False)
    _random_weights(made, vocab=vocab, loudness=loudness, max_len=max_len)
    return made


def _random_weights(made: Checkpoint, *, vocab: int, loudness: Mapping[str, float], max_len: int = 2048) -> None:
    """bfloat16 weights beside the tokenizer that is there; `loudness` multiplies the head's rows of literals."""
    # Untied: a token that is loud in the head and the embedding alike would repeat itself for ever.
    shape = factory.Shape(vocab=vocab, max_len=max_len, tied=False)
    model = factory.build(shape)
    for literal, factor in loudness.items():
        model.lm_head.weight[made.tokenizer.literal_id(literal)] *= factor
    factory.save(model, shape, made.directory, dtype=torch.bfloat16)
