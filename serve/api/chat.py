"""POST /v1/chat/completions, streamed and not: a request becomes generations, their events become OpenAI's shapes.

Knows no sampling default and no text rule; what the client did not ask for is left to the backend.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from backend.interface import ChatRequest, InvalidRequest
from serve.chat_answer import ChatAnswer
from serve.choices import Choices, seeded
from serve.intake import receive
from serve.record import Origin
from serve.schemas.chat import ChatCompletionRequest
from serve.schemas.tools import offered
from serve.streaming import sent, while_connected, within

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    service, call, origin = await receive(request, ChatCompletionRequest)
    asked = _chat_request(call, origin.id)
    try:
        # The backend tells the prompt's ids at the end only; a stream tells them first.
        told = call.stream and call.return_token_ids
        prompt_ids = (await service.backend.tokenize(asked))[0] if told else ()
        origins = [origin, *(origin.sibling() for _ in range(1, call.n or 1))]
        choices = Choices(service.generate_all([(_choice(asked, i, one), one) for i, one in enumerate(origins)]))
        # Nothing is sent before the first event: until then a refusal can still have its own status.
        patience = service.keep_alive if call.stream else 0
        await while_connected(request, choices.cancel, within(patience, choices.begin()))
    except InvalidRequest as error:
        error.param = call.spelled(error.param)
        raise
    answer = ChatAnswer(
        call=call,
        id=f"chatcmpl-{origin.id}",
        model=service.model_name,
        system_fingerprint=service.system_fingerprint,
        choices=choices,
        prompt_ids=prompt_ids,
    )
    return await sent(request, answer, choices.cancel, streamed=bool(call.stream))


def _choice(asked: ChatRequest, index: int, origin: Origin) -> ChatRequest:
    return replace(asked, id=origin.id, sampling=replace(asked.sampling, choice=index))


def _chat_request(call: ChatCompletionRequest, request_id: str) -> ChatRequest:
    return ChatRequest(
        id=request_id,
        messages=[message.plain() for message in call.messages],
        sampling=seeded(call.sampling(), call.n or 1),
        template_kwargs=call.template_kwargs,
        **offered(call.tools, call.tool_choice),
        parallel_tool_calls=call.parallel_tool_calls is not False,
        thinking_budget=call.budget,
        prediction=None if call.prediction is None else call.prediction.content,
        drafter=call.drafter,
        cache_salt=call.cache_salt,
    )
