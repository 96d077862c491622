"""What the answers of every endpoint say alike: how they ended, what they used, how likely their tokens were.

Knows results and the wire's shapes; knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from backend.interface import Alternative, Result, TokenInfo
from serve.errors import ApiError, unavailable
from serve.schemas.answer import CompletionTokensDetails, PromptTokensDetails, TokenLogprob, TopLogprob, Usage

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def ended(result: Result) -> Literal["stop", "length"]:
    """How it ended. Raises ApiError where it was cut short: OpenAI has no finish_reason for that."""
    match result.finish_reason:
        case "cancelled":
            raise unavailable("The server is shutting down and cut this generation short.", "shutting_down")
        case "error":
            raise ApiError(500, f"The generation failed: {result.error}.", code="generation_failed")
        case reason:
            return reason


def usage(results: Sequence[Result]) -> Usage:
    """Of all choices of one prompt: the prompt counts once, every emitted token counts."""
    prompt = len(results[0].prompt_ids)
    completion = sum(len(result.completion_ids) for result in results)
    reasoning = [result.reasoning_tokens for result in results if result.reasoning_tokens is not None]
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=results[0].cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(result.accepted_prediction_tokens or 0 for result in results),
            rejected_prediction_tokens=sum(result.rejected_prediction_tokens or 0 for result in results),
            **({"reasoning_tokens": sum(reasoning)} if reasoning else {}),
        ),
    )


def token_logprob(token: TokenInfo, *, as_id: bool = False) -> TokenLogprob:
    """`as_id`: the token's id stands for its text, as vLLM's return_tokens_as_token_ids has it."""
    others = [TopLogprob(**_told(other, as_id)) for other in token.alternatives]
    return TokenLogprob(**_told(token, as_id), top_logprobs=others)


def _told(token: TokenInfo | Alternative, as_id: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token.token_id}" if as_id else token.text,
        "logprob": max(token.logprob, LOWEST_LOGPROB),
        "bytes": list(token.bytes),
    }
