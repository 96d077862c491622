"""/tokenize, /detokenize, /apply-template, /tokenizer_info: prompts without an answer, for who counts and looks close.

Knows no tokenizer; both vLLM's and llama.cpp's clients are answered.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request

from backend.interface import ChatRequest, InvalidRequest
from capture.records import new_id
from serve import body
from serve.errors import ApiError
from serve.schemas.tokenize import (
    AppliedTemplate,
    ApplyTemplateRequest,
    Conversation,
    Detokenized,
    DetokenizeRequest,
    Piece,
    Tokenized,
    TokenizeRequest,
)
from serve.service import Service

router = APIRouter()
Call = TypeVar("Call", TokenizeRequest, DetokenizeRequest, ApplyTemplateRequest)


@router.post("/tokenize", response_model_exclude_unset=True)
async def tokenize(request: Request) -> Tokenized:
    service, call = await _receive(request, TokenizeRequest)
    try:
        ids, _ = await service.backend.tokenize(_prompt(call))
    except InvalidRequest as error:
        if error.param == "prompt" and call.content is not None:
            error.param = "content"
        raise
    pieces = await service.backend.detokenize(ids) if call.return_token_strs or call.with_pieces else ()
    told = (
        [Piece(id=token, piece=_piece(data)) for token, data in zip(ids, pieces, strict=True)]
        if call.with_pieces
        else list(ids)
    )
    return Tokenized(
        count=len(ids),
        max_model_len=service.backend.info().max_model_len,
        tokens=told,
        token_strs=[_text(data) for data in pieces] if call.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Detokenized:
    service, call = await _receive(request, DetokenizeRequest)
    text = _text(b"".join(await service.backend.detokenize(call.tokens)))
    return Detokenized(prompt=text, content=text)


@router.post("/apply-template")
async def apply_template(request: Request) -> AppliedTemplate:
    service, call = await _receive(request, ApplyTemplateRequest)
    _, text = await service.backend.tokenize(_prompt(call))
    return AppliedTemplate(prompt=text)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.require_model()
    known = service.backend.info().tokenizer
    if not known:
        raise ApiError(404, "Nothing is known of the model's tokenizer here.", code="unknown_url")
    return dict(known)


async def _receive(request: Request, schema: type[Call]) -> tuple[Service, Call]:
    service: Service = request.app.state.service
    service.admit(0)
    call, _ = await body.read(request, schema, service.unknown_fields)
    service.check_model(call.model)
    return service, call


def _prompt(call: Conversation) -> ChatRequest:
    text = (call.prompt if call.content is None else call.content) if isinstance(call, TokenizeRequest) else None
    return ChatRequest(
        id=new_id(),
        messages=[message.plain() for message in call.messages or ()],
        template_kwargs=call.template_kwargs,
        tools=call.tools or (),
        prompt=text,
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _piece(data: bytes) -> str | list[int]:
    """Its bytes where it is no whole characters, as llama.cpp has it."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
