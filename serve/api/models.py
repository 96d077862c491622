"""GET /v1/models and /v1/models/{id}: the one model this server has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from serve.service import Service

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(request)]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    model = _model(request)
    service: Service = request.app.state.service
    service.check_model(name)
    return model


def _model(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.require_model()
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "draftloop",
        "max_model_len": service.backend.info().max_model_len,
    }
