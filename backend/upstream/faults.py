"""Everything that can go wrong at an upstream, as what the row and the client are told of it.

Knows httpx's errors, statuses and the shapes of error bodies; knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

MOST_ERROR_BYTES = 1024 * 1024
MOST_QUOTED = 2000  # characters of a body that is no error body


@dataclass(frozen=True)
class Failure:
    """Why there is no whole answer. `body`: the upstream's own error, to be passed on as it is.

    `status` and `headers` are for a client that has heard nothing yet.
    """

    message: str
    status: int = 502
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class UpstreamFault(Exception):
    """Ends a request; told apart by `failure` alone."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def parsed(data: bytes) -> dict[str, Any] | None:
    """A JSON object; None for everything else."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def limited_body(response: httpx.Response, most_bytes: int) -> bytes:
    """The whole body. Raises UpstreamFault where it is too long."""
    received = bytearray()
    async for piece in response.aiter_bytes():
        received += piece
        if len(received) > most_bytes:
            raise UpstreamFault(Failure("The upstream's answer is too long."))
    return bytes(received)


def broken(error: httpx.HTTPError, timeout: float) -> Failure:
    """A connection that could not be made, or ended before the answer did."""
    match error:
        case httpx.ConnectTimeout():
            return Failure("The upstream could not be connected to in time.", 504)
        case httpx.ConnectError():
            return Failure("The upstream cannot be reached.")
        case httpx.TimeoutException():
            return Failure(f"The upstream was silent for {timeout:g} s.", 504)
        case httpx.DecodingError():
            return Failure("The upstream's answer cannot be decoded.")
        case _:
            return Failure("The upstream broke off the connection.")


def refusal(response: httpx.Response, data: bytes) -> Failure:
    """An answer whose status is no success: a client's fault is passed on, ours or the upstream's own is a 502."""
    status, body = response.status_code, parsed(data)
    if status == 401:  # the key is ours, whatever the client's is; some servers quote it
        return Failure("The upstream answered 401: it wants another key than this server has for it.")
    said = _message(body) or data.decode("utf-8", "replace").strip()[:MOST_QUOTED]
    message = f"The upstream answered {status}" + (f": {said}" if said else ".")
    headers = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
    if 400 <= status < 500:
        return Failure(message, status, body, headers)
    if status < 400:
        return Failure(f"The upstream answered {status}, which is neither an answer nor an error.")
    return Failure(message, status if status in (503, 504) else 502, headers=headers)


def in_band(answer: Mapping[str, Any]) -> Failure | None:
    """The error that stands where an answer, or a chunk of one, should be."""
    error = answer.get("error")
    if not error and answer.get("object") != "error":
        return None
    code = error.get("code") if isinstance(error, Mapping) else answer.get("code")
    status = code if type(code) is int and 400 <= code < 500 else 502
    return Failure(f"The upstream failed: {_message(answer) or 'it does not say why'}", status, answer)


async def not_streamed(response: httpx.Response) -> Failure:
    """Something other than events where events were asked for."""
    body = parsed(await limited_body(response, MOST_ERROR_BYTES))
    return (body and in_band(body)) or Failure("The upstream did not answer with a stream.")


def _message(body: Mapping[str, Any] | None) -> str | None:
    """What an error body says, in the shapes of OpenAI, vLLM, llama.cpp and FastAPI."""
    if body is None:
        return None
    error = body.get("error")
    for said in (error.get("message") if isinstance(error, Mapping) else error, body.get("message")):
        if isinstance(said, str) and said:
            return said
    return json.dumps(body["detail"])[:MOST_QUOTED] if "detail" in body else None
