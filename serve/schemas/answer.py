"""What answers of every endpoint have in common: usage, timings, logprobs. Knows the wire alone."""

from __future__ import annotations

from pydantic import BaseModel


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Prediction tokens are 0 without a prediction, as OpenAI has it."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """llama.cpp's block, and acceptance per draft slot. Rates are null where there is nothing to divide by."""

    cache_n: int  # prompt tokens taken from the prefix cache; prompt_n are the others
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    drafter: str
    draft_n: int
    draft_n_accepted: int
    draft_n_per_pos: list[int]  # P_s: verify steps in which slot s held a draft token
    draft_n_accepted_per_pos: list[int]  # A_s: those in which slots 0 … s were all accepted
