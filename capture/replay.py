"""A row's request once more, at a running server: whether it says the same again, to the last bit.

Knows rows and the bodies of the server's endpoints; knows no model. What must make no difference (the drafter, streams,
who else is served) is left to the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from capture.records import Generation
from capture.server import RefusedError, Server, Version

Outcome = Literal["same", "different", "not compared"]
What = Literal["prompt tokens", "tokens", "logprobs"]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# What belongs to one exchange alone, and what is told of an answer but not part of it. The row says the rest better.
LEFT_OUT = {
    *("stream", "stream_options", "model", "drafter", "store"),
    *("n", "best_of", "max_completion_tokens", "top_logprobs", "echo", "prompt_logprobs", "include"),
}
# Parameters that the server fills in where a request does not say them.
EFFECTIVE = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
LOWEST_LOGPROB = -9999.0  # as the API tells all that is lower


@dataclass(frozen=True)
class Difference:
    """The first place where two answers part; None stands for nothing there."""

    what: What
    position: int  # in the prompt, or in the answer
    captured: int | float | None
    replayed: int | float | None

    def __str__(self) -> str:
        told = ["nothing" if value is None else repr(value) for value in (self.captured, self.replayed)]
        return f"{self.what} differ at {self.position}: {told[0]} was captured, {told[1]} came now"


@dataclass(frozen=True)
class Replay:
    """What became of one row. `tokens`: those of its answer that were compared; all, unless it was cut off."""

    id: str
    outcome: Outcome
    tokens: int = 0
    difference: Difference | None = None
    reason: str | None = None  # why it was not compared


@dataclass(frozen=True)
class Answer:
    """What a server said, as a row keeps it."""

    prompt_tokens: NDArray[np.uint32]
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]


def replay(row: Generation, server: Server, version: Version) -> Replay:
    """Ask the server for the row's answer and compare. Raises ServerError where it cannot be asked."""
    reason = why_not(row, version)
    if reason is not None:
        return Replay(row.id, "not compared", reason=reason)
    path, body = request_of(row, version)
    try:
        told = server.post(path, body)
    except RefusedError as error:
        return Replay(row.id, "not compared", reason=f"the server refuses it: {error}")
    try:
        answer = answer_of(path, told, _choice(row))
    except (LookupError, TypeError, ValueError):
        return Replay(row.id, "not compared", reason="the server does not tell its token ids and log-probabilities")
    compared = len(row.completion_tokens if row.completion_tokens is not None else ())
    difference = first_difference(row, answer)
    return Replay(row.id, "different" if difference else "same", compared, difference)


def replay_all(rows: Iterable[Generation], server: Server, version: Version, concurrency: int = 1) -> Iterator[Replay]:
    """Replay every row, in their order, so many at a time. Raises as `replay` does."""
    with ThreadPoolExecutor(concurrency) as pool:
        running: deque[Future[Replay]] = deque()
        try:
            for row in rows:
                running.append(pool.submit(replay, row, server, version))
                if len(running) > concurrency:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for waiting in running:
                waiting.cancel()


def why_not(row: Generation, version: Version) -> str | None:
    """Why this server cannot be held to this row; None where it can."""
    if row.redacted:
        return "it was redacted"
    if row.prompt_tokens is None or row.completion_tokens is None:
        return "the row keeps no token ids"
    if row.build == "upstream":
        return "another server generated it, behind a proxy: what it ran, the row does not know"
    if row.seed is None:
        return "the row keeps no seed"
    if not len(row.prompt_tokens):
        return f"it {'was cancelled' if row.status == 'cancelled' else 'failed'} before its prompt was known"
    path = endpoint(row.request)
    if path is None:
        return "its request has neither messages, nor input, nor a prompt"
    pairs = [
        ("weights", row.weights_fingerprint, version.weights),
        ("tokenizer", row.tokenizer_fingerprint, version.tokenizer),
        ("build", row.build, version.build),
    ]
    if path != TEXT:
        pairs.append(("chat template", row.template_fingerprint, version.chat_template))
    for name, captured, served in pairs:
        if captured != served:
            return f"the server has another {name}: {_short(served)}, the row was made with {_short(captured)}"
    length = len(row.prompt_tokens) + len(row.completion_tokens)
    if length > version.max_model_len:
        return f"it is {length} tokens long, the server takes {version.max_model_len}"
    return None


