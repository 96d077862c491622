"""A running server as capture sees it: what it says of itself, and its answers to requests that it must not capture.

Knows HTTP and the server's errors; knows no row. Nothing is sent but what it is told to send.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from capture.records import CaptureError

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 3600.0  # an answer of many thousand tokens is told in one piece
PATIENCE = 30  # times to ask again where a line is full
PAUSE_SECONDS = 1.0


class ServerError(CaptureError):
    """The server cannot be asked at all."""


class RefusedError(CaptureError):
    """The server does not answer this request; another it may."""


@dataclass(frozen=True)
class Version:
    """What /version tells: whose answers these are (law L4), and how long they may be."""

    weights: str
    tokenizer: str
    chat_template: str
    build: str
    max_model_len: int


class Server:
    """Use as a context manager. May be used from several threads at once."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"X-Draftloop-Capture": "off", "User-Agent": "draftloop-capture"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ServerError(f"{url!r} with this key is no server to ask: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()

    def version(self) -> Version:
        """Raises ServerError where what answers there is no draftloop server that has loaded its model."""
        told = self.ask("GET", "/version")
        try:
            prints = told["fingerprints"]
            names = ("weights", "tokenizer", "chat_template", "build")
            return Version(**{name: str(prints[name]) for name in names}, max_model_len=int(told["max_model_len"]))
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self.url} is no draftloop server: its /version tells no fingerprints") from None

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises RefusedError where this request has none, ServerError where the server cannot be asked."""
        return self.ask("POST", path, body)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Any other request. Raises as `post` does; a GET has an answer or the server cannot be asked."""
        for _ in range(PATIENCE):
            try:
                response = self._client.request(method, path, json=body)
            except (httpx.UnsupportedProtocol, httpx.InvalidURL):
                raise ServerError(f"{self.url!r} is no URL like http://127.0.0.1:8000") from None
            except httpx.ConnectError as error:
                raise ServerError(f"no server answers at {self.url}: {error}") from error
            except httpx.HTTPError as error:
                raise ServerError(f"the server at {self.url} broke off: {error or type(error).__name__}") from error
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            time.sleep(PAUSE_SECONDS)
        if response.is_success:
            return self._json(response)
        message = f"{_message(response)} (status {response.status_code})"
        if method == "GET" or response.status_code in (401, 403, 404, 503):
            raise ServerError(f"the server at {self.url} does not answer {path}: {message}")
        raise RefusedError(message)

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            told = response.json()
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise ServerError(f"{self.url} is no draftloop server: {response.url.path} is no JSON object")
        return told


def _message(response: httpx.Response) -> str:
    """The server's own words on one line."""
    try:
        said = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = response.reason_phrase or "an error"
    return " ".join(said.split())[:300]
