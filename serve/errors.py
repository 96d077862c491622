"""Every failure as OpenAI's error body: {"error": {"message", "type", "param", "code"}} with its HTTP status.

Knows which failure is whose fault; knows nothing of what was being done when it happened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from backend.interface import BackendError, BackendUnavailable, InvalidRequest

RETRY_AFTER_SECONDS = 5

# pydantic's names for what is wrong, where OpenAI has a code of its own; the rest is "invalid_value".
CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}


class ApiError(Exception):
    """A failure with everything its response needs. `type` is invalid_request_error or server_error."""

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
        self.type = "invalid_request_error" if status < 500 else "server_error"
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
        case _ if param is None:
            message = "The request body must be a JSON object."
        case _:
            message = f"Invalid value for '{param}': {said[:1].lower()}{said[1:]}."
    code = "invalid_type" if kind.endswith("_type") else CODES.get(kind, "invalid_value")
    return ApiError(400, message, param=param, code=code)


def install(app: FastAPI) -> None:
    """Answer everything that can go wrong in the app with an error body."""

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

    async def on_anything_else(_: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again once this is sent, so the traceback reaches the server's log.
        return internal().response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(BackendError, on_backend_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_anything_else)
