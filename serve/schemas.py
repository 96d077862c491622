"""The request and response bodies of the API, as OpenAI shapes them, and what of them is refused for now.

Knows the wire alone: no sampling defaults, no templates, no limits of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from backend.interface import Grammar
from serve.constraints import ResponseFormat, StructuredOutputs
from serve.strict import RequestModel, Text, without

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 64
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TOKEN_ID = 2**31 - 1  # a vocabulary's real end is the backend's to know
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

# Parameters that OpenAI or vLLM know and we do not serve yet, each with the values that ask for nothing.
# Null always asks for nothing.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NOT_YET_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def _stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _biases(biases: Any) -> Any:
    """Biases by token id: JSON has no other keys than strings."""
    if not isinstance(biases, dict):
        return biases
    for key in biases:
        if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key) and int(key) <= MAX_TOKEN_ID):
            raise PydanticCustomError("logit_bias", "its keys are token ids, not {key}", {"key": repr(key)[:40]})
    return {int(key): bias for key, bias in biases.items()}


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") in ("tool", "function"):
            raise PydanticCustomError("unsupported_parameter", "of a tool is not supported yet", {"at": ("role",)})
        return without(NOT_YET_IN_MESSAGES, data)

    def plain(self) -> dict[str, str | None]:
        """The message for a chat template; content is always there, the rest where it was given."""
        given = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": self.content} | {k: v for k, v in given.items() if v is not None}


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Prediction(RequestModel):
    """OpenAI's predicted output: text that much of the answer is expected to be."""

    type: Literal["content"]
    content: Text


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class ChatCompletionRequest(RequestModel):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None  # -1 and 0: every token stays
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # Any 64 bits, signed as clients send them or unsigned as rows keep them: modulo 2**64 they are the same seed.
    seed: Annotated[int, Field(ge=INT64_MIN, le=UINT64_MAX)] | None = None
    stop: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), BeforeValidator(_stops)]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # vLLM takes every number above 0; beyond these float32 logits could overflow.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_biases)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    prediction: Prediction | None = None
    drafter: Annotated[str, Field(min_length=1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # These change no answer by OpenAI's own contract.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        return without(NOT_YET, data)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("conflict", "differs from max_completion_tokens", {"at": ("max_tokens",)})
        if self.limit is not None and (self.min_tokens or 0) > self.limit:
            raise PydanticCustomError("conflict", "is more than max_tokens allows", {"at": ("min_tokens",)})
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.grammar:
            raise PydanticCustomError(
                "conflict", "cannot be joined with response_format", {"at": ("structured_outputs",)}
            )
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("conflict", "needs logprobs to be true", {"at": ("top_logprobs",)})
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("conflict", "needs stream to be true", {"at": ("stream_options",)})
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to answer with, by whichever of its two names was used."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must match, by whichever of the two parameters said so."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.grammar

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str | None = None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """Serialised with exclude_unset, as are chunks: a field that was never given does not appear."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    timings: Timings


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
