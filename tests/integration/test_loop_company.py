"""Many clients at once, some of whom leave: each hears what it would hear alone, however short the memory is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from capture.records import Generation
from tests.answers import Answer, bits, body, row_of, streamed_async, whole
from tests.checkpoints import tiny
from tests.servers import ProcessServer, eventually, running_process, serve_command

PAGE_TOKENS = 512
TIGHT_PAGES = 6  # eight prompts fit into less than a page each, their answers do not
SAMPLED: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": 0}
TOKENS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
LONG = "A list holds values in order, a set holds each of them once, a tuple cannot be changed. " * 18


@dataclass(frozen=True)
class Client:
    """What one asks for; with `leaves`, it closes its stream after so many chunks."""

    content: str
    asked: dict[str, Any]
    leaves: int | None = None


CLIENTS = [
    Client(LONG + "What is a list?", {"temperature": 0, "ignore_eos": True, "max_tokens": 120}),
    Client(LONG + "What is a set?", {**SAMPLED, "seed": 1, "ignore_eos": True, "max_tokens": 120}),
    Client(LONG + "Count.", {"temperature": 0, "min_tokens": 90, "frequency_penalty": 0.4, "max_tokens": 110}),
    Client(LONG + "Say it.", {**SAMPLED, "seed": 2, "structured_outputs": {"regex": "[a-z ]{150,200}"}}),
    Client("Hello", {**SAMPLED, "seed": 3, "ignore_eos": True, "max_tokens": 150}, leaves=9),
    Client(LONG + "And now?", {**SAMPLED, "seed": 4, "ignore_eos": True, "max_tokens": 200}, leaves=12),
    Client(
        "Tell me more. " * 40,
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 5, "repetition_penalty": 1.2, "max_tokens": 100},
    ),
    Client(
        LONG + "Why?", {"temperature": 0.7, "min_p": 0.05, "seed": 6, "logit_bias": {"11": -100}, "max_tokens": 100}
    ),
]


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """A server whose memory holds too few pages for all its clients."""
    command = serve_command(tiny(), "--draft-tokens", "3", "--max-num-seqs", "8", "--kv-memory", "0.0075")
    with running_process(command, tmp_path_factory.mktemp("tight") / "capture.db") as server:
        assert server.http.get("/v1/engine").json()["pages"]["total"] == TIGHT_PAGES
        yield server


@pytest.fixture(scope="module")
def alone(plain: ProcessServer) -> list[tuple[Answer, Generation]]:
    """What each hears alone: one after the other, no drafts, every prompt from its start."""
    answers = [whole(plain.openai, client.content, **client.asked, **TOKENS) for client in CLIENTS]
    return [(answer, row_of(plain, answer)) for answer in answers]


async def leave_after(client: openai.AsyncOpenAI, content: str, chunks: int, **asked: Any) -> str:
    """Read so many chunks and close; the row's id."""
    stream = await client.chat.completions.create(**body(content, **asked, **TOKENS), stream=True)
    read = [await anext(stream) for _ in range(chunks)]
    await stream.close()
    return read[0].id.removeprefix("chatcmpl-")


