"""POST /v1/completions, streamed and not: raw prompts become generations, their events become OpenAI's legacy shapes.

Knows no tokenizer and no sampling default; what a prompt's text means is the backend's to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from backend.interface import ChatRequest, InvalidRequest
from serve.choices import Choices, seeded
from serve.completion_answer import CompletionAnswer, ReadPrompt
from serve.intake import receive
from serve.record import Origin
from serve.schemas.completions import CompletionRequest
from serve.service import Service
from serve.streaming import sent, while_connected, within

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    service, call, origin = await receive(request, CompletionRequest)
    asked = _requests(call, origin)
    try:
        prompts = await _read(service, call, [one for one, _ in asked])
        choices = Choices(service.generate_all(asked))
        # Nothing is sent before the first event of each prompt: until then a refusal can still have its own status.
        patience = service.keep_alive if call.stream else 0
        await while_connected(request, choices.cancel, within(patience, _begin(call, choices)))
    except InvalidRequest as error:
        error.param = call.spelled(error.param)
        raise
    answer = CompletionAnswer(
        call=call,
        id=f"cmpl-{origin.id}",
        model=service.model_name,
        system_fingerprint=service.system_fingerprint,
        choices=choices,
        prompts=prompts,
    )
    return await sent(request, answer, choices.cancel, streamed=bool(call.stream))


def _requests(call: CompletionRequest, origin: Origin) -> list[tuple[ChatRequest, Origin]]:
    """One generation for every choice of every prompt; each is a row of its own, which keeps its own prompt alone."""
    sampling = seeded(replace(call.sampling(), prompt_logprobs=call.prompt_alternatives), call.choices)
    asked: list[tuple[ChatRequest, Origin]] = []
    for prompt in call.prompt:
        for choice in range(call.choices):
            at = origin.sibling() if asked else origin
            if len(call.prompt) > 1:
                at = replace(at, body={**origin.body, "prompt": prompt})
            request = ChatRequest(
                id=at.id,
                prompt=prompt,
                sampling=replace(sampling, choice=choice),
                drafter=call.drafter,
                cache_salt=call.cache_salt,
            )
            asked.append((request, at))
    return asked


async def _begin(call: CompletionRequest, choices: Choices) -> None:
    """Wait for the first choice of each prompt. Raises as that does, naming the prompt where there are several."""
    for index in range(len(call.prompt)):
        try:
            await choices.begin([index * call.choices])
        except InvalidRequest as error:
            if error.param == "prompt" and len(call.prompt) > 1:
                error.param = f"prompt[{index}]"
            raise


async def _read(service: Service, call: CompletionRequest, asked: Sequence[ChatRequest]) -> list[ReadPrompt]:
    """The prompts as the model reads them, where the answer tells of them before the backend does."""
    if not (call.echo or (call.stream and call.return_token_ids)):
        return [ReadPrompt()] * len(call.prompt)
    return [ReadPrompt(*await service.backend.tokenize(one)) for one in asked[:: call.choices]]
