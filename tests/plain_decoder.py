"""One token at a time, as plainly as it can be said: what every sampler is held against. Imports no code under test.

Written from DESIGN §5 and the definitions of OpenAI and vLLM, in Python loops over a small vocabulary; float32 where
a float32 is compared with another, integers for the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = Callable[[tuple[int, ...]], NDArray[np.float32]]
Allowed = Callable[[tuple[int, ...]], tuple[set[int], bool]]
f32 = np.float32


class Parameters(Protocol):
    """As `SamplingParams`, by name alone."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    choice: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    stop_token_ids: frozenset[int]


def decode(
    logits_of: Logits,
    prompt: Sequence[int],
    params: Parameters,
    max_tokens: int,
    vocab: int,
    allowed: Allowed | None = None,
) -> list[int]:
    """The output tokens. `allowed`: output so far → ids of text that may follow, and whether it may end."""
    output: list[int] = []
    while len(output) < max_tokens:
        row = logits_of((*prompt, *output))[:vocab]
        z = scaled(processed(row, params, prompt, output, allowed), params)
        token = draw(z, kept(z, params), params, len(prompt) + len(output))
        output.append(token)
        if token in params.stop_token_ids:
            break
    return output


def processed(
    row: NDArray[np.float32],
    params: Parameters,
    prompt: Sequence[int],
    output: Sequence[int],
    allowed: Allowed | None = None,
) -> list[np.float32]:
    """Bias, penalties, bans, grammar."""
    x = [f32(value) for value in row]
    for token, value in params.logit_bias:
        x[token] = x[token] + f32(value)
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            penalty = f32(params.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] = x[token] - f32(count) * f32(params.frequency_penalty)
        if count:
            x[token] = x[token] - f32(params.presence_penalty)
    banned = {word[-1] for word in params.bad_words if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]}
    texts, may_end = allowed(tuple(output)) if allowed else (set(range(len(x))), True)
    if len(output) < params.min_tokens and texts:
        banned |= params.stop_token_ids
    able = texts | (params.stop_token_ids if may_end else set())
    if able <= banned:
        banned = set()
    return [value if token in able - banned else f32(-math.inf) for token, value in enumerate(x)]


def scaled(x: Sequence[np.float32], params: Parameters) -> list[np.float32]:
    return [value / f32(params.temperature or 1) for value in x]


def kept(z: Sequence[np.float32], params: Parameters) -> list[int]:
    """Ids that min_p, then top_k, then top_p leave, best first."""
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if params.min_p > 0:
        order = [token for token in order if z[token] >= z[order[0]] + f32(math.log(params.min_p))]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(float(z[token]) - float(z[order[0]])) for token in order]
        reached, prefix = 0.0, []
        for token, weight in zip(order, weights, strict=True):
            prefix.append(token)
            reached += weight
            if reached >= params.top_p * sum(weights):
                break
        order = prefix
    return order


def probabilities(
    row: NDArray[np.float32], params: Parameters, prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float64]:
    """Of every token, at a temperature above 0."""
    z = scaled(processed(row, params, prompt, output), params)
    ids = kept(z, params)
    weights = np.array([math.exp(float(z[token]) - float(z[ids[0]])) for token in ids])
    result = np.zeros(len(z))
    result[ids] = weights / weights.sum()
    return result


def draw(z: Sequence[np.float32], ids: Sequence[int], params: Parameters, position: int) -> int:
    if params.temperature == 0:
        return max(range(len(z)), key=lambda token: (z[token], -token))
    scores = {token: z[token] + gumbel(params.seed, token, position, params.choice) for token in ids}
    return max(scores, key=lambda token: (scores[token], -token))


def gumbel(seed: int, token: int, position: int, choice: int) -> np.float32:
    word = philox([token >> 2, position, choice, 0], seed % 2**64)[token & 3]
    return f32(-math.log(-math.log1p(-(word + 0.5) * 2.0**-32)))


def philox(counter: Sequence[int], key: int) -> list[int]:
    """Philox4x32-10 in Python integers, from the paper."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c
