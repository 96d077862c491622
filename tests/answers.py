"""An answer as a client of the `openai` package has it in the end, whole or streamed, in one shape to compare."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall

from capture.records import Generation
from capture.store import Store
from tests.servers import MODEL, Server

# Parameters that the package does not know.
OURS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "structured_outputs",
    "chat_template_kwargs",
    "enable_thinking",
    "thinking_budget",
    "thinking_token_budget",
    "include_reasoning",
    "return_token_ids",
    "drafter",
    "cache_salt",
)


@dataclass(frozen=True)
class Answer:
    """`pieces`: the content as it was streamed, one where it was not. `tokens`: (bytes, logprob, alternatives).

    `calls`: (name, arguments), without their ids, which are drawn.
    """

    id: str
    pieces: tuple[str, ...]
    reasoning: str
    finish_reason: str
    tokens: tuple[Any, ...]
    usage: dict[str, Any]
    timings: dict[str, Any]
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def row_id(self) -> str:
        return self.id.removeprefix("chatcmpl-")

    @property
    def content(self) -> str:
        return "".join(self.pieces)

    @property
    def cached(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def said(self) -> tuple[Any, ...]:
        """All that must be the same whenever the same is asked; not the id, not what it cost."""
        usage = {name: value for name, value in self.usage.items() if name != "prompt_tokens_details"}
        return self.content, self.reasoning, self.finish_reason, self.tokens, self.calls, usage


def body(content: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Arguments of `completions.create`; `content` is a user's message or a list of messages."""
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    ours = {name: more.pop(name) for name in OURS if name in more}
    return {"model": MODEL, "messages": messages, "extra_body": ours, **more}


def whole(client: openai.OpenAI, content: Any, **more: Any) -> Answer:
    """Ask for the answer in one piece."""
    return of_completion(client.chat.completions.create(**body(content, **more)))


def streamed(client: openai.OpenAI, content: Any, **more: Any) -> Answer:
    """Ask for the answer as a stream, with its usage."""
    return of_chunks(client.chat.completions.create(**_as_stream(content, **more)))


async def streamed_async(client: openai.AsyncOpenAI, content: Any, **more: Any) -> Answer:
    """`streamed`, beside others."""
    chunks: AsyncIterable[ChatCompletionChunk] = await client.chat.completions.create(**_as_stream(content, **more))
    return of_chunks([chunk async for chunk in chunks])


def _as_stream(content: Any, **more: Any) -> dict[str, Any]:
    return {**body(content, **more), "stream": True, "stream_options": {"include_usage": True}}


def row_of(server: Server, answer: Answer) -> Generation:
    """The row an answer left, read from the file while the server writes on."""
    return row_called(server, answer.row_id)


def row_called(server: Server, name: str) -> Generation:
    """The row with this id."""
    assert server.capture is not None
    with Store.open(server.capture) as store:
        return store.get(name)


def bits(row: Generation) -> tuple[bytes, ...]:
    """What the engine said, to the bit: ids and float32 logprobs."""
    return row.prompt_tokens.tobytes(), row.completion_tokens.tobytes(), row.logprobs.tobytes()


def of_completion(completion: ChatCompletion) -> Answer:
    (choice,) = completion.choices
    assert completion.usage is not None
    return Answer(
        id=completion.id,
        pieces=(choice.message.content or "",),
        reasoning=(choice.message.model_extra or {}).get("reasoning_content", ""),
        finish_reason=choice.finish_reason,
        tokens=_tokens(choice.logprobs),
        usage=completion.usage.model_dump(exclude_unset=True),
        timings=(completion.model_extra or {})["timings"],
        calls=tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()),  # type: ignore[union-attr]
    )


