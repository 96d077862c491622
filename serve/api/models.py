"""GET /v1/models and /v1/models/{id}: the one model this server has, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from serve.service import Service

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    service = _service(request)
    return {"object": "list", "data": [_model(service, name) for name in service.model_names]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    service = _service(request)
    service.check_model(name)
    return _model(service, name)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    service.require_model()
    return service


def _model(service: Service, name: str) -> dict[str, Any]:
    """`root` is the name that answers carry; `default_sampling_params` are those of a request that gives none."""
    info = service.backend.info()
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "draftloop",
        "root": service.model_name,
        "parent": None,
        "max_model_len": info.max_model_len,
        "default_sampling_params": info.sampling,
    }
