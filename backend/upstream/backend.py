"""ChatBackend over another OpenAI server: the client's body goes there, the upstream's answer comes back unchanged.

Knows HTTP as a client and OpenAI's shapes as far as our books need them; serves nothing and generates nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx

from backend.interface import (
    BackendError,
    BackendUnavailable,
    ChatEvent,
    ChatRequest,
    EngineStats,
    Fingerprints,
    InvalidRequest,
    ModelInfo,
)
from backend.upstream.answer import DRAFTER, Books
from backend.upstream.events import EventReader, EventTooLong
from backend.upstream.faults import (
    MOST_ERROR_BYTES,
    Failure,
    UpstreamFault,
    broken,
    in_band,
    limited_body,
    not_streamed,
    parsed,
    refusal,
)
from backend.upstream.passage import Passage
from backend.upstream.request import Extras, Manners, compose, hide
from backend.upstream.watch import Watch

CONNECT_SECONDS = 10.0
LETTING_GO_SECONDS = 1.0  # for what follows [DONE]: nothing, in all that is known
LAST_WORDS_SECONDS = 5.0  # after the last choice has ended, for its usage and [DONE]
# Servers close a connection after 5 idle seconds (uvicorn, llama.cpp); a request sent at that moment would be lost.
KEEP_ALIVE_SECONDS = 4.0
MOST_EVENT_BYTES = 32 * 1024 * 1024
MOST_ANSWER_BYTES = 256 * 1024 * 1024
NO_STREAMS = ("application/json", "text/html")  # whatever else it is called, it may be events
CHAT, TEXT = "/chat/completions", "/completions"
_UNENDED = "The upstream ended its answer without a finish_reason."

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class UpstreamOptions:
    """`url` of the API (its /v1 may be left out), `model` for requests that name none or one of the `aliases`."""

    url: str
    model: str | None = None
    aliases: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0  # seconds of silence
    look_every: float = 10.0  # seconds between two looks at how it is; its metrics are told for three times as long


class _Cancelled(Exception):
    """The request is wanted no more."""


class _Call:
    """One request on its way; what it waits for can be ended from outside."""

    def __init__(self) -> None:
        self._cancelled = False
        self._waiting: asyncio.Timeout | None = None

    def cancel(self) -> None:
        self._cancelled = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0)

    async def wait(self, work: Awaitable[T], seconds: float | None = None) -> T:
        """The work's result. Raises TimeoutError after so many seconds, _Cancelled at once when cancelled."""
        try:
            async with asyncio.timeout(0 if self._cancelled else seconds) as self._waiting:
                return await work
        except TimeoutError:
            if self._cancelled:
                raise _Cancelled from None
            raise
        finally:
            self._waiting = None