def of_chunks(chunks: Iterable[ChatCompletionChunk]) -> Answer:
    """Joins the chunks, and holds them to OpenAI's order: role first, then text, an empty end, then usage."""
    *middle, end, last = chunks
    deltas = [chunk.choices[0] for chunk in middle]
    assert (deltas[0].delta.role, deltas[0].delta.content) == ("assistant", "")
    assert all(choice.finish_reason is None for choice in deltas)
    assert end.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert not last.choices
    assert last.usage is not None
    assert len({chunk.id for chunk in (*middle, end, last)}) == 1
    return Answer(
        id=last.id,
        pieces=tuple(choice.delta.content or "" for choice in deltas),
        reasoning="".join((choice.delta.model_extra or {}).get("reasoning_content", "") for choice in deltas),
        finish_reason=str(end.choices[0].finish_reason),
        tokens=tuple(token for choice in deltas for token in _tokens(choice.logprobs)),
        usage=last.usage.model_dump(exclude_unset=True),
        timings=(end.model_extra or {})["timings"],
        calls=_calls(piece for choice in deltas for piece in choice.delta.tool_calls or ()),
    )


def _calls(pieces: Iterable[ChoiceDeltaToolCall]) -> tuple[tuple[str, str], ...]:
    """(name, arguments) of calls that came in pieces: ids and names in the first ones alone, all in their order."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        assert piece.function is not None
        first = piece.index == len(calls)
        assert first == (piece.id is not None) == (piece.type is not None) == (piece.function.name is not None)
        if first:
            calls.append((piece.function.name or "", ""))
        assert piece.index == len(calls) - 1
        name, arguments = calls[-1]
        calls[-1] = (name, arguments + (piece.function.arguments or ""))
    return tuple(calls)


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The body of the whole answer that chunks are pieces of, each field taken from where it was streamed."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        rest = {name: value for name, value in chunk.items() if name != "choices" and value is not None}
        timings = rest.pop("timings", None)
        answer |= rest
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], _no_choice(piece["index"]))
            assert choice["finish_reason"] is None, "nothing comes after the end"
            _add(choice["message"], piece["delta"])
            if piece["logprobs"] is not None:
                choice["logprobs"] = {"content": (choice["logprobs"] or {"content": []})["content"]}
                choice["logprobs"]["content"] += piece["logprobs"]["content"]
            if "token_ids" in piece:
                choice.setdefault("token_ids", []).extend(piece["token_ids"])
            if piece["finish_reason"] is not None:
                choice |= {"finish_reason": piece["finish_reason"], "timings": timings}
    for choice in choices.values():
        message = choice["message"]
        message["content"] = None if message.get("tool_calls") and not message["content"] else message["content"]
    if len(choices) == 1:
        answer["timings"] = choices[0].pop("timings")
    return {**answer, "object": "chat.completion", "choices": [choices[index] for index in sorted(choices)]}


def _no_choice(index: int) -> dict[str, Any]:
    return {"index": index, "message": {"content": "", "refusal": None}, "logprobs": None, "finish_reason": None}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, piece in delta.items():
        if name == "role":
            assert name not in message, "the role comes once"
            message[name] = piece
        elif name != "tool_calls":
            message[name] = message.get(name, "") + piece
        else:
            calls = message.setdefault(name, [])
            for more in piece:
                if more["index"] == len(calls):
                    calls.append({k: v for k, v in more.items() if k != "index"})
                    assert list(calls[-1]) == ["id", "type", "function"]
                    assert list(calls[-1]["function"]) == ["name", "arguments"]
                else:
                    assert list(more) == ["index", "function"]
                    assert list(more["function"]) == ["arguments"]
                    calls[more["index"]]["function"]["arguments"] += more["function"]["arguments"]


def _tokens(logprobs: Any) -> tuple[Any, ...]:
    """(bytes, logprob, ((bytes, logprob) of each alternative)) of each token."""
    if logprobs is None:
        return ()
    return tuple(
        (bytes(token.bytes), token.logprob, tuple((bytes(a.bytes), a.logprob) for a in token.top_logprobs))
        for token in logprobs.content
    )
