"""POST /v1/chat/completions, streamed and not: a request becomes a generation, its events become OpenAI's shapes.

Knows no sampling default and no text rule; what the client did not ask for is left to the backend.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from backend.interface import ChatRequest, InvalidRequest, Result, TokenInfo
from serve.answers import ended, token_logprob, usage
from serve.generation import Generation
from serve.intake import receive
from serve.record import timings
from serve.schemas.answer import Logprobs
from serve.schemas.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    Delta,
)
from serve.streaming import data_lines, event_stream, while_connected

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    service, call, origin = await receive(request, ChatCompletionRequest)
    answer = _Answer(
        call=call,
        id=f"chatcmpl-{origin.id}",
        created=int(time.time()),
        model=service.model_name,
        system_fingerprint=service.system_fingerprint,
        generation=service.generate(_chat_request(call, origin.id), origin),
    )
    # Nothing is sent before the first event: until then a refusal can still have its own status.
    try:
        await while_connected(request, answer.generation.cancel, answer.generation.begin())
    except InvalidRequest as error:
        # The backend knows one name of these, the API two.
        if error.param == "max_tokens" and call.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        if error.param == "response_format" and call.structured_outputs is not None:
            error.param = "structured_outputs"
        raise
    if call.stream:
        return answer.stream()
    completion = await while_connected(request, answer.generation.cancel, answer.whole())
    return Response(completion.model_dump_json(exclude_unset=True), media_type="application/json")


def _chat_request(call: ChatCompletionRequest, request_id: str) -> ChatRequest:
    return ChatRequest(
        id=request_id,
        messages=[message.plain() for message in call.messages],
        sampling=call.sampling(),
        template_kwargs=call.chat_template_kwargs or {},
        prediction=None if call.prediction is None else call.prediction.content,
        drafter=call.drafter,
        cache_salt=call.cache_salt,
    )


@dataclass(frozen=True)
class _Answer:
    """One answer on its way to a client."""

    call: ChatCompletionRequest
    id: str
    created: int
    model: str
    system_fingerprint: str
    generation: Generation

    async def whole(self) -> ChatCompletion:
        """The answer in one piece. Raises ApiError where it was cut short."""
        tokens: list[TokenInfo] = []
        result: Result | None = None
        async for event in self.generation.events():
            tokens += event.tokens
            result = event.result
        assert result is not None, "the last event carries the result"
        finish_reason = ended(result)
        message = {"reasoning_content": result.reasoning} if result.reasoning else {}
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            choices=[
                Choice(
                    index=0,
                    message=AnswerMessage(role="assistant", content=result.content, refusal=None, **message),
                    logprobs=self._logprobs(tokens),
                    finish_reason=finish_reason,
                )
            ],
            usage=usage([result]),
            timings=timings(result),
        )

    def stream(self) -> Response:
        lines = (chunk.model_dump_json(exclude_unset=True) async for chunk in self._chunks())
        return event_stream(data_lines(lines, self.generation.cancel, self.id), self.generation.cancel)

    async def _chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        yield self._chunk(Delta(role="assistant", content=""))
        async for event in self.generation.events():
            # Reasoning before content: where one event has both, it holds the border between them.
            texts = {"reasoning_content": event.reasoning, "content": event.content}
            delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
            if delta or (event.tokens and self.call.logprobs):
                yield self._chunk(Delta(**delta), logprobs=self._logprobs(event.tokens))
            if (result := event.result) is not None:
                yield self._chunk(Delta(), finish_reason=ended(result), timings=timings(result))
                if self.call.include_usage:
                    yield self._head(choices=[], usage=usage([result]))

    def _chunk(self, delta: Delta, *, logprobs: Logprobs | None = None, finish_reason: Any = None, **more: Any) -> Any:
        if self.call.include_usage:
            more["usage"] = None
        choice = ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._head(choices=[choice], **more)

    def _head(self, **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            **more,
        )

    def _logprobs(self, tokens: Iterable[TokenInfo]) -> Logprobs | None:
        if not self.call.logprobs:
            return None
        return Logprobs(content=[token_logprob(token) for token in tokens])