class UpstreamBackend:
    """One upstream behind the ChatBackend protocol. Requests are sent once: no fault is tried again."""

    def __init__(self, options: UpstreamOptions) -> None:
        self._options = options
        self._base = _base(options.url)
        self.watch = Watch(self._base, options.look_every)
        self._manners: defaultdict[str, Manners] = defaultdict(Manners)
        self._calls: dict[str, _Call] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> None:
        """Look at the upstream once; one that does not answer yet may do so later."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "draftloop"}
        if self._options.key:
            headers["Authorization"] = f"Bearer {self._options.key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            # One client's cookies are none of another's business.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx.Timeout(
                self._options.timeout, connect=min(CONNECT_SECONDS, self._options.timeout), pool=None
            ),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
        )
        await self.watch.start(self._client)

    async def close(self) -> None:
        await self.watch.close()
        for call in self._calls.values():
            call.cancel()
        if self._ending:
            await asyncio.wait(self._ending)
        if self._client is not None:
            await self._client.aclose()

    def ready(self) -> bool:
        return self.watch.reachable

    def failed(self) -> bool:
        return False

    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self._model or DRAFTER,
            max_model_len=self.watch.max_model_len(self._model),
            drafter=DRAFTER,
            draft_tokens=0,
            fingerprints=self._fingerprints(self._model),
            build={"upstream": self._base},
            probe={},
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._calls),
            waiting=0,
            kv_cache_usage=None,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            preemptions=0,
            draft_tokens=0,
            drafters=(),
            upstream_metrics=self.watch.metrics(),
        )

    def engine(self) -> Mapping[str, Any]:
        return {
            "upstream": self._base,
            "reachable": self.watch.reachable,
            "running": list(self._calls),
            "refused": {path: sorted(manners.refused) for path, manners in self._manners.items()},
        }

    async def tokenize(self, request: ChatRequest) -> tuple[tuple[int, ...], str]:
        raise InvalidRequest("The tokenizer is the upstream's; this server has none.")

    async def detokenize(self, ids: Sequence[int]) -> Sequence[bytes]:
        raise InvalidRequest("The tokenizer is the upstream's; this server has none.")

    def list_drafters(self) -> Mapping[str, Any]:
        raise _no_drafters()

    async def load_drafter(self, path: str, name: str | None, min_acceptance: float) -> Mapping[str, Any]:
        raise _no_drafters()

    async def unload_drafter(self, name: str) -> None:
        raise _no_drafters()

    def promote(self, drafter: str, canary: float | None = None) -> None:
        raise _no_drafters()

    def roll_back(self) -> None:
        raise _no_drafters()

    def cancel(self, request_id: str) -> None:
        if (call := self._calls.get(request_id)) is not None:
            call.cancel()

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        """Pass the request on. All that can go wrong is told by a result, whose row is kept."""
        raw = request.raw or {}
        call = self._calls[request.id] = _Call()
        books = Books(raw, self._fingerprints(self._name(raw) or raw.get("model")))
        end: list[Mapping[str, Any]] = []
        try:
            if raw.get("stream"):
                async with aclosing(self._streamed(request, call, books, end)) as events:
                    async for event in events:
                        yield event
            else:
                end.append(await self._whole(request, call, books))
            last = ChatEvent(result=books.result(), raw=tuple(end))
        except _Cancelled:
            last = ChatEvent(result=books.result("cancelled"), raw=tuple(end))
        except (httpx.HTTPError, UpstreamFault) as error:
            failure = error.failure if isinstance(error, UpstreamFault) else broken(error, self._options.timeout)
            self.watch.reachable = self.watch.reachable and not isinstance(error, httpx.ConnectError)
            # An upstream may quote the prompt: its words are for the row and the client alone.
            level = logging.WARNING if failure.status >= 500 else logging.INFO
            log.log(level, "request %s failed at the upstream, status %d", request.id, failure.status)
            last = ChatEvent(result=books.result("error", failure), raw=tuple(end))
        finally:
            del self._calls[request.id]
        yield last

    async def _whole(self, request: ChatRequest, call: _Call, books: Books) -> Mapping[str, Any]:
        """The upstream's one answer."""
        response, extras = await self._send(request, call)
        try:
            answer = parsed(await call.wait(limited_body(response, MOST_ANSWER_BYTES)))
        finally:
            await response.aclose()
        if answer is None:
            raise UpstreamFault(Failure("The upstream answered with something that is not a JSON object."))
        if (failure := in_band(answer)) is not None:
            raise UpstreamFault(failure)
        books.take(answer)
        if not books.begun:
            raise UpstreamFault(Failure("The upstream answered without any choice."))
        if not books.ended:
            raise UpstreamFault(Failure(_UNENDED))
        hide(answer, extras)
        return answer | {"id": _answer_id(request)}

    async def _streamed(
        self, request: ChatRequest, call: _Call, books: Books, end: list[Mapping[str, Any]]
    ) -> AsyncGenerator[ChatEvent]:
        """The chunks as they arrive; those that must wait for the row are left in `end`."""
        response, extras = await self._send(request, call)
        reader, passage = EventReader(MOST_EVENT_BYTES), Passage(books, _answer_id(request), extras)
        pieces = response.aiter_bytes()
        try:
            if response.headers.get("content-type", "").startswith(NO_STREAMS):
                raise UpstreamFault(await call.wait(not_streamed(response)))
            while not passage.done:
                piece = await call.wait(anext(pieces, None), LAST_WORDS_SECONDS if books.whole else None)
                event = passage.take(reader.finish() if piece is None else reader.feed(piece))
                if event.raw:
                    yield event
                if passage.failure is not None:
                    raise UpstreamFault(passage.failure)
                if piece is None:
                    break
        except (httpx.HTTPError, TimeoutError):
            if not books.whole:
                raise
            log.warning("request %s: the upstream's last words did not come", request.id)
        except EventTooLong:
            raise UpstreamFault(Failure("The upstream sent an event that is too long.")) from None
        finally:
            end += passage.held
            if passage.done:
                self._let_go(response, pieces)
            else:
                await response.aclose()
        if not (books.ended if passage.done else books.whole):
            raise UpstreamFault(Failure(_UNENDED))

    async def _send(self, request: ChatRequest, call: _Call) -> tuple[httpx.Response, Extras]:
        """The upstream's consent to answer, and what was asked of it beyond the client's own words."""
        raw = request.raw or {}
        stream = bool(raw.get("stream"))
        path = CHAT if request.prompt is None else TEXT
        manners = self._manners[path]
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if stream else "application/json",
            "X-Request-Id": request.id,
            **({"X-Draftloop-Capture": "off"} if request.private else {}),
        }
        asked = extras = manners.extras(raw, stream)
        while True:
            body = json.dumps(compose(raw, extras, self._name(raw)), ensure_ascii=False).encode()
            sent = self._http.build_request("POST", self._base + path, content=body, headers=headers)
            response = await call.wait(self._http.send(sent, stream=True))
            if response.is_success:
                self.watch.reachable = True
                manners.learn(extras, asked - extras)
                return response, extras
            try:
                said = await call.wait(limited_body(response, MOST_ERROR_BYTES))
            finally:
                await response.aclose()
            fewer = (
                manners.fewer(extras, said.decode("utf-8", "replace")) if response.status_code in (400, 422) else None
            )
            if fewer is None:
                raise UpstreamFault(refusal(response, said))
            extras = fewer

    def _let_go(self, response: httpx.Response, pieces: AsyncIterator[bytes]) -> None:
        """Close an answer that has ended. Its connection can be used again only if its body is read to the end."""

        async def let_go() -> None:
            try:
                async with asyncio.timeout(LETTING_GO_SECONDS):
                    async for _ in pieces:
                        pass
            except (TimeoutError, httpx.HTTPError):
                log.debug("a connection to the upstream is not used again")
            finally:
                await response.aclose()

        task = asyncio.create_task(let_go(), name="letting go of an answer")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            raise BackendUnavailable("The server has not started.")
        return self._client

    @property
    def _model(self) -> str | None:
        """The model of requests that name none."""
        return self._options.model or self.watch.first_model

    def _name(self, raw: Mapping[str, Any]) -> str | None:
        """The model's name to send; None where the client's own is right."""
        asked = raw.get("model")
        return self._model if asked is None or asked in self._options.aliases else None

    def _fingerprints(self, model: str | None) -> Fingerprints:
        """Nobody has hashed anything there: these name the place, and are like no hash."""
        place = f"upstream:{self._base}#{model or ''}"
        return Fingerprints(weights=place, tokenizer=place, chat_template=place, drafter=place, build=DRAFTER)


def _no_drafters() -> InvalidRequest:
    return InvalidRequest("This server stands before an upstream and has no drafters of its own.")


def _answer_id(request: ChatRequest) -> str:
    """Ours, by which the row is found."""
    return f"{'chatcmpl' if request.prompt is None else 'cmpl'}-{request.id}"


def _base(url: str) -> str:
    """The URL of the API, under which its endpoints are. Raises BackendError."""
    try:
        parts = httpx.URL(url)
        reachable = bool(parts.host) and (parts.port is None or 0 < parts.port < 2**16)
        named = reachable and parts.scheme in ("http", "https")
    except (httpx.InvalidURL, ValueError):
        named = False
    if not named:
        raise BackendError("the upstream must be a URL like http://127.0.0.1:8001/v1")
    if parts.userinfo or parts.query or parts.fragment:
        raise BackendError("the upstream's URL may hold neither a user, nor a query, nor a fragment")
    return str(parts.copy_with(path=parts.path.rstrip("/") or "/v1"))
