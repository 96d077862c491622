"""What happens to every request whatever its endpoint: an id and a line in the log, limits on its body.

Plain ASGI; knows no endpoint, no body's meaning and no key.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import logs
from serve.errors import ApiError

REQUEST_ID = "X-Request-Id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
MIB = 2**20


class RequestLog:
    """Gives every request an id, the client's own where it is a sane one, and logs a line when all of it has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = asked if _SANE_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}"
        line = logs.begin(request_id, scope["method"], scope["path"])
        scope.setdefault("state", {})["request_id"] = request_id

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status, line.first_byte = message["status"], time.perf_counter()
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)
            line.answered = time.perf_counter()

        try:
            await self._app(scope, receive, stamped)
        finally:
            line.answered = line.answered or time.perf_counter()
            line.client = scope["state"].get("client")
            await line.settled()
            logs.finish(line)


class BodyLimits:
    """Ends requests whose body is too large or takes too long: what reads it gets an ApiError 413 or 408."""

    def __init__(self, app: ASGIApp, most_mib: float, seconds: float) -> None:
        self._app, self._most, self._seconds = app, int(most_mib * MIB), seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # who waits on is told when the client leaves, and may wait for long
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # The rest of the body is not waited for either.
                raise ApiError(
                    408,
                    f"The body did not arrive within {self._seconds:g} s.",
                    code="request_timeout",
                    headers={"Connection": "close"},
                ) from None
            received += len(message.get("body", b""))
            if received > self._most:
                raise ApiError(413, f"The body is larger than {self._most} bytes.", code="request_too_large")
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)
