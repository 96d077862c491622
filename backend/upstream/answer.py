"""An upstream's answer in our books: its chunks add up to one result for each choice.

Believes no shape: what is not as OpenAI has it is passed on to the client all the same, but not understood here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backend.interface import (
    ChatEvent,
    Fingerprints,
    FinishReason,
    Result,
    Timings,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    Upstream,
)
from backend.upstream.faults import Failure
from backend.upstream.request import choices

DRAFTER = "upstream"
# What a row keeps of the request's parameters; which others were in effect, the upstream alone knows.
PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)
MOST_TOKEN_ID = 2**31 - 1


@dataclass
class _Choice:
    """What has arrived of one choice."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_ids: tuple[int, ...] | None = None
    finish: str | None = None


class Books:
    """`take` each chunk, or the whole answer; the `result` can be asked for at any time."""

    def __init__(self, raw: Mapping[str, Any], fingerprints: Fingerprints) -> None:
        self._raw = raw
        self._fingerprints = fingerprints
        self._began = time.perf_counter()
        self._first_at = self._last_at = self._began
        self._choices: dict[int, _Choice] = {}
        self._usage: Mapping[str, Any] = {}
        self._told: dict[str, Any] = {}  # the upstream's own id, model and fingerprint
        self._prompts = _prompts(self._raw)
        n = self._raw.get("n")
        self._n = n if isinstance(n, int) and n > 0 else 1

    def take(self, chunk: Mapping[str, Any]) -> ChatEvent:
        """Write a chunk into the books; what it says, without the chunk itself."""
        self._told |= {name: chunk[name] for name in ("id", "model", "system_fingerprint") if chunk.get(name)}
        if isinstance(usage := chunk.get("usage"), Mapping):
            self._usage = usage
        said = [self._take_choice(choice, chunk) for choice in choices(chunk)]
        event = ChatEvent(
            content="".join(one.content for one in said),
            reasoning="".join(one.reasoning for one in said),
            tool_calls=tuple(delta for one in said for delta in one.tool_calls),
            tokens=tuple(token for one in said for token in one.tokens),
        )
        if event.content or event.reasoning or event.tool_calls or event.tokens:
            self._last_at = time.perf_counter()
            if self._first_at == self._began:
                self._first_at = self._last_at
        return event

    @property
    def begun(self) -> bool:
        """Whether any choice has been heard of."""
        return bool(self._choices)

    @property
    def ended(self) -> bool:
        """Whether every choice that began has ended, and one did."""
        return bool(self._choices) and all(choice.finish is not None for choice in self._choices.values())

    @property
    def whole(self) -> bool:
        """Whether as many choices have ended as were asked for: nothing of the answer can follow but its usage."""
        return self.ended and len(self._choices) >= self._n * len(self._prompts)

    def result(self, ended: FinishReason | None = None, failure: Failure | None = None) -> Result:
        """The first choice's result, the others' as its siblings; `ended`: how those ended that the upstream did not.

        None, where the answer is whole.
        """
        found = sorted(self._choices.items()) or [(0, _Choice())]
        told = self._count_agrees()
        results = [self._result(index, choice, told, ended, failure) for index, choice in found]
        first = results[0]
        assert first.upstream is not None
        prompt = _count(self._usage.get("prompt_tokens"))
        completion = _count(self._usage.get("completion_tokens"))
        away = replace(
            first.upstream,
            prompt_tokens=len(first.prompt_ids) if prompt is None else prompt,
            completion_tokens=sum(len(choice.ids) for _, choice in found) if completion is None else completion,
            siblings=tuple(results[1:]),
        )
        if failure is None:
            return replace(first, upstream=away)
        away = replace(away, status=failure.status, error_body=failure.body, headers=failure.headers)
        return replace(first, upstream=away, error=failure.message)

    def _take_choice(self, choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> ChatEvent:
        """What it says, where it is the first choice: of the others, the tokens alone."""
        index = choice.get("index", 0)
        if not isinstance(index, int) or index < 0:
            return ChatEvent()
        mine = self._choices.setdefault(index, _Choice())
        said = next((part for key in ("delta", "message") if isinstance(part := choice.get(key), Mapping)), choice)
        content = _text(said.get("content")) or _text(choice.get("text"))
        reasoning = _text(said.get("reasoning_content")) or _text(said.get("reasoning"))
        mine.content.append(content)
        mine.reasoning.append(reasoning)
        deltas = _deltas(said)
        for delta in deltas:
            call = mine.calls.get(delta.index) or ToolCall("", "", "")
            mine.calls[delta.index] = ToolCall(
                call.id or delta.id or "", call.name or delta.name or "", call.arguments + delta.arguments
            )
        ids = next((found for place in _places(choice, chunk) if (found := _ids(place))), ())
        mine.ids += ids
        mine.logprobs += _logprobs(choice.get("logprobs"))
        prompt_ids = _ids(choice.get("prompt_token_ids")) or _ids(chunk.get("prompt_token_ids"))
        mine.prompt_ids = prompt_ids or mine.prompt_ids
        if isinstance(finish := choice.get("finish_reason"), str):
            mine.finish = finish
        tokens = tuple(TokenInfo(token_id, "", b"", math.nan) for token_id in ids)
        if index > 0:
            return ChatEvent(tokens=tokens)
        return ChatEvent(content, reasoning, deltas, tokens)

    def _count_agrees(self) -> bool:
        """Whether the ids that were told are all of them: a server may lose some where it holds text back."""
        completion = _count(self._usage.get("completion_tokens"))
        told = sum(len(choice.ids) for choice in self._choices.values())
        return told > 0 and completion in (None, told)

    def _result(
        self, index: int, choice: _Choice, told: bool, ended: FinishReason | None, failure: Failure | None
    ) -> Result:
        """One choice's, with counts of its own alone."""
        prompt_ids = choice.prompt_ids or next(
            (one.prompt_ids for one in self._choices.values() if one.prompt_ids and len(self._prompts) == 1), None
        )
        prompt_ids = prompt_ids or _ids(self._prompts[min(index // self._n, len(self._prompts) - 1)])
        ids = tuple(choice.ids) if told else ()
        finish: FinishReason = "length" if choice.finish == "length" else "stop"
        if choice.finish is None and ended is not None:
            finish = ended
        seed = self._raw.get("seed")
        details = self._usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
        prompt_n = _count(self._usage.get("prompt_tokens")) or len(prompt_ids or ())
        alone = _count(self._usage.get("completion_tokens")) if len(self._choices) == 1 else None
        asked = {name: self._raw[name] for name in PARAMETERS if self._raw.get(name) is not None}
        told_of_it = {**self._told, "finish_reason": choice.finish, "usage": dict(self._usage)}
        return Result(
            finish_reason=finish,
            prompt_ids=prompt_ids or (),
            completion_ids=ids,
            logprobs=tuple(choice.logprobs) if len(choice.logprobs) == len(ids) else (),
            seed=seed if isinstance(seed, int) and -(2**63) <= seed < 2**64 else None,
            sampling={"choice": index, **asked, "upstream": told_of_it},
            drafter=DRAFTER,
            steps=(),
            fingerprints=self._fingerprints,
            timings=Timings(
                queue_ms=0.0,
                prompt_n=max(prompt_n - (cached or 0), 0),
                prompt_ms=(self._first_at - self._began) * 1e3,
                predicted_n=len(ids) if alone is None else alone,
                predicted_ms=(self._last_at - self._first_at) * 1e3,
            ),
            content="".join(choice.content),
            reasoning="".join(choice.reasoning),
            error=failure.message if failure is not None and choice.finish is None else None,
            cached_tokens=cached or 0,
            tool_calls=tuple(call for _, call in sorted(choice.calls.items())),
            upstream=Upstream(prompt_told=bool(prompt_ids), completion_told=told),
        )


def _places(choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> list[Any]:
    """Where token ids may stand: vLLM's, then llama.cpp's, whose last are those of a server told to be verbose."""
    verbose = chunk.get("__verbose")
    further = verbose.get("tokens") if isinstance(verbose, Mapping) else None
    return [choice.get("token_ids"), choice.get("tokens"), chunk.get("tokens"), further]


def _prompts(raw: Mapping[str, Any]) -> list[Any]:
    """Each prompt of a text completion; one for a chat."""
    prompt = raw.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        return prompt
    return [prompt]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _ids(value: Any) -> tuple[int, ...] | None:
    """Token ids, as a row can hold them; None for anything else."""
    if isinstance(value, list) and all(type(one) is int and 0 <= one <= MOST_TOKEN_ID for one in value):
        return tuple(value)
    return None


def _logprobs(value: Any) -> list[float]:
    """One for each token, of a chat or of a text completion."""
    if not isinstance(value, Mapping):
        return []
    content, texts = value.get("content"), value.get("token_logprobs")
    if isinstance(content, list):
        texts = [token.get("logprob") if isinstance(token, Mapping) else None for token in content]
    if not isinstance(texts, list):
        return []
    return [_logprob(one) for one in texts]


def _logprob(value: Any) -> float:
    known = isinstance(value, float) or (type(value) is int and -(2**53) < value <= 0)
    return float(value) if known else math.nan


def _deltas(said: Mapping[str, Any]) -> tuple[ToolCallDelta, ...]:
    """The tool calls of a message or a delta, OpenAI's old function_call among them."""
    given = said.get("tool_calls")
    calls: list[Any] = list(given) if isinstance(given, list) else []
    if isinstance(said.get("function_call"), Mapping):
        calls.append({"function": said["function_call"]})
    deltas = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            index = call.get("index", place)
            deltas.append(
                ToolCallDelta(
                    index=index if isinstance(index, int) else place,
                    arguments=_text(function.get("arguments")),
                    id=_text(call.get("id")) or None,
                    name=_text(function.get("name")) or None,
                )
            )
    return tuple(deltas)
