"""POST /v1/responses, streamed and not: OpenAI's newer shape of one exchange, without a memory between exchanges.

Knows no sampling default and no text rule; what the client did not ask for is left to the backend.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response as HttpResponse
from pydantic import BaseModel, TypeAdapter
from sse_starlette import ServerSentEvent

from backend.interface import BackendError, ChatRequest, InvalidRequest, Result
from serve.answers import LOWEST_LOGPROB, ended, usage
from serve.errors import ApiError
from serve.generation import Generation
from serve.intake import receive
from serve.record import timings
from serve.response_items import Output, Told
from serve.schemas.response_output import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    Status,
    Usage,
)
from serve.schemas.responses import ResponsesRequest
from serve.streaming import event_stream, told, while_connected, within

router = APIRouter()
_EVENT = TypeAdapter(dict[str, Any])


@router.post("/v1/responses")
async def create_response(request: Request) -> HttpResponse:
    service, call, origin = await receive(request, ResponsesRequest)
    answer = _Answer(
        call=call,
        id=f"resp_{origin.id}",
        created=int(time.time()),
        model=service.model_name,
        generation=service.generate(_chat_request(call, origin.id), origin),
        output=Output(origin.id, logprobs=call.logprobs),
    )
    # Nothing is sent before the first event: until then a refusal can still have its own status.
    try:
        patience = service.keep_alive if call.stream else 0
        await while_connected(request, answer.generation.cancel, within(patience, answer.generation.begin()))
    except InvalidRequest as error:
        error.param = call.spelled(error.param)
        raise
    if call.stream:
        return event_stream(answer.lines(), answer.generation.cancel)
    response = await while_connected(request, answer.generation.cancel, answer.whole())
    return HttpResponse(response.model_dump_json(exclude_unset=True), media_type="application/json")


def _chat_request(call: ResponsesRequest, request_id: str) -> ChatRequest:
    return ChatRequest(
        id=request_id,
        messages=call.messages,
        sampling=call.sampling(),
        template_kwargs=call.template_kwargs,
        parallel_tool_calls=call.parallel_tool_calls is not False,
        thinking_budget=call.thinking_token_budget,
        drafter=call.drafter,
        cache_salt=call.cache_salt,
        **call.offered(),
    )


@dataclass(frozen=True)
class _Answer:
    """One answer on its way to a client."""

    call: ResponsesRequest
    id: str
    created: int
    model: str
    generation: Generation
    output: Output

    async def whole(self) -> Response:
        """The answer in one piece. Raises ApiError where it was cut short."""
        last: Told = {}
        async for step in self._steps():
            last = step
        response = last["response"]
        assert isinstance(response, Response)
        return response

    async def lines(self) -> AsyncIterator[ServerSentEvent]:
        """The stream's events, numbered. One that tells of an error is the last."""
        number = 0
        try:
            async for step in self._stream():
                yield _line(step, number)
                number += 1
        except Exception as error:
            said = told(error, self.id)
            yield _line({"type": "error", "code": said.code, "message": said.message, "param": said.param}, number)
        finally:
            self.generation.cancel()

    async def _stream(self) -> AsyncIterator[Told]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress")}
        try:
            async for step in self._steps():
                yield step
        except (ApiError, BackendError) as error:
            for step in self.output.close("incomplete"):
                yield step
            # A request whose turn came late can still be refused.
            code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
            failure = ResponseError(code=code, message=told(error, self.id).message)
            yield {"type": "response.failed", "response": self._response("failed", error=failure)}

    async def _steps(self) -> AsyncIterator[Told]:
        """All that happens until the answer is completed, or incomplete. Raises ApiError where it was cut short."""
        await self.generation.begin()
        async for event in self.generation.events():
            for step in self.output.add(event):
                yield step
            if (result := event.result) is not None:
                status: Literal["completed", "incomplete"] = "completed" if ended(result) == "stop" else "incomplete"
                for step in self.output.close(status):
                    yield step
                yield {"type": f"response.{status}", "response": self._response(status, result=result)}

    def _response(
        self, status: Status, *, result: Result | None = None, error: ResponseError | None = None
    ) -> Response:
        call, sampling = self.call, {} if result is None else result.sampling
        return Response(
            id=self.id,
            object="response",
            created_at=self.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            background=False,
            instructions=call.instructions,
            max_output_tokens=call.max_output_tokens,
            max_tool_calls=call.max_tool_calls,
            metadata=call.metadata or {},
            model=self.model,
            output=self.output.items.copy(),
            parallel_tool_calls=call.parallel_tool_calls is not False,
            previous_response_id=None,
            prompt_cache_key=call.prompt_cache_key,
            reasoning={"effort": None, "summary": None, **_given(call.reasoning)},
            safety_identifier=call.safety_identifier,
            service_tier="default",
            store=False,
            temperature=sampling.get("temperature", call.temperature),
            text={"format": {"type": "text"}, **_given(call.text)},
            tool_choice=_given(call.tool_choice)
            if isinstance(call.tool_choice, BaseModel)
            else call.tool_choice or "auto",
            tools=[tool.model_dump() for tool in call.tools or ()],
            top_logprobs=call.top_logprobs or 0,
            top_p=sampling.get("top_p", call.top_p),
            truncation="disabled",
            usage=None if result is None else _usage(result),
            user=call.user,
            **({} if result is None else _last(result, told_ids=bool(call.return_token_ids))),
        )


def _given(part: BaseModel | None) -> dict[str, Any]:
    """A part of the request as it was given."""
    return {} if part is None else part.model_dump(by_alias=True, exclude_unset=True)


def _last(result: Result, *, told_ids: bool) -> dict[str, Any]:
    """What is told at the end beside the answer itself."""
    last: dict[str, Any] = {"timings": timings(result)}
    if told_ids:
        last |= {"prompt_token_ids": result.prompt_ids, "token_ids": result.completion_ids}
        last["token_logprobs"] = [max(logprob, LOWEST_LOGPROB) for logprob in result.logprobs]
    return last


def _usage(result: Result) -> Usage:
    counted = usage([result])
    return Usage(
        input_tokens=counted.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=counted.prompt_tokens_details.cached_tokens),
        output_tokens=counted.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=counted.completion_tokens_details.reasoning_tokens or 0
        ),
        total_tokens=counted.total_tokens,
    )


def _line(step: Told, number: int) -> ServerSentEvent:
    data = _EVENT.dump_json({**step, "sequence_number": number}, exclude_unset=True).decode()
    return ServerSentEvent(data, event=step["type"], sep="\n")
