"""Documents written by the model itself: prompts of the corpus, answered greedily and sampled, by transformers.

Going through transformers' generate also proves that it loads the exported files as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.pretraining.conversation import Conversation, render
from training.pretraining.corpus import Encode, conversations
from training.pretraining.sources import Fact

LONGEST_PROMPT, LONGEST_ANSWER = 150, 160
_BATCH = 64


@dataclass(frozen=True)
class Documents:
    """Token ids of whole documents, end to end, with the array names of a capture export."""

    tokens: NDArray[np.int32]  # [T]
    doc_offsets: NDArray[np.int64]  # [D + 1]
    prompt_lengths: NDArray[np.int32]  # [D]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, doc_offsets=self.doc_offsets, prompt_lengths=self.prompt_lengths)

    @classmethod
    def load(cls, path: Path) -> Documents:
        with np.load(path) as content:
            return cls(content["tokens"], content["doc_offsets"], content["prompt_lengths"])

    @classmethod
    def join(cls, pairs: list[tuple[list[int], list[int]]]) -> Documents:
        """From (prompt, answer) pairs."""
        lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
        tokens = [token for prompt, answer in pairs for token in (*prompt, *answer)]
        return cls(
            np.array(tokens, np.int32),
            np.cumsum([0, *lengths], dtype=np.int64),
            np.array([len(prompt) for prompt, _ in pairs], np.int32),
        )


def prompt_ids(conversation: Conversation, encode: Encode) -> list[int]:
    """The rendered conversation up to where the model has to write its last answer."""
    pieces = itertools.takewhile(lambda piece: not piece[1], render(conversation))
    return [token for text, _ in pieces for token in encode(text)]


def prompts(facts: list[Fact], seed: int, count: int, encode: Encode, *, held_out: bool) -> list[list[int]]:
    """`count` different prompts of at most LONGEST_PROMPT tokens."""
    found: dict[tuple[int, ...], None] = {}
    for conversation in conversations(facts, seed, held_out=held_out):
        ids = tuple(prompt_ids(conversation, encode))
        if len(ids) <= LONGEST_PROMPT:
            found[ids] = None
        if len(found) == count:
            return [list(ids) for ids in found]
    raise AssertionError("the stream of conversations is endless")


def answer(
    checkpoint: Path, asked: list[list[int]], temperature: float, seed: int, report: Callable[[int], None]
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) for each prompt, computed in float32; an answer includes its end of turn unless it ran too long.

    `temperature` 0 is greedy; above 0 the checkpoint's own top_k and top_p apply. `report` hears how many are done.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    pad, ends = model.generation_config.pad_token_id, set(model.generation_config.eos_token_id)
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else greedy
    torch.manual_seed(seed)
    pairs: list[tuple[list[int], list[int]]] = []
    by_length = sorted(asked, key=len)
    for start in range(0, len(by_length), _BATCH):
        batch = by_length[start : start + _BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=LONGEST_ANSWER, **sampling)
        for row, generated in zip(batch, out[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(generated) if token in ends), len(generated))
            pairs.append((row, generated[:end]))
        report(len(pairs))
    return pairs
