"""The live page at /, its files, and GET /v1/live: what it shows, as server-sent events, one a second.

Knows files and lines; what the lines say is made elsewhere.
"""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response
from sse_starlette import EventSourceResponse

from serve.dashboard import FILES
from serve.live import Live
from serve.streaming import event_stream

# Whatever a model, a drafter or an answer may be called or say, it runs nothing and reaches nobody.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter()


@router.get("/")
async def index() -> Response:
    return _file("index.html")


@router.get("/dashboard/{name}", include_in_schema=False)
async def dashboard_file(name: str) -> Response:
    return _file(name)


@router.get("/v1/live", include_in_schema=False)  # who tries all that the document names would never end
async def live(request: Request) -> EventSourceResponse:
    figures: Live = request.app.state.live
    return event_stream(figures.lines(), lambda: None)


def _file(name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    media_type, content = FILES[name]
    return Response(content, media_type=f"{media_type}; charset=utf-8", headers=HEADERS)
