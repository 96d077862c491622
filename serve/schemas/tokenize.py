"""The bodies of /tokenize, /detokenize and /apply-template, as vLLM and llama.cpp shape them.

Knows the wire alone: no tokenizer and no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serve.schemas.chat import Message
from serve.schemas.sampling import TokenId
from serve.schemas.tools import Tools
from serve.strict import RequestModel, without

# Parameters that would change the answer, but that we do not serve, each with the values that ask for nothing.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "parse_special": (True,),  # llama.cpp's: in a raw prompt special tokens are meant
}


class Conversation(RequestModel):
    """A conversation as a prompt is made of it. `model` is checked, and otherwise without effect."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        return without(NOT_YET, data)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        told = {} if self.add_generation_prompt is None else {"add_generation_prompt": self.add_generation_prompt}
        return {**told, **(self.chat_template_kwargs or {})}


class TokenizeRequest(Conversation):
    """The body of POST /tokenize: vLLM's prompt or messages, or llama.cpp's content."""

    prompt: str | None = None
    content: str | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    # Qwen's tokenizer has none to add.
    add_special_tokens: bool | None = None
    add_special: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        given = [name for name in ("prompt", "messages", "content") if getattr(self, name) is not None]
        if not given:
            raise PydanticCustomError("missing", "is required", {"at": ("prompt",)})
        if given[1:]:
            raise PydanticCustomError("conflict", "cannot be joined with {other}", {"at": given[1:], "other": given[0]})
        return self


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class ApplyTemplateRequest(Conversation):
    """The body of POST /apply-template."""

    @model_validator(mode="after")
    def _messages(self) -> Self:
        if self.messages is None:
            raise PydanticCustomError("missing", "is required", {"at": ("messages",)})
        return self


class Piece(BaseModel):
    """llama.cpp's: a token and its text, its bytes where it is no whole characters."""

    id: int
    piece: str | list[int]


class Tokenized(BaseModel):
    """vLLM's answer, and with its `tokens` llama.cpp's too."""

    count: int
    max_model_len: int
    tokens: list[int] | list[Piece]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The same text by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class AppliedTemplate(BaseModel):
    prompt: str
