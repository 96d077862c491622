"""The process around the app: its listening socket, its signals, its end.

Knows uvicorn and the service's life; knows no route and no option's meaning.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.service import Service, State

LAST_WORDS_SECONDS = 5  # for clients to take what they have been sent, once nothing runs any more
MOST_HEADER_BYTES = 65536
HEADER_SECONDS = 30  # for a request's headers to arrive

log = logging.getLogger(__name__)


class ListenError(Exception):
    """The address cannot be listened on; `str(error)` is one line."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens: clients who come before the server wait for it. Raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def url(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True)
class Certificate:
    """PEM files to serve HTTPS with. Raises ListenError where they cannot be used."""

    chain: str
    key: str

    def __post_init__(self) -> None:
        for path in (self.chain, self.key):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ListenError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            # Without a password openssl would ask the terminal for one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ListenError(
                f"{self.chain} and {self.key} are not a PEM certificate and its unencrypted key: {error}"
            ) from None


def config(app: FastAPI, certificate: Certificate | None = None) -> uvicorn.Config:
    """How uvicorn is to serve the app: it logs no requests, believes no header's word on who asks, limits headers."""
    return uvicorn.Config(
        app,
        lifespan="on",
        http=_Protocol,
        ws="none",
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        ssl_certfile=certificate.chain if certificate else None,
        ssl_keyfile=certificate.key if certificate else None,
    )


async def run(
    app: FastAPI,
    listener: socket.socket,
    *,
    grace: float,
    on_ready: Callable[[], None],
    certificate: Certificate | None = None,
) -> bool:
    """Serve until told to stop. Raises BackendError or CaptureError where the app cannot be loaded.

    The first SIGTERM or SIGINT drains: new requests get 503, running ones have `grace` seconds. A second one, or one
    while loading, ends the process at once. Returns whether every row reached the capture file.
    """
    # Streams end because their generations do, not because the server is about to.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    service: Service = app.state.service
    loop = asyncio.get_running_loop()

    async def drain() -> None:
        await service.drain(grace)
        server.should_exit = True

    ending: list[int] = []  # the signals so far
    tasks: list[asyncio.Task[None]] = []  # the loop itself holds tasks only weakly

    def stop() -> None:
        log.warning(
            "finishing %d running requests, at most %g s; a second signal stops at once", service.running, grace
        )
        tasks.append(asyncio.create_task(drain(), name="draining"))

    def on_signal(signum: int) -> None:
        if ending or service.state is State.LOADING:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        ending.append(signum)
        loop.call_soon_threadsafe(stop, context=Context())  # of no request, whichever was being served

    server = _Server(config(app, certificate), on_signal)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="serving")
    loading = asyncio.create_task(service.loaded(), name="loading")
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()  # the server has ended by itself: what it raises is what happened
    elif loading.exception() is None:
        on_ready()
    else:
        server.should_exit = True
    await serving
    if loading.done() and not loading.cancelled():
        loading.result()
    return service.flushed


class _Protocol(H11Protocol):
    """uvicorn's protocol with an end to its patience: it would wait for a request's headers for ever."""

    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._headers_due = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._headers_came()
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def _headers_came(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class _Server(uvicorn.Server):
    """uvicorn's server with its signals answered by ours; uvicorn offers no other place to say so."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal(sig)
