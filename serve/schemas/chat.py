"""The bodies of /v1/chat/completions, as OpenAI shapes them, and what of them is refused.

Knows the wire alone: no sampling defaults, no templates, no limits of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serve.schemas import tools
from serve.schemas.answer import Logprobs, Timings, Usage
from serve.schemas.sampling import INT64_MAX, MAX_TOP_LOGPROBS, Generating
from serve.schemas.tools import Called, MadeCall, ToolChoice, Tools
from serve.strict import RequestModel, Text, without

MAX_CHOICES = 128

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Parameters that others know and that would change the answer, but that we do not serve, each with the values that
# ask for nothing. Null always asks for nothing.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    # vLLM
    "add_special_tokens": (False, True),  # the template writes them
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
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "request_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # these are skipped
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # llama.cpp
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": (),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
NOT_YET_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {"audio": (), "function_call": ()}


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under another name
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # of an answer that is sent back; they say nothing to a model

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        return without(NOT_YET_IN_MESSAGES, data)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.role != "assistant":
            if self.content is None:
                raise PydanticCustomError("missing", "is required", {"at": ("content",)})
            if self.tool_calls:
                raise PydanticCustomError("conflict", "needs role to be assistant", {"at": ("tool_calls",)})
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("missing", "is required", {"at": ("tool_call_id",)})
        return self

    def plain(self) -> dict[str, Any]:
        """The message for a chat template; content is always there, the rest where it was given."""
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        given = {
            "name": self.name,
            "reasoning_content": reasoning,
            "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        content = self.refusal if self.content is None else self.content
        return {"role": self.role, "content": content} | {k: v for k, v in given.items() if v is not None}


class Prediction(RequestModel):
    """OpenAI's predicted output: text that much of the answer is expected to be."""

    type: Literal["content"]
    content: Text


class Reasoning(RequestModel):
    """reasoning_effort in an object, as other endpoints have it."""

    effort: Effort | None = None


class ChatCompletionRequest(Generating):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prediction: Prediction | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None  # vLLM's name
    thinking_budget: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None  # Qwen's
    include_reasoning: bool | None = None

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_steps: bool | None = None  # of a stream: the verify step that each chunk's tokens are of

    verbosity: Literal["low", "medium", "high"] | None = None  # no part of the model's template

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        return without(NOT_YET, data)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("conflict", "differs from max_completion_tokens", {"at": ("max_tokens",)})
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("conflict", "needs logprobs to be true", {"at": ("top_logprobs",)})
        budgets = {self.thinking_budget, self.thinking_token_budget} - {None}
        if len(budgets) > 1:
            raise PydanticCustomError("conflict", "differs from thinking_token_budget", {"at": ("thinking_budget",)})
        tools.check(self.tools, self.tool_choice)
        if (
            self.structured_outputs is not None
            and tools.offered(self.tools, self.tool_choice)["tool_choice"] == "required"
        ):
            raise PydanticCustomError(
                "conflict", "cannot be kept by an answer that has to be a call", {"at": ("structured_outputs",)}
            )
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to answer with, by whichever of its two names was used."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0

    @property
    def budget(self) -> int | None:
        """The most tokens to think with, by whichever of its two names was used."""
        return self.thinking_budget if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the template is told; chat_template_kwargs count more than what only implies them."""
        told: dict[str, Any] = {}
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        if effort is not None:
            told["enable_thinking"] = effort != "none"
        if self.enable_thinking is not None:
            told["enable_thinking"] = self.enable_thinking
        if self.add_generation_prompt is not None:
            told["add_generation_prompt"] = self.add_generation_prompt
        return {**told, **(self.chat_template_kwargs or {})}

    def spelled(self, param: str | None) -> str | None:
        """A parameter by the name that the client used, where the backend knows one of several."""
        others = {
            "max_tokens": "max_completion_tokens",
            "response_format": "structured_outputs",
            "thinking_budget": "thinking_token_budget",
        }
        other = others.get(param or "")
        return other if other and getattr(self, other) is not None else param


FinishReason = Literal["stop", "length", "tool_calls"]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Called] | None = None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    timings: Timings | None = None  # where there are several choices


class ChatCompletion(BaseModel):
    """Serialised with exclude_unset, as are chunks: a field that was never given does not appear."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None
    prompt_token_ids: list[int] | None = None
    choices: list[Choice]
    usage: Usage
    timings: Timings | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Called] | None = None


class VerifyStep(BaseModel):
    """Of the tokens of its chunk the first `accepted` were drafted, in the order of the slots; what follows was not."""

    drafter: str
    drafted: int
    accepted: int


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    step: VerifyStep | None = None


class ChatCompletionChunk(BaseModel):
    """`timings` are those of the choice that the chunk ends."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None
    prompt_token_ids: list[int] | None = None
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
