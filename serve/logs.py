"""The process' log: its format, and the one line that every request leaves, whoever knew what of it.

Never told what a request or an answer says: names, sizes and durations only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from backend.interface import Result

SETTLING_SECONDS = 10.0  # for generations to end whose client has left

log = logging.getLogger(__name__)


@dataclass
class RequestLine:
    """What is logged of one request. Generations of it join by `began` and `ended`, which run in its context."""

    id: str
    method: str
    path: str
    arrived: float = field(default_factory=time.perf_counter)
    client: str | None = None  # the name of its API key
    status: int | None = None  # None where nothing was sent
    first_byte: float | None = None
    answered: float | None = None
    generations: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def began(self, generation: str, task: asyncio.Task[None]) -> None:
        self.generations[generation] = task

    def ended(self, result: Result) -> None:
        self.results.append(result)

    async def settled(self) -> None:
        """Wait until its generations have ended: they outlive a client that left."""
        if self.generations:
            await asyncio.wait(self.generations.values(), timeout=SETTLING_SECONDS)

    def fields(self) -> dict[str, Any]:
        """What is known, JSON-ready; of several choices the sums."""
        told: dict[str, Any] = {
            "request_id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "first_byte_ms": self._ms(self.first_byte),
            "duration_ms": self._ms(self.answered),
        }
        if self.generations:
            told["generations"] = list(self.generations)
        if self.results:
            told |= {
                "queue_ms": round(max(result.timings.queue_ms for result in self.results), 3),
                "prompt_tokens": sum(result.prompt_count for result in self.results),
                "cached_tokens": sum(result.cached_tokens for result in self.results),
                "completion_tokens": sum(result.completion_count for result in self.results),
                "finish": [result.finish_reason for result in self.results],
            }
        return told

    def text(self) -> str:
        """The same for people."""
        told = self.fields()
        tokens = ""
        if self.results:
            tokens = f", {told['prompt_tokens']} + {told['completion_tokens']} tokens, {'/'.join(told['finish'])}"
        client = f", client {self.client}" if self.client else ""
        return f"{self.method} {self.path} {self.status or '-'}, {told['duration_ms']} ms{tokens}{client}"

    def _ms(self, at: float | None) -> float | None:
        return None if at is None else round((at - self.arrived) * 1000, 3)


current: ContextVar[RequestLine | None] = ContextVar("current", default=None)


def begin(request_id: str, method: str, path: str) -> RequestLine:
    """The line of a request; what is logged in this context from now on carries its id."""
    # A path is the client's: it must not end a line, or colour a terminal.
    line = RequestLine(request_id, method, quote(path, safe="/:@-._~+,=&"))
    current.set(line)
    return line


def finish(line: RequestLine) -> None:
    log.info("%s", line.text(), extra={"request": line.fields()})


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Log to stderr from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # They would log every chunk of every answer, and every look at an upstream.
    for name, least in (("sse_starlette", logging.INFO), ("httpcore", logging.INFO), ("httpx", logging.WARNING)):
        logging.getLogger(name).setLevel(max(least, logging.getLogger().level))


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        line = current.get()
        return super().formatMessage(record) + (f" [{line.id}]" if line else "")


class _Json(logging.Formatter):
    """An object a line: time, level, logger, message, and of a request its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = current.get()
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if line is not None:
            told["request_id"] = line.id
        request: Mapping[str, Any] = getattr(record, "request", {})
        told |= request
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=True, default=str)
