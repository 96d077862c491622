"""The API in front of an upstream: chat, completions and models go there, and what comes back is told unchanged.

Knows no shape of an answer; validates no more of a request than must be understood to pass it on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from backend.interface import ChatEvent, ChatRequest, Result
from backend.upstream.backend import UpstreamBackend
from serve.answers import ended
from serve.errors import ApiError, model_not_found
from serve.generation import Generation
from serve.intake import receive
from serve.schemas.proxied import Proxied, ProxiedChat, ProxiedText
from serve.service import Service
from serve.streaming import data_lines, event_stream, while_connected

router = APIRouter()


@router.post("/v1/chat/completions")
async def pass_on_chat(request: Request) -> Response:
    return await _pass_on(request, ProxiedChat)


@router.post("/v1/completions")
async def pass_on_text(request: Request) -> Response:
    return await _pass_on(request, ProxiedText)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return _json(await _models(request))


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    listed = (await _models(request)).get("data")
    models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    for model in models:
        if model.get("id") == name:
            return _json(model)
    raise model_not_found(name, ", ".join(str(model.get("id")) for model in models))


async def _models(request: Request) -> Mapping[str, Any]:
    service: Service = request.app.state.service
    service.require_model()
    assert isinstance(service.backend, UpstreamBackend)
    return await service.backend.watch.models()


async def _pass_on(request: Request, schema: type[Proxied]) -> Response:
    service, call, origin = await receive(request, schema)
    service.admit(call.n or 1)
    asked = ChatRequest(
        id=origin.id, prompt="" if schema is ProxiedText else None, raw=origin.body, private=origin.opted_out
    )
    generation = service.generate(asked, replace(origin, model=call.model or origin.model))
    # Nothing is sent before the first chunk: until then a failure can still have its own status.
    events = generation.events()
    first = await while_connected(request, generation.cancel, _first(generation, events))
    if first.result is not None and (failure := _failure(first.result)) is not None:
        return _json(failure.body, failure.status, failure.headers)
    if call.stream:
        lines = data_lines(_lines(first, events), generation.cancel, origin.id)
        return event_stream(lines, generation.cancel)
    (answer,) = first.raw
    return _json(answer)


async def _first(generation: Generation, events: AsyncIterator[ChatEvent]) -> ChatEvent:
    """The first event that has anything to pass on, or is the end."""
    await generation.begin()
    event = await anext(events)
    while not event.raw and event.result is None:
        event = await anext(events)
    return event


async def _lines(event: ChatEvent, events: AsyncIterator[ChatEvent]) -> AsyncIterator[str]:
    while True:
        for chunk in event.raw:
            yield _text(chunk)
        if event.result is not None:
            break
        event = await anext(events)
    if (failure := _failure(event.result)) is not None:
        yield _text(failure.body)


@dataclass(frozen=True)
class _Failure:
    """What a client is told where the answer is not whole."""

    body: Mapping[str, Any]
    status: int
    headers: Mapping[str, str]


def _failure(result: Result) -> _Failure | None:
    """The upstream's own error, if it gave one. Raises ApiError where it was we who cut the answer short."""
    away = result.upstream
    assert away is not None
    if away.status != 200:
        body = away.error_body or ApiError(away.status, str(result.error), code="upstream_failed").body()
        return _Failure(body, away.status, away.headers)
    for one in (result, *away.siblings):
        if one.finish_reason == "cancelled":
            ended(one)
    return None


def _json(answer: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_text(answer), status, headers, media_type="application/json")


def _text(answer: Mapping[str, Any]) -> str:
    text = json.dumps(answer, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON has as an escape alone
        return json.dumps(answer)
    return text
