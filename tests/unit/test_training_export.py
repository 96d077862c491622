"""The exported directory is a Qwen3.5 checkpoint for transformers and for the engine, and small enough to bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import backend.tiny
from backend.models.forms import CausalForm
from backend.models.qwen3_5 import Qwen35
from backend.models.weights import load_model
from training.pretraining.export import export, model_config
from training.pretraining.own_answers import answer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(backend.tiny.__file__).parent)


@pytest.fixture(scope="module")
def directory(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Qwen35(model_config(tokenizer))
    model.initialise(std=0.1, seed=4)
    folder = tmp_path_factory.mktemp("model")
    export(model, tokenizer, folder)
    return folder


def test_transformers_and_the_engine_read_the_same_model(directory: Path) -> None:
    theirs, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = load_model(directory, torch.device("cpu"), torch.float32, with_mtp=True).model
    tokens = torch.arange(300, 340)[None]
    with torch.no_grad():
        mine = ours.logits(ours(tokens, CausalForm(1, 40)))
        torch.testing.assert_close(mine, theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_generation_stops_on_the_end_of_turn_and_on_the_end_of_text(directory: Path, tokenizer: Any) -> None:
    config = AutoModelForCausalLM.from_pretrained(directory).generation_config
    assert config.eos_token_id == [tokenizer.convert_tokens_to_ids(n) for n in ("<|im_end|>", "<|endoftext|>")]


def test_the_weights_fit_into_the_package(directory: Path) -> None:
    assert (directory / "model.safetensors").stat().st_size <= 14e6


def test_answers_in_one_batch_are_those_of_each_prompt_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.pretraining.own_answers.LONGEST_ANSWER", 6)
    prompts = [[300, 301, 302], [400, 401, 402, 403, 404, 405]]
    together = answer(directory, prompts, 0.0, 0, lambda done: None)
    alone = [answer(directory, [prompt], 0.0, 0, lambda done: None)[0] for prompt in prompts]
    assert together == alone


def test_the_bundled_weights_are_of_the_recipes_shape_and_size(tokenizer: Any) -> None:
    folder = Path(backend.tiny.__file__).parent
    bundled = load_model(folder, torch.device("cpu"), torch.bfloat16, with_mtp=True)
    assert bundled.config == model_config(tokenizer)
    assert (folder / "model.safetensors").stat().st_size <= 14e6
