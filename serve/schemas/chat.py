"""The bodies of /v1/chat/completions, as OpenAI shapes them, and what of them is refused for now.

Knows the wire alone: no sampling defaults, no templates, no limits of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serve.schemas.answer import Logprobs, Timings, Usage
from serve.schemas.sampling import MAX_TOP_LOGPROBS, Generating
from serve.strict import RequestModel, Text, without

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


class Prediction(RequestModel):
    """OpenAI's predicted output: text that much of the answer is expected to be."""

    type: Literal["content"]
    content: Text


class ChatCompletionRequest(Generating):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None

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
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to answer with, by whichever of its two names was used."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0


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