def together(server: ProcessServer, clients: Sequence[Client]) -> list[Answer | str]:
    """Everyone at once: answers, and the row ids of those who left."""

    async def run() -> list[Answer | str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(
                *(
                    leave_after(client, one.content, one.leaves, **one.asked)
                    if one.leaves
                    else streamed_async(client, one.content, **one.asked, **TOKENS)
                    for one in clients
                )
            )

    return asyncio.run(run())


def assert_as_alone(
    server: ProcessServer, heard: Sequence[Answer | str], alone: Sequence[tuple[Answer, Generation]]
) -> None:
    for one, (answer, row) in zip(heard, alone, strict=True):
        if isinstance(one, Answer):
            assert one.said == answer.said
            assert bits(row_of(server, one)) == bits(row)
            continue
        cut = eventually(lambda name=one: next((found for found in server.rows() if found.id == name), None), 20)
        assert cut.status == "cancelled"
        count = len(cut.completion_tokens)
        assert 0 < count < len(row.completion_tokens)
        assert cut.completion_tokens.tolist() == row.completion_tokens[:count].tolist()
        assert cut.logprobs.tobytes() == row.logprobs[:count].tobytes()
        assert row.response_text.startswith(cut.response_text)


def assert_empty(server: ProcessServer) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
        eventually(lambda name=name: server.metric(name) == 0)


def test_in_company_everyone_hears_what_it_hears_alone(
    drafting: ProcessServer, alone: list[tuple[Answer, Generation]]
) -> None:
    running: list[int] = []

    async def watch(stop: asyncio.Event) -> None:
        while not stop.is_set():
            running.append(len((await asyncio.to_thread(drafting.http.get, "/v1/engine")).json()["running"]))

    async def watched() -> list[Answer | str]:
        stop = asyncio.Event()
        watching = asyncio.create_task(watch(stop))
        heard = await asyncio.to_thread(together, drafting, CLIENTS)
        stop.set()
        await watching
        return heard

    heard = asyncio.run(watched())
    assert max(running) >= 4, "they were not together"
    assert_as_alone(drafting, heard, alone)
    assert_empty(drafting)
    # In another order, and with what the first round left in the prefix cache.
    heard = together(drafting, CLIENTS[::-1])
    assert_as_alone(drafting, heard, alone[::-1])
    assert any(isinstance(one, Answer) and one.cached > PAGE_TOKENS / 2 for one in heard)


def test_where_memory_is_short_some_wait_and_nobody_hears_it(
    tight: ProcessServer, alone: list[tuple[Answer, Generation]]
) -> None:
    # Those who would leave stay away: they hold their places for an unknown time.
    for order in (1, -1):
        some = [(client, told) for client, told in zip(CLIENTS, alone, strict=True) if not client.leaves][::order]
        heard = together(tight, [client for client, _ in some])
        assert_as_alone(tight, heard, [told for _, told in some])
        assert_empty(tight)
    assert tight.metric("num_preemptions_total") > 0
    assert tight.http.get("/v1/engine").json()["preemptions"] == tight.metric("num_preemptions_total")


def test_those_who_leave_where_memory_is_short_leave_nothing_behind(
    tight: ProcessServer, alone: list[tuple[Answer, Generation]]
) -> None:
    assert_as_alone(tight, together(tight, CLIENTS), alone)
    assert_empty(tight)
    assert tight.http.get("/v1/engine").json()["pages"]["held_by_running"] == 0


def test_one_who_leaves_while_set_back_has_still_had_its_prompt_run(tight: ProcessServer) -> None:
    preemptions = tight.metric("num_preemptions_total")
    asked = body(LONG + "Go on.", **SAMPLED, ignore_eos=True, max_tokens=1000)
    with ExitStack() as streams:
        names = []
        for seed in range(4):
            stream = streams.enter_context(tight.openai.chat.completions.create(**asked, seed=seed, stream=True))
            names.append(next(iter(stream)).id.removeprefix("chatcmpl-"))
        eventually(lambda: tight.metric("num_preemptions_total") > preemptions, 20)
        eventually(lambda: tight.metric("num_requests_waiting") > 0)
    assert_empty(tight)
    rows = eventually(lambda: len(found := [row for row in tight.rows() if row.id in names]) == 4 and found)
    for row in rows:
        assert row.status == "cancelled"
        assert len(row.completion_tokens) > 0
        assert row.timings["prompt_n"] + row.timings["cache_n"] == len(row.prompt_tokens)
    assert sum(row.timings["cache_n"] > 0 for row in rows) >= 3


def test_what_can_never_fit_is_refused_at_once(tight: ProcessServer) -> None:
    room = TIGHT_PAGES * PAGE_TOKENS - 9
    assert tight.http.get("/version").json()["max_model_len"] == room
    rows = len(tight.rows())
    busy = body(LONG + "What is a list?", temperature=0, ignore_eos=True, max_tokens=1000)
    with tight.openai.chat.completions.create(**busy, stream=True) as stream:
        next(iter(stream))
        for content, asked, param in (
            ("What is it? " * 1000, {}, "messages"),
            ("Hello", {"max_tokens": room}, "max_tokens"),
        ):
            began = time.monotonic()
            with pytest.raises(openai.BadRequestError) as refused:
                whole(tight.openai, content, **asked)
            assert time.monotonic() - began < 5
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
            assert str(room) in str(refused.value)
    eventually(lambda: len(tight.rows()) == rows + 1)  # of the busy one alone
    assert_empty(tight)


def test_what_just_fits_is_served(tight: ProcessServer, plain: ProcessServer) -> None:
    prompt = tiny().tokenizer.encode_chat([{"role": "user", "content": LONG * 6}], {}).ids
    room = TIGHT_PAGES * PAGE_TOKENS - 9
    assert room - 600 < len(prompt) < room
    asked = {**SAMPLED, **TOKENS, "seed": 9, "ignore_eos": True, "max_tokens": min(room - len(prompt), 24)}
    one, other = whole(tight.openai, LONG * 6, **asked), whole(plain.openai, LONG * 6, **asked)
    assert one.said == other.said
    assert bits(row_of(tight, one)) == bits(row_of(plain, other))
