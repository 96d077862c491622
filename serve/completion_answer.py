"""What a raw prompt's generations are told as: OpenAI's text_completion, or its chunks.

Knows generations and shapes; knows no HTTP and starts nothing.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.interface import Alternative, ChatEvent, Result, TokenInfo
from serve.answers import LOWEST_LOGPROB, ended, usage
from serve.choices import Choices
from serve.record import timings
from serve.schemas.answer import CompletionTokensDetails, PromptTokensDetails, Usage
from serve.schemas.completions import Completion, CompletionChoice, CompletionRequest, LegacyLogprobs, PromptLogprob


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as the model reads it; empty where nobody asked to be told."""

    ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class CompletionAnswer:
    """One answer on its way to a client, choice i of prompt p at place p · n + i.

    Of `whole` and `chunks` one is called, once.
    """

    call: CompletionRequest
    id: str
    model: str
    system_fingerprint: str
    choices: Choices
    prompts: Sequence[ReadPrompt]
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> Completion:
        """The answer in one piece. Raises ApiError where a choice was cut short, BackendError where one broke."""
        tellings = self._tellings()
        results: dict[int, Result] = {}
        async for index, event in self.choices.events():
            tellings[index].hear(event)
            if event.result is not None:
                results[index] = event.result
                ended(event.result)
        more: dict[str, Any] = {"timings": timings(results[0])} if len(tellings) == 1 else {}
        choices = [self._choice(index, telling, results[index]) for index, telling in enumerate(tellings)]
        return Completion(choices=choices, usage=self._usage(results), **self._head(), **more)

    def _choice(self, index: int, telling: _Telling, result: Result) -> CompletionChoice:
        more: dict[str, Any] = {}
        if self.call.prompt_logprobs is not None:
            more["prompt_logprobs"] = telling.prompt_logprobs
        if self.call.return_token_ids:
            more |= {"token_ids": result.completion_ids, "prompt_token_ids": result.prompt_ids}
        if len(self.choices.generations) > 1:
            more["timings"] = timings(result)
        text, logprobs = telling.take()
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=ended(result), **more)

    async def chunks(self) -> AsyncIterator[Completion]:
        """The answer as it comes, its choices among each other. Raises as `whole` does."""
        tellings, told = self._tellings(), self.call.return_token_ids
        results: dict[int, Result] = {}
        begun: set[int] = set()
        async for index, event in self.choices.events():
            tellings[index].hear(event)
            text, logprobs = tellings[index].take()
            more: dict[str, Any] = {}
            if told and index not in begun:
                more["prompt_token_ids"] = self.prompts[index // self.call.choices].ids
            if told and event.tokens:
                more["token_ids"] = [token.token_id for token in event.tokens]
            if text or logprobs or more:
                begun.add(index)
                yield self._chunk(
                    CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None, **more)
                )
            if (result := event.result) is not None:
                results[index] = result
                end = CompletionChoice(index=index, text="", logprobs=None, finish_reason=ended(result))
                yield self._chunk(end, timings=timings(result))
        if self.call.include_usage:
            yield Completion(choices=[], usage=self._usage(results), **self._head())

    def _chunk(self, choice: CompletionChoice, **more: Any) -> Completion:
        if self.call.include_usage:
            more["usage"] = None
        return Completion(choices=[choice], **self._head(), **more)

    def _tellings(self) -> list[_Telling]:
        return [_Telling(self.call, prompt.text) for prompt in self.prompts for _ in range(self.call.choices)]

    def _usage(self, results: dict[int, Result]) -> Usage:
        count = self.call.choices
        return _total([usage([results[at + i] for i in range(count)]) for at in range(0, len(results), count)])

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class _Telling:
    """One choice as it is told: its text, the prompt's first where that is echoed, and how likely its tokens were.

    `hear` its events, and `take` what has come together since the last time.
    """

    def __init__(self, call: CompletionRequest, prompt: str) -> None:
        self._call = call
        self._token_by_token = bool(call.echo) and call.logprobs is not None
        self._text = [prompt] if call.echo and not self._token_by_token else []
        self._logprobs = _nothing()
        self._in_prompt = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # where the next token's text begins
        self.prompt_logprobs: list[dict[int, PromptLogprob] | None] = []

    def hear(self, event: ChatEvent) -> None:
        for token in event.prompt_tokens:
            if self._call.prompt_logprobs is not None:
                self.prompt_logprobs.append(_prompt_logprob(token, self._call.prompt_logprobs))
            if self._token_by_token:
                self._text.append(self._add(token, token.bytes))
        if self._in_prompt and (event.tokens or event.content or event.result):
            self._in_prompt = False
            self._text.append(self._advance(b"", final=True))  # of a character that the prompt leaves unfinished
        if self._call.logprobs is not None:
            for token in event.tokens:
                self._add(token, b"" if token.silent else token.bytes)
        self._text.append(event.content)

    def take(self) -> tuple[str, LegacyLogprobs | None]:
        text, logprobs = "".join(self._text), self._logprobs
        self._text, self._logprobs = [], _nothing()
        return text, logprobs if logprobs.tokens else None

    def _add(self, token: TokenInfo, shown: bytes) -> str:
        """Tell a token of which the text shows this much; returns the text that it completes."""
        as_id, known = bool(self._call.return_tokens_as_token_ids), not math.isnan(token.logprob)
        told = self._logprobs
        told.tokens.append(_name(token, as_id))
        told.token_logprobs.append(_finite(token.logprob) if known else None)
        told.top_logprobs.append(_top(token, self._call.logprobs or 0, as_id) if known else None)
        told.text_offset.append(self._offset)
        return self._advance(shown)

    def _advance(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self._offset += len(text)
        return text


def _nothing() -> LegacyLogprobs:
    return LegacyLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _top(token: TokenInfo, count: int, as_id: bool) -> dict[str, float]:
    """The likeliest, and the token itself where it is not among them."""
    top: dict[str, float] = {}
    likeliest: list[TokenInfo | Alternative] = [*token.alternatives[:count], token]
    for one in likeliest:
        top.setdefault(_name(one, as_id), _finite(one.logprob))
    return top


def _prompt_logprob(token: TokenInfo, count: int) -> dict[int, PromptLogprob] | None:
    """The token, and the likeliest at its place; None of a prompt's first."""
    if token.rank is None or math.isnan(token.logprob):
        return None
    told = {token.token_id: PromptLogprob(logprob=_finite(token.logprob), rank=token.rank, decoded_token=token.text)}
    for rank, one in enumerate(token.alternatives[:count], 1):
        of_one = PromptLogprob(logprob=_finite(one.logprob), rank=rank, decoded_token=one.text)
        told.setdefault(one.token_id, of_one)
    return told


def _name(token: TokenInfo | Alternative, as_id: bool) -> str:
    """A token's text as OpenAI spells it: two tokens of half a character each are not the same."""
    if as_id:
        return f"token_id:{token.token_id}"
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _total(usages: Sequence[Usage]) -> Usage:
    """Of several prompts together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    details = [usage.completion_tokens_details.model_dump(exclude_unset=True) for usage in usages]
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(
            **{name: sum(one.get(name, 0) for one in details) for name in details[0]}
        ),
    )