def endpoint(request: Mapping[str, Any]) -> str | None:
    """The endpoint that a stored body was sent to, told by what that cannot do without."""
    for name, path in (("messages", CHAT), ("input", RESPONSES), ("prompt", TEXT)):
        if request.get(name) is not None:
            return path
    return None


def request_of(row: Generation, version: Version) -> tuple[str, dict[str, Any]]:
    """Endpoint and body that ask for the row's answer: the stored request, and all that was in effect beside it."""
    path = endpoint(row.request)
    assert path is not None
    assert row.prompt_tokens is not None
    assert row.completion_tokens is not None
    body = {name: value for name, value in row.request.items() if name not in LEFT_OUT}
    body |= {name: row.parameters[name] for name in EFFECTIVE if name in row.parameters}
    body |= {"seed": row.seed, "return_token_ids": True}
    limit = int(row.parameters.get("max_tokens", version.max_model_len))
    limit = min(limit, version.max_model_len - len(row.prompt_tokens))
    if row.status != "finished":  # what was cut off is told as far as it got
        limit = max(1, len(row.completion_tokens))
    if isinstance(body.get("min_tokens"), int):  # more than there is room for: then nothing ends the answer early
        body["min_tokens"] = min(body["min_tokens"], limit)
    if path == RESPONSES:
        return path, {**body, "max_output_tokens": limit}
    body |= {"max_tokens": limit, "n": _choice(row) + 1, "logprobs": True if path == CHAT else 0}
    return path, body


def answer_of(path: str, told: Mapping[str, Any], choice: int) -> Answer:
    """The ids and log-probabilities of a choice. Raises LookupError, TypeError or ValueError for other shapes."""
    if path == RESPONSES:
        prompt, tokens, logprobs = (told[name] for name in ("prompt_token_ids", "token_ids", "token_logprobs"))
    else:
        chosen = told["choices"][choice]
        tokens, likely = chosen["token_ids"], chosen["logprobs"]
        if path == CHAT:
            prompt, logprobs = told["prompt_token_ids"], [token["logprob"] for token in likely["content"]]
        else:
            prompt, logprobs = chosen["prompt_token_ids"], likely["token_logprobs"] if likely else []
    return Answer(
        np.array(prompt, dtype=np.uint32), np.array(tokens, dtype=np.uint32), np.array(logprobs, dtype=np.float32)
    )


def first_difference(row: Generation, answer: Answer) -> Difference | None:
    """Where the answer is not the row's; of one that was cut off, as far as it got."""
    captured = np.asarray(row.completion_tokens, dtype=np.uint32)
    count = len(captured)
    cut = row.status != "finished"
    tokens, logprobs = (given[:count] if cut else given for given in (answer.tokens, answer.logprobs))
    known = np.asarray(row.logprobs if row.logprobs is not None else (), dtype=np.float32)
    return (
        _parted("prompt tokens", np.asarray(row.prompt_tokens, dtype=np.uint32), answer.prompt_tokens)
        or _parted("tokens", captured, tokens)
        or (_parted("logprobs", np.maximum(known, np.float32(LOWEST_LOGPROB)), logprobs) if len(known) else None)
    )


def _parted(what: What, captured: NDArray[Any], replayed: NDArray[Any]) -> Difference | None:
    both = min(len(captured), len(replayed))
    # Bit by bit: floats that only look the same are not.
    unlike = np.flatnonzero(captured[:both].view(np.uint32) != replayed[:both].view(np.uint32))
    if not len(unlike) and len(captured) == len(replayed):
        return None
    at = int(unlike[0]) if len(unlike) else both
    first, second = (given[at].item() if at < len(given) else None for given in (captured, replayed))
    return Difference(what, at, first, second)


def _choice(row: Generation) -> int:
    """Which of n it was; a row of one choice need not say."""
    return int(row.parameters.get("choice", 0))


def _short(fingerprint: str) -> str:
    return fingerprint if len(fingerprint) <= 80 else f"{fingerprint[:80]}…"
