"""Every failure as OpenAI's error body: {"error": {"message", "type", "param", "code"}} with its HTTP status.

Knows which failure is whose fault; knows nothing of what was being done when it happened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.interface import BackendError, BackendUnavailable, GenerationTimedOut, InvalidRequest

RETRY_AFTER_SECONDS = 5
LINE_IS_LONG_SECONDS = 1  # a place in the line is free again sooner than a server is up

log = logging.getLogger(__name__)

# pydantic's names for what is wrong, where OpenAI has a code of its own; the rest is "invalid_value".
CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}


class ApiError(Exception):
    """A failure with everything its response needs.

    `type` is invalid_request_error, rate_limit_error or server_error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, in its envelope."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> str:
        return json.dumps(self.body(), ensure_ascii=False)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def unavailable(message: str, code: str | None = None) -> ApiError:
    """503: try again, here or elsewhere."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def line_is_full(most: int) -> ApiError:
    """429: too many wait already."""
    return ApiError(
        429,
        f"{most} requests or choices of requests wait already; try again later.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(LINE_IS_LONG_SECONDS)},
    )


def wrong_key() -> ApiError:
    """401, the same for a key that is wrong and for none."""
    return ApiError(
        401,
        "A correct API key is needed, as Authorization: Bearer KEY or x-api-key: KEY.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(name: str, served: str) -> ApiError:
    return ApiError(
        404, f"The model '{name}' does not exist; this server has '{served}'.", param="model", code="model_not_found"
    )


def drafter_choice_not_allowed() -> ApiError:
    return ApiError(
        403,
        "'drafter' may not be chosen by requests; the server was started without --allow-drafter-choice.",
        param="drafter",
        code="drafter_choice_not_allowed",
    )


def internal() -> ApiError:
    """500 for a fault of ours; what it was is in the server's log alone."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def from_backend(error: BackendError) -> ApiError:
    """What a backend refused or failed at; its messages are fit for a user."""
    match error:
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param, code=error.code or "invalid_value")
        case BackendUnavailable():
            return unavailable(str(error))
        case GenerationTimedOut():
            return ApiError(504, str(error), code="request_timeout")
        case _:
            return ApiError(500, str(error), code="generation_failed")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a request body, naming the field as OpenAI does: messages[0].content."""
    first = error.errors(include_url=False)[0]
    loc = (*first["loc"], *first.get("ctx", {}).get("at", ()))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".") or None
    kind, said = first["type"], first["msg"]
    match kind:
        case "missing":
            message = f"Missing required parameter: '{param}'."
        case "extra_forbidden":
            message = f"Unknown parameter: '{param}'."
        case "unsupported_parameter":
            message = f"'{param}' {said}."
        case "model_type" if param is None:
            message = "The request body must be a JSON object."
        case _ if param is None:
            message = f"The request body {said}."
        case _:
            message = f"Invalid value for '{param}': {said[:1].lower()}{said[1:]}."
    code = "invalid_type" if kind.endswith("_type") else CODES.get(kind, "invalid_value")
    return ApiError(400, message, param=param, code=code)


class Failsafe:
    """The last to see a failure, of whatever is inside: plain ASGI, so that its answer passes what is outside."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http":
                raise
            told = error if isinstance(error, ApiError) else internal()
            if told is not error:
                log.exception("%s %r failed", scope["method"], scope["path"])
            if started:
                raise  # all that is left is to break off
            await told.response()(scope, receive, send)


def install(app: FastAPI) -> None:
    """Answer everything that can go wrong in a route with an error body; what is left is for Failsafe."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_backend_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, BackendError)
        return from_backend(error).response()

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = request.url.path
        match error.status_code:
            case 404:
                known = ApiError(404, f"There is nothing at {path}.", code="unknown_url")
            case 405:
                known = ApiError(405, f"{path} does not take {request.method}.", code="method_not_allowed")
            case status:
                known = ApiError(status, str(error.detail))
        known.headers = error.headers
        return known.response()

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; it stands in the log

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(BackendError, on_backend_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
