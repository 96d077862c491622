"""GET /openapi.json: what the API takes and answers, statuses included, written from the models that decide it.

Knows every endpoint by its function's name. No page shows the document: such pages load their scripts from afar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from serve.api.health import version_of_package
from serve.auth import OPEN
from serve.schemas.chat import ChatCompletion, ChatCompletionRequest
from serve.schemas.completions import Completion, CompletionRequest
from serve.schemas.drafters import Drafters, LoadDrafterRequest, NewDrafter, PromoteRequest
from serve.schemas.proxied import ProxiedChat, ProxiedText
from serve.schemas.response_output import Response
from serve.schemas.responses import ResponsesRequest
from serve.schemas.tokenize import (
    AppliedTemplate,
    ApplyTemplateRequest,
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from serve.service import Service

REFS = "#/components/schemas/{model}"
ERRORS = {
    400: "The request cannot be served as asked; param names what is wrong.",
    401: "A correct API key is needed.",
    403: "Not for this client, or not allowed by the server's settings.",
    404: "There is no such model, or nothing of this kind.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not sent as application/json.",
    429: "Too many requests wait already; Retry-After says when to try again.",
    500: "The server or the generation failed.",
    502: "The upstream failed.",
    503: "No request can start now; Retry-After says when to try again.",
    504: "It took longer than the server allows.",
}
UPSTREAMS = "default"  # an upstream's own errors are passed on, whatever their status
TAKES = (400, 404, 408, 413, 415, 503)  # what every endpoint with a body may say
OPERATES = (400, 403, 408, 413, 415, 503)
GENERATES = (*TAKES, 403, 429, 500, 504)


class Error(BaseModel):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's, whatever went wrong."""

    error: Error


@dataclass(frozen=True)
class Operation:
    """What FastAPI cannot see: a body that the endpoint reads by itself, what it answers, its other statuses.

    `answer`: of `done`; None where it is any JSON object. `unfit`: what a 503 means where it is no error.
    """

    errors: tuple[int | str, ...] = ()
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    media_types: tuple[str, ...] = ("application/json",)
    unfit: str | None = None
    done: int = 200


BOTH = ("application/json", "text/event-stream")
OPERATIONS: Mapping[str, Operation] = {
    "create_chat_completion": Operation(GENERATES, ChatCompletionRequest, ChatCompletion, BOTH),
    "create_response": Operation(GENERATES, ResponsesRequest, Response, BOTH),
    "create_completion": Operation(GENERATES, CompletionRequest, Completion, BOTH),
    "tokenize": Operation(TAKES, TokenizeRequest, Tokenized),
    "detokenize": Operation(TAKES, DetokenizeRequest, Detokenized),
    "apply_template": Operation(TAKES, ApplyTemplateRequest, AppliedTemplate),
    "tokenizer_info": Operation((404, 503)),
    "pass_on_chat": Operation((*GENERATES, 502, UPSTREAMS), ProxiedChat, None, BOTH),
    "pass_on_text": Operation((*GENERATES, 502, UPSTREAMS), ProxiedText, None, BOTH),
    "list_models": Operation((502, 503)),
    "retrieve_model": Operation((404, 502, 503)),
    "engine": Operation((403, 503)),
    "list_drafters": Operation((400, 403, 503), None, Drafters),
    "load_drafter": Operation((*OPERATES, 500), LoadDrafterRequest, NewDrafter, done=201),
    "promote_drafter": Operation(OPERATES, PromoteRequest, Drafters),
    "roll_back_drafter": Operation((400, 403, 503), None, Drafters),
    "unload_drafter": Operation((400, 403, 404, 503), None, Drafters),
    "health": Operation(unfit="The process is to be started anew."),
    "ready": Operation(unfit="A request sent now would not start."),
    "tell_version": Operation((503,)),
    "metrics": Operation(media_types=("text/plain",)),
    "index": Operation(media_types=("text/html",)),
}

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def tell_openapi(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    document = get_openapi(title="draftloop", version=version_of_package(), routes=request.app.routes)
    told = [(path, one) for path, methods in document["paths"].items() for one in methods.values()]
    known = [OPERATIONS.get(one["operationId"], Operation()) for _, one in told]
    schemas, refs = _schemas(known, strict=service.unknown_fields == "refuse")
    document["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    for (path, one), operation in zip(told, known, strict=True):
        one |= _told(operation, refs, guarded=path not in OPEN)
    return document


Refs = Mapping[tuple[type[Any], JsonSchemaMode], dict[str, Any]]


def _schemas(operations: Iterable[Operation], *, strict: bool) -> tuple[dict[str, Any], Refs]:
    """The schemas of everything sent and answered, by name, and how each model is referred to.

    `strict`: fields that nobody knows are refused, not dropped.
    """
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorBody, "serialization")]
    for one in operations:
        wanted += [(one.body, "validation")] if one.body is not None else []
        wanted += [(one.answer, "serialization")] if one.answer is not None else []
    refs, definitions = models_json_schema(list(dict.fromkeys(wanted)), ref_template=REFS)
    schemas = definitions["$defs"]
    if not strict:
        for schema in schemas.values():
            schema.pop("additionalProperties", None)
    return schemas, refs


def _told(operation: Operation, refs: Refs, *, guarded: bool) -> dict[str, Any]:
    """An operation as the document has it; `guarded`: it may need a key, which is for the server's settings to say."""
    error = {"application/json": {"schema": refs[ErrorBody, "serialization"]}}
    answer = {"type": "object"} if operation.answer is None else refs[operation.answer, "serialization"]
    # OpenAPI 3.1 has no words for what stands in a stream's events.
    shapes = {BOTH[0]: {"schema": answer}, BOTH[1]: {}}
    answers = {kind: shapes.get(kind, {"schema": {"type": "string"}}) for kind in operation.media_types}
    responses: dict[str, Any] = {str(operation.done): {"description": "Done.", "content": answers}}
    for status in (*operation.errors, *((401,) if guarded else ())):
        responses[str(status)] = {"description": ERRORS.get(status, "The upstream's own error."), "content": error}
    if operation.unfit is not None:
        responses["503"] = {"description": operation.unfit, "content": answers}
    told: dict[str, Any] = {"responses": responses}
    if operation.body is not None:
        content = {"application/json": {"schema": refs[operation.body, "validation"]}}
        told["requestBody"] = {"required": True, "content": content}
    if guarded:
        told["security"] = [{"key": []}, {}]
    return told
