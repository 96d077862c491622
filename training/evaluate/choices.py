"""What the target itself chooses along a document, by its own logits: the tokens that drafts are judged by.

The same sampler, parameters, seed and positions as serving: a document that is the model's own says nothing else. Knows
no drafter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from backend.models.qwen3_5 import Qwen35
from training.data import Forced
from training.evaluate.following import sampling_of

BLOCK = 64  # rows of logits at once


def logits_of(model: Qwen35, forced: Forced, vocab: int) -> Iterator[tuple[int, Tensor]]:
    """The target's logits over an answer, float32 [R, vocab] at a time, each with the position its first row is for."""
    start, end = forced.document.prompt_length, len(forced.document.tokens)
    weight, hidden = model.model.embed_tokens.weight, forced.hidden
    for at in range(start, end, BLOCK):
        rows = hidden[at - 1 : min(at + BLOCK, end) - 1].to(weight.device, weight.dtype)
        yield at, model.logits(rows)[..., :vocab]


@torch.inference_mode()
def first_difference(model: Qwen35, forced: Forced, vocab: int) -> int | None:
    """The first position whose token is not the one that serving would choose there; None where there is none.

    By the document's own parameters and seed (DESIGN §5), greedily where it states none.
    """
    document = forced.document
    tokens = document.tokens.tolist()
    sampler = Sampler(sampling_of(document), vocab, document.prompt)
    for at, logits in logits_of(model, forced, vocab):
        said = tokens[at : at + len(logits)]
        drafts = torch.tensor([said[:-1]], dtype=torch.int64)
        chosen = SamplerBatch([sampler], [at]).verify(logits[None], drafts)[0].tolist()
        for i, (mine, token) in enumerate(zip(chosen, said, strict=True)):
            if mine != token:
                return at + i
            sampler.accept(token)
    return None


@torch.inference_mode()
def choices(model: Qwen35, forced: Forced, params: SamplingParams, vocab: int) -> list[int]:
    """What these parameters choose at every position of an answer, in the document's context. Plain ones alone."""
    sampler = Sampler(params, vocab)
    found: list[int] = []
    for at, logits in logits_of(model, forced, vocab):
        rows = SamplerBatch([sampler] * len(logits), range(at, at + len(logits)))
        found += rows.verify(logits[:, None], torch.empty(len(logits), 0, dtype=torch.int64))[:, 0].tolist()
    return found
