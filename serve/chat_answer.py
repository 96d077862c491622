"""What a chat's generations are told as: OpenAI's chat.completion, or its chunks.

Knows generations and shapes; knows no HTTP and starts nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.interface import ChatEvent, Result, TokenInfo, ToolCall, ToolCallDelta
from serve.answers import ended, token_logprob, usage
from serve.choices import Choices
from serve.record import timings
from serve.schemas.answer import Logprobs, TokenLogprob
from serve.schemas.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    Delta,
    FinishReason,
    VerifyStep,
)
from serve.schemas.tools import Called, CalledFunction


@dataclass(frozen=True)
class ChatAnswer:
    """One answer on its way to a client. Of `whole` and `chunks` one is called, once."""

    call: ChatCompletionRequest
    id: str
    model: str
    system_fingerprint: str
    choices: Choices
    prompt_ids: Sequence[int] = ()  # told in the first chunk, where asked for
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> ChatCompletion:
        """The answer in one piece. Raises ApiError where a choice was cut short, BackendError where one broke."""
        count = len(self.choices.generations)
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        results: dict[int, Result] = {}
        async for index, event in self.choices.events():
            if self.call.logprobs:  # now: all of them at the end would keep everybody waiting
                logprobs[index] += self._token_logprobs(event.tokens)
            if event.result is not None:
                results[index] = event.result
                ended(event.result)
        ordered = [results[index] for index in range(count)]
        more: dict[str, Any] = {"timings": timings(ordered[0])} if count == 1 else {}
        if self.call.return_token_ids:
            more["prompt_token_ids"] = ordered[0].prompt_ids
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(index, result, logprobs[index]) for index, result in enumerate(ordered)],
            usage=usage(ordered),
            **self._head(),
            **more,
        )

    def _choice(self, index: int, result: Result, logprobs: list[TokenLogprob]) -> Choice:
        said: dict[str, Any] = {"content": None if result.tool_calls and not result.content else result.content}
        if result.reasoning and self.call.include_reasoning is not False:
            said["reasoning_content"] = result.reasoning
        if result.tool_calls:
            said["tool_calls"] = [_called(call) for call in result.tool_calls]
        more: dict[str, Any] = {}
        if self.call.return_token_ids:
            more["token_ids"] = result.completion_ids
        if len(self.choices.generations) > 1:
            more["timings"] = timings(result)
        return Choice(
            index=index,
            message=AnswerMessage(role="assistant", refusal=None, **said),
            logprobs=Logprobs(content=logprobs) if self.call.logprobs else None,
            finish_reason=_finish_reason(result),
            **more,
        )

    async def chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """The answer as it comes, its choices among each other. Raises as `whole` does."""
        count, told = len(self.choices.generations), self.call.return_token_ids
        for index in range(count):
            first: dict[str, Any] = {"prompt_token_ids": self.prompt_ids} if told and index == 0 else {}
            yield self._chunk(index, Delta(role="assistant", content=""), **first)
        results: dict[int, Result] = {}
        by_tokens = self.call.logprobs or told or self.call.return_steps
        async for index, event in self.choices.events():
            delta = self._delta(event)
            if delta or (event.tokens and by_tokens):
                yield self._chunk(index, Delta(**delta), event)
            if (result := event.result) is not None:
                results[index] = result
                yield self._chunk(index, Delta(), finish_reason=_finish_reason(result), timings=timings(result))
        if self.call.include_usage:
            used = usage([results[index] for index in range(count)])
            yield ChatCompletionChunk(object="chat.completion.chunk", choices=[], usage=used, **self._head())

    def _delta(self, event: ChatEvent) -> dict[str, Any]:
        # In the order of their coming: where one event has several of them, it holds the border between them.
        said: dict[str, Any] = {}
        if event.reasoning and self.call.include_reasoning is not False:
            said["reasoning_content"] = event.reasoning
        if event.content:
            said["content"] = event.content
        if event.tool_calls:
            said["tool_calls"] = [_called_more(delta) for delta in event.tool_calls]
        return said

    def _chunk(
        self,
        index: int,
        delta: Delta,
        event: ChatEvent = ChatEvent(),
        *,
        finish_reason: FinishReason | None = None,
        **more: Any,
    ) -> ChatCompletionChunk:
        told: dict[str, Any] = {}
        if event.tokens and self.call.return_token_ids:
            told["token_ids"] = [token.token_id for token in event.tokens]
        if event.step is not None and self.call.return_steps:
            told["step"] = VerifyStep(
                drafter=event.drafted_by, drafted=event.step.drafted, accepted=event.step.accepted
            )
        told_of = self.call.logprobs and event.tokens
        logprobs = Logprobs(content=self._token_logprobs(event.tokens)) if told_of else None
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason, **told)
        if self.call.include_usage:
            more["usage"] = None
        return ChatCompletionChunk(object="chat.completion.chunk", choices=[choice], **self._head(), **more)

    def _head(self) -> dict[str, Any]:
        tier = {} if self.call.service_tier is None else {"service_tier": "default"}
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **tier,
        }

    def _token_logprobs(self, tokens: Iterable[TokenInfo]) -> list[TokenLogprob]:
        as_id = bool(self.call.return_tokens_as_token_ids)
        return [token_logprob(token, as_id=as_id) for token in tokens]


def _finish_reason(result: Result) -> FinishReason:
    reason = ended(result)
    return "tool_calls" if result.tool_calls and reason == "stop" else reason


def _called(call: ToolCall) -> Called:
    return Called(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))


def _called_more(delta: ToolCallDelta) -> Called:
    if delta.id is None:
        return Called(index=delta.index, function=CalledFunction(arguments=delta.arguments))
    function = CalledFunction(name=delta.name, arguments=delta.arguments)
    return Called(index=delta.index, id=delta.id, type="function", function=function)
