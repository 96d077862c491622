"""Answers on their way to a client: waited for while it is still there, or as server-sent events.

Knows no endpoint and no body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from backend.interface import BackendError
from serve.errors import ApiError, from_backend, internal

log = logging.getLogger(__name__)
T = TypeVar("T")
Line = str | ServerSentEvent


async def while_connected(request: Request, cancel: Callable[[], None], work: Awaitable[T]) -> T:
    """The work's result; a client that leaves before has `cancel` called and raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except BaseException:
        cancel()
        raise
    finally:
        working.cancel()
        leaving.cancel()


async def within(seconds: float, work: Awaitable[None]) -> None:
    """The work, or as much of it as is done after so many seconds (0: all of it): it must allow to be begun again.

    A stream whose first event is long in coming begins without it, so that its client hears that the server lives.
    """
    try:
        async with asyncio.timeout(seconds or None) as limit:
            await work
    except TimeoutError:
        if not limit.expired():
            raise


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event_stream(lines: AsyncIterator[Line], cancel: Callable[[], None]) -> EventSourceResponse:
    """A stream of events, each a data line; `cancel` is called when it ends, however it ends."""

    async def leave(_: AsgiMessage) -> None:
        cancel()

    # `leave` is called even where the client left before the first line was asked for.
    return _Events(lines, sep="\n", client_close_handler_callable=leave)


class _Events(EventSourceResponse):
    """A stream kept alive as often as its service is told to."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.ping_interval = scope["app"].state.service.keep_alive
        await super().__call__(scope, receive, send)


async def data_lines(chunks: AsyncIterator[str], cancel: Callable[[], None], what: str) -> AsyncIterator[Line]:
    """The chunks, an error body where they break off, and [DONE], as chat and text completions end."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield told(error, what).json()
    finally:
        cancel()
    yield "[DONE]"


class Answer(Protocol):
    """What a chat's and a text completion's answers have in common."""

    @property
    def id(self) -> str: ...

    def chunks(self) -> AsyncIterator[BaseModel]: ...

    async def whole(self) -> BaseModel: ...


async def sent(request: Request, answer: Answer, cancel: Callable[[], None], *, streamed: bool) -> Response:
    """The answer as its client wants it; fields that were never given do not appear."""
    if streamed:
        lines = (chunk.model_dump_json(exclude_unset=True) async for chunk in answer.chunks())
        return event_stream(data_lines(lines, cancel, answer.id), cancel)
    whole = await while_connected(request, cancel, answer.whole())
    return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")


def told(error: Exception, what: str) -> ApiError:
    """What a client that is already being answered hears of an error; `what` names the answer in the log."""
    match error:
        case ApiError():
            return error
        case BackendError():
            return from_backend(error)
        case _:
            log.error("answer %s could not be written", what, exc_info=error)
            return internal()
