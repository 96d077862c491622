"""POST /v1/chat/completions, streamed and not: a request becomes a generation, its events become OpenAI's shapes.

Knows no sampling default and no text rule; what the client did not ask for is left to the backend.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message as AsgiMessage

from backend.interface import BackendError, ChatRequest, InvalidRequest, Result, SamplingRequest, TokenInfo
from serve import body
from serve.errors import ApiError, from_backend, internal, unavailable
from serve.generation import Generation
from serve.record import Origin, timings
from serve.schemas import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    Logprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from serve.service import Service

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks
PING_SECONDS = 15

log = logging.getLogger(__name__)
router = APIRouter()
T = TypeVar("T")


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    service: Service = request.app.state.service
    service.admit()
    arrived = time.perf_counter()
    call, sent = await body.read(request, ChatCompletionRequest)
    service.check_model(call.model)
    service.check_drafter(call.drafter)
    origin = Origin(
        model=service.model_name,
        body=sent,
        client=call.user,
        opted_out=call.store is False or _header_opts_out(request),
        arrived=arrived,
    )
    service.admit()  # once more: a body can take its time to arrive
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
        await _while_connected(request, answer.generation, answer.generation.begin())
    except InvalidRequest as error:
        # The backend knows one name of these, the API two.
        if error.param == "max_tokens" and call.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        if error.param == "response_format" and call.structured_outputs is not None:
            error.param = "structured_outputs"
        raise
    if call.stream:
        return answer.stream()
    completion = await _while_connected(request, answer.generation, answer.whole())
    return Response(completion.model_dump_json(exclude_unset=True), media_type="application/json")


def _header_opts_out(request: Request) -> bool:
    match request.headers.get("x-draftloop-capture", "on").strip().lower():
        case "off":
            return True
        case "on":
            return False
        case other:
            # A client that asks for privacy in words we do not know must not be captured by mistake.
            raise ApiError(
                400, f"The header X-Draftloop-Capture must be on or off, not '{other}'.", code="invalid_value"
            )


def _chat_request(call: ChatCompletionRequest, request_id: str) -> ChatRequest:
    return ChatRequest(
        id=request_id,
        messages=[message.plain() for message in call.messages],
        sampling=SamplingRequest(
            temperature=call.temperature,
            top_p=call.top_p,
            top_k=None if call.top_k is None else max(call.top_k, 0),
            min_p=call.min_p,
            seed=call.seed,
            max_tokens=call.limit,
            stop=tuple(call.stop or ()),
            top_logprobs=call.top_logprobs or 0,
            presence_penalty=call.presence_penalty,
            frequency_penalty=call.frequency_penalty,
            repetition_penalty=call.repetition_penalty,
            logit_bias=call.logit_bias or {},
            bad_words=tuple(call.bad_words or ()),
            min_tokens=call.min_tokens or 0,
            ignore_eos=bool(call.ignore_eos),
            stop_token_ids=tuple(call.stop_token_ids or ()),
            grammar=call.grammar,
        ),
        template_kwargs=call.chat_template_kwargs or {},
        prediction=None if call.prediction is None else call.prediction.content,
        drafter=call.drafter,
        cache_salt=call.cache_salt,
    )


async def _while_connected(request: Request, generation: Generation, work: Awaitable[T]) -> T:
    """The work's result; a client that leaves before ends the generation and raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except BaseException:
        generation.cancel()
        raise
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        finish_reason = _finish_reason(result)
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
            usage=_usage(result),
            timings=timings(result),
        )

    def stream(self) -> EventSourceResponse:
        async def leave(_: AsgiMessage) -> None:
            self.generation.cancel()

        # `leave` is called even where the client left before the first chunk was asked for.
        return EventSourceResponse(
            self._lines(),
            sep="\n",
            ping=PING_SECONDS,
            client_close_handler_callable=leave,
        )

    async def _lines(self) -> AsyncIterator[str]:
        """The data lines of the stream."""
        try:
            async for chunk in self._chunks():
                yield chunk.model_dump_json(exclude_unset=True)
        except ApiError as error:
            yield error.json()
        except BackendError as error:
            yield from_backend(error).json()
        except Exception:
            log.exception("answer %s could not be written", self.id)
            yield internal().json()
        finally:
            self.generation.cancel()
        yield "[DONE]"

    async def _chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        yield self._chunk(Delta(role="assistant", content=""))
        async for event in self.generation.events():
            # Reasoning before content: where one event has both, it holds the border between them.
            texts = {"reasoning_content": event.reasoning, "content": event.content}
            delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
            if delta or (event.tokens and self.call.logprobs):
                yield self._chunk(Delta(**delta), logprobs=self._logprobs(event.tokens))
            if (result := event.result) is not None:
                yield self._chunk(Delta(), finish_reason=_finish_reason(result), timings=timings(result))
                if self.call.include_usage:
                    yield self._head(choices=[], usage=_usage(result))

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
        return Logprobs(
            content=[
                TokenLogprob(
                    token=token.text,
                    logprob=max(token.logprob, LOWEST_LOGPROB),
                    bytes=list(token.bytes),
                    top_logprobs=[
                        TopLogprob(token=a.text, logprob=max(a.logprob, LOWEST_LOGPROB), bytes=list(a.bytes))
                        for a in token.alternatives
                    ],
                )
                for token in tokens
            ]
        )


def _finish_reason(result: Result) -> Literal["stop", "length"]:
    """Raises ApiError where the answer was cut short: OpenAI has no finish_reason for that."""
    match result.finish_reason:
        case "cancelled":
            raise unavailable("The server is shutting down and cut this generation short.", "shutting_down")
        case "error":
            raise ApiError(500, f"The generation failed: {result.error}.", code="generation_failed")
        case reason:
            return reason


def _usage(result: Result) -> Usage:
    prompt, completion = len(result.prompt_ids), len(result.completion_ids)
    reasoning = {} if result.reasoning_tokens is None else {"reasoning_tokens": result.reasoning_tokens}
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=result.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=result.accepted_prediction_tokens or 0,
            rejected_prediction_tokens=result.rejected_prediction_tokens or 0,
            **reasoning,
        ),
    )
