"""The parameters of every endpoint that generates: how long, how sampled, how constrained, kept or not.

Knows the wire alone: no sampling defaults, no limits of a model.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from backend.interface import Grammar, SamplingRequest
from serve.constraints import ResponseFormat, StructuredOutputs
from serve.strict import RequestModel

MAX_STOPS = 4
MAX_TOP_LOGPROBS = 64
MAX_ENTRIES = 1024  # of an object whose names are the client's
MAX_BAD_WORDS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TOKEN_ID = 2**31 - 1  # a vocabulary's real end is the backend's to know
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _few(entries: Any) -> Any:
    if isinstance(entries, dict) and len(entries) > MAX_ENTRIES:  # before each of them is looked at
        raise PydanticCustomError("too_long", "should have at most {most} entries", {"most": MAX_ENTRIES})
    return entries


def _biases(biases: Any) -> Any:
    """Biases by token id: JSON has no other keys than strings."""
    if not isinstance(_few(biases), dict):
        return biases
    for key in biases:
        if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key) and int(key) <= MAX_TOKEN_ID):
            raise PydanticCustomError("logit_bias", "its keys are token ids, not {key}", {"key": repr(key)[:40]})
    return {int(key): bias for key, bias in biases.items()}


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is added to chunks


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Generating(RequestModel):
    """Base of every body that asks for a generation."""

    model: str | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None  # -1 and 0: every token stays
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # Any 64 bits, signed as clients send them or unsigned as rows keep them: modulo 2**64 they are the same seed.
    seed: Annotated[int, Field(ge=INT64_MIN, le=UINT64_MAX)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(max_length=MAX_STOPS, fail_fast=True),
            BeforeValidator(_stops, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # vLLM takes every number above 0; beyond these float32 logits could overflow.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_ENTRIES), BeforeValidator(_biases)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    drafter: Annotated[str, Field(min_length=1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    store: bool | None = None

    # These change no answer by OpenAI's own contract.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _agree_on_sampling(self) -> Self:
        if self.limit is not None and (self.min_tokens or 0) > self.limit:
            raise PydanticCustomError("conflict", "is more than max_tokens allows", {"at": ("min_tokens",)})
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.grammar:
            raise PydanticCustomError(
                "conflict", "cannot be joined with response_format", {"at": ("structured_outputs",)}
            )
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("conflict", "needs stream to be true", {"at": ("stream_options",)})
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to answer with."""
        return self.max_tokens

    @property
    def alternatives(self) -> int:
        """Alternatives to tell of each token."""
        return 0

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must match, by whichever of the two parameters said so."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.grammar

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> SamplingRequest:
        """What was asked for, in the backend's words."""
        return SamplingRequest(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.limit,
            stop=tuple(self.stop or ()),
            top_logprobs=self.alternatives,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            bad_words=tuple(self.bad_words or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=self.grammar,
        )
