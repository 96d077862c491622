"""The bodies of /v1/completions, as OpenAI shapes them, and what of them is refused.

Knows the wire alone: no tokenizer, no limits of a model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from serve.schemas import chat
from serve.schemas.answer import Timings, Usage
from serve.schemas.chat import MAX_CHOICES
from serve.schemas.sampling import MAX_TOKEN_ID, MAX_TOP_LOGPROBS, Generating
from serve.strict import without

MAX_ANSWERS = 512  # of one request: prompts times choices
DEFAULT_MAX_TOKENS = 16  # OpenAI's

_SERVED = ("add_special_tokens", "best_of", "echo", "prompt_logprobs")
NOT_YET = {name: nothing for name, nothing in chat.NOT_YET.items() if name not in _SERVED} | {
    "prompt_embeds": (),
    "suffix": ("",),
}

Prompt = str | tuple[int, ...]


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """One prompt or several, each a text or token ids."""
    if isinstance(given, str):
        return (_prompt(given, ()),)
    if not isinstance(given, list):
        raise PydanticCustomError("prompt_type", "must be a string, a list of token ids, or a list of either")
    if not given:
        raise PydanticCustomError("prompt", "must not be empty")
    if all(type(one) is int for one in given):
        return (_prompt(given, ()),)
    return tuple(_prompt(one, (i,)) for i, one in enumerate(given))


def _prompt(given: Any, at: tuple[int, ...]) -> Prompt:
    if not isinstance(given, str | list):
        raise PydanticCustomError("prompt_type", "must be a string or a list of token ids", {"at": at})
    if not given:
        raise PydanticCustomError("prompt", "must not be empty", {"at": at})
    if isinstance(given, str):
        return given
    for i, token in enumerate(given):
        if type(token) is not int:  # True is an int to Python, not to JSON
            raise PydanticCustomError("prompt_type", "must be a token id", {"at": (*at, i)})
        if not 0 <= token <= MAX_TOKEN_ID:
            raise PydanticCustomError("prompt", "there is no such token", {"at": (*at, i)})
    return tuple(given)


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str | list[int]]),
]


class CompletionRequest(Generating):
    """The body of POST /v1/completions."""

    prompt: Prompts
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # vLLM's
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None  # Qwen's tokenizer has none to add
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_yet(cls, data: Any) -> Any:
        return without(NOT_YET, data)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            raise PydanticCustomError(
                "conflict", "must equal n: nothing is generated that is not returned", {"at": ("best_of",)}
            )
        if len(self.prompt) * self.choices > MAX_ANSWERS:
            at, most = ("n" if self.choices > 1 else "prompt",), {"most": MAX_ANSWERS}
            raise PydanticCustomError("too_long", "a request may ask for {most} answers at most", {"at": at, **most})
        if self.stream and self.prompt_logprobs is not None:
            raise PydanticCustomError(
                "conflict", "cannot be streamed; echo and logprobs can", {"at": ("prompt_logprobs",)}
            )
        return self

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def limit(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives to tell of each of the prompt's tokens; None where nothing of them is told."""
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)

    def spelled(self, param: str | None) -> str | None:
        """A parameter by the name that the client used, where the backend knows one of several."""
        if param == "response_format" and self.structured_outputs is not None:
            return "structured_outputs"
        return "prompt_logprobs" if param == "logprobs" and self.prompt_logprobs is not None else param


class LegacyLogprobs(BaseModel):
    """Of each token its text and logprob, the likeliest at its place, and where in the choice's text it begins.

    A prompt's first token has no logprob. A token that is no whole characters is spelled bytes:\\x and its bytes.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """vLLM's; `rank` is the token's place among all by their logits, from 1."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    """Serialised with exclude_unset, as are chunks: a field that was never given does not appear."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None  # None in all chunks of a stream but the choice's last
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings | None = None  # where there are several choices


class Completion(BaseModel):
    """An answer, or a chunk of one; `timings` of a chunk are those of the choice that it ends."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
