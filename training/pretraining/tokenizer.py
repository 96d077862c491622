"""The tiny model's tokenizer: a byte-level BPE of exactly `VOCABULARY` ids with Qwen3.5's special tokens by name.

Built and saved through transformers' own Qwen3.5 tokenizer class, so that `AutoTokenizer` loads it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX, Qwen3_5Tokenizer

VOCABULARY = 4096
CONTEXT = 4096
# In the order of their ids in Qwen3.5; False: an added token that skipping special tokens leaves in place.
SPECIAL_TOKENS: dict[str, bool] = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|fim_prefix|>": False,
    "<|fim_middle|>": False,
    "<|fim_suffix|>": False,
    "<|fim_pad|>": False,
    "<|repo_name|>": False,
    "<|file_sep|>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
    "<|audio_start|>": True,
    "<|audio_end|>": True,
    "<tts_pad>": True,
    "<tts_text_bos>": True,
    "<tts_text_eod>": True,
    "<tts_text_bos_single>": True,
    "<|audio_pad|>": True,
}


def train(texts: Iterable[str], size: int = VOCABULARY) -> Qwen3_5Tokenizer:
    """A tokenizer with `size` ids in all, the special tokens last. Raises ValueError when the texts give fewer."""
    base = size - len(SPECIAL_TOKENS)
    learner = Tokenizer(BPE())
    learner.normalizer = NFC()
    learner.pre_tokenizer = Sequence(
        [Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = BpeTrainer(
        vocab_size=base, min_frequency=2, initial_alphabet=ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    if len(learned["vocab"]) != base:
        raise ValueError(f"the texts give {len(learned['vocab'])} base tokens, {base} are needed")
    tokenizer = Qwen3_5Tokenizer(vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]])
    tokenizer.add_tokens([AddedToken(name, special=s, normalized=False) for name, s in SPECIAL_TOKENS.items()])
    tokenizer.model_max_length = CONTEXT
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def save(tokenizer: Qwen3_5Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    for how_it_was_loaded in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_it_was_loaded, None)
    tokenizer.save_pretrained(directory)
