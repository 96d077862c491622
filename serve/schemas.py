"""The request and response bodies of the API, as OpenAI shapes them, and what of them is refused for now.

Knows the wire alone: no sampling defaults, no templates, no limits of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 64
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Parameters that OpenAI or vLLM know and we do not serve yet, each with the values that ask for nothing.
# Null always asks for nothing.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
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
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structural_tag": (),
    "structured_outputs": (),
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


def _without(not_yet: Mapping[str, tuple[Any, ...]], data: Any) -> Any:
    """The body without those parameters; one that asks for something is refused by name."""
    if not isinstance(data, dict):
        return data
    for name, value in data.items():
        if name in not_yet and not _asks_for_nothing(value, not_yet[name]):
            raise PydanticCustomError("unsupported_parameter", "is not supported yet", {"at": (name,)})
    return {name: value for name, value in data.items() if name not in not_yet}


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True is 1 to Python, not to JSON.
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def _text(content: Any) -> Any:
    """Message content as one string: a list of text parts is joined, any other part refused."""
    if not isinstance(content, list):
        if content is None or isinstance(content, str):
            return content
        raise PydanticCustomError("content_type", "must be a string, null or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content_part", "must be an object with a type", {"at": (i,)})
        if kind != "text":
            raise PydanticCustomError(
                "content_part", "this server reads text only, not a part of type '{kind}'", {"at": (i,), "kind": kind}
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_part", "must be a string", {"at": (i, "text")})
        if extra := sorted(part.keys() - {"type", "text"}):
            raise PydanticCustomError("extra_forbidden", "is unknown", {"at": (i, extra[0])})
        texts.append(part["text"])
    return "".join(texts)


def _stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class RequestModel(BaseModel):
    """Nothing is coerced, nothing unknown is let through, null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_text)] = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") in ("tool", "function"):
            raise PydanticCustomError("unsupported_parameter", "of a tool is not supported yet", {"at": ("role",)})
        return _without(NOT_YET_IN_MESSAGES, data)

    def plain(self) -> dict[str, str | None]:
        """The message for a chat template; content is always there, the rest where it was given."""
        given = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": self.content} | {k: v for k, v in given.items() if v is not None}


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


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
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), BeforeValidator(_stops)]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

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
        return _without(NOT_YET, data)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("conflict", "differs from max_completion_tokens", {"at": ("max_tokens",)})
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("conflict", "needs logprobs to be true", {"at": ("top_logprobs",)})
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("conflict", "needs stream to be true", {"at": ("stream_options",)})
        return self

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


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(BaseModel):
    """llama.cpp's block, and acceptance per draft slot. Rates are null where there is nothing to divide by."""

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
