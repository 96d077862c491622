"""The ASGI application: one service, its routes and its error bodies, wired together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from backend.interface import ChatBackend
from capture.writer import CaptureWriter
from serve import errors, openapi
from serve.api import admin, chat, completions, dashboard, drafters, health, models, proxy, responses, tokenize
from serve.auth import Authentication, Keyring
from serve.live import Live
from serve.middleware import REQUEST_ID, BodyLimits, RequestLog
from serve.service import Service
from serve.settings import Settings


def create_app(settings: Settings, backend: ChatBackend, capture: CaptureWriter | None) -> FastAPI:
    """An app over a backend and a capture writer, both not yet started; `app.state.service` tells when they are.

    Its lifespan starts them in the background, answering 503 meanwhile, and closes them at the end.
    """
    service = Service(settings, backend, capture)
    live = Live(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        live.start()
        yield
        await live.close()
        await service.close()

    app = FastAPI(
        title="draftloop",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # FastAPI's own document knows no body that an endpoint reads by itself
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    app.state.live = live
    errors.install(app)
    # Each is around those before it.
    app.add_middleware(BodyLimits, most_mib=settings.max_body, seconds=settings.body_timeout)
    app.add_middleware(Authentication, keyring=Keyring.of(settings), figures_are_open=settings.metrics_auth == "off")
    app.add_middleware(errors.Failsafe)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_middleware(RequestLog)
    generating = (chat, responses, completions, tokenize, models) if settings.upstream is None else (proxy,)
    for family in (*generating, admin, drafters, dashboard, health, openapi):
        app.include_router(family.router)
    return app
