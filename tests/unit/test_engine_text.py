"""The local backend's text: cut where stop strings and budgets fall whatever the draft length, and ended on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from backend.interface import BackendUnavailable, ChatEvent, ChatRequest, EngineStats, Result, SamplingRequest, Step
from backend.loading import LocalOptions
from backend.local import LONG_TEXT, LocalBackend
from backend.text.tokenizer import Prompt
from tests.checkpoints import random_small

LENGTHS = (0, 1, 3, 8)
ASK = ChatRequest(
    "chat", [{"role": "user", "content": "Why?"}], SamplingRequest(temperature=1.0, seed=5, max_tokens=48)
)


@dataclass(frozen=True)
class Backends:
    """One backend for each draft length, all on one event loop."""

    loop: asyncio.Runner
    of: dict[int, LocalBackend]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run(asyncio.wait_for(work, 60))

    def each(self, request: ChatRequest) -> Result:
        """The one result that every draft length gives."""
        results = [self.run(answer(backend, request)) for backend in self.of.values()]
        assert len({told(result) for result in results}) == 1
        assert all(step.drafted <= 8 for result in results for step in result.steps)
        return results[0]


def make(draft_tokens: int) -> LocalBackend:
    options = LocalOptions(model=str(random_small().directory), dtype="float32", draft_tokens=draft_tokens, threads=1)
    return LocalBackend(options)


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    with asyncio.Runner() as loop:
        found = Backends(loop, {length: make(length) for length in LENGTHS})
        for backend in found.of.values():
            loop.run(backend.start())
        yield found
        for backend in found.of.values():
            loop.run(backend.close())


async def answer(backend: LocalBackend, request: ChatRequest, events: list[ChatEvent] | None = None) -> Result:
    """The result of a chat, once its events have been held to what they promise."""
    heard = [] if events is None else events
    async for event in backend.chat(request):
        heard.append(event)
    result = heard[-1].result
    assert result is not None
    assert all(event.result is None for event in heard[:-1])
    assert "".join(event.content for event in heard) == result.content
    assert "".join(event.reasoning for event in heard) == result.reasoning
    assert tuple(token.token_id for event in heard for token in event.tokens) == result.completion_ids
    assert len(result.completion_ids) == len(result.logprobs)
    return result


def told(result: Result) -> tuple[Any, ...]:
    """What may not depend on the drafter."""
    return (
        *(result.completion_ids, result.logprobs, result.content, result.reasoning),
        *(result.finish_reason, result.stop_string, result.seed),
    )


def ask(**sampling: Any) -> ChatRequest:
    return replace(ASK, sampling=replace(ASK.sampling, **sampling))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_text_is_the_same_for_every_draft_length(backends: Backends, temperature: float) -> None:
    for seed in range(3):
        result = backends.each(ask(temperature=temperature, seed=seed))
        assert result.content
        assert len(result.completion_ids) <= 48


def test_every_stop_string_cuts_the_text_where_it_first_stands(backends: Backends) -> None:
    whole = backends.each(ask())
    text = whole.content
    assert len(text) > 40
    for at in (0, 1, 2, 5, 11, 12, 17, 23, 30):
        for length in (1, 2, 5):
            stop = text[at : at + length]
            result = backends.each(ask(stop=("not in there", stop)))
            assert result.content == text[: text.find(stop)]
            assert (result.finish_reason, result.stop_string) == ("stop", stop)
            assert result.completion_ids == whole.completion_ids[: len(result.completion_ids)]


def test_a_budget_cuts_the_tokens_and_nothing_else(backends: Backends) -> None:
    whole = backends.each(ask())
    for budget in range(1, 13):
        result = backends.each(ask(max_tokens=budget))
        assert result.completion_ids == whole.completion_ids[:budget]
        assert result.logprobs == whole.logprobs[:budget]
        assert result.finish_reason == "length"


def test_chats_progress_side_by_side(backends: Backends) -> None:
    a, b = replace(ASK, id="a"), replace(ASK, id="b")

    async def together() -> list[str]:
        order: list[str] = []

        async def one(request: ChatRequest) -> None:
            async for _ in backends.of[1].chat(request):
                order.append(request.id)

        await asyncio.gather(one(a), one(b))
        return order

    order = backends.run(together())
    assert order.index("b") < len(order) - 1 - order[::-1].index("a")
    assert order.index("a") < len(order) - 1 - order[::-1].index("b")


def test_text_is_the_same_in_company(backends: Backends) -> None:
    """Many at once, of which some stop at a string and some are cut by their budget, with their alternatives."""
    asked = [
        replace(ask(seed=i, max_tokens=20 + i, top_logprobs=i % 3, stop=("e",) if i % 4 == 0 else ()), id=str(i))
        for i in range(12)
    ]

    async def heard(backend: LocalBackend, request: ChatRequest) -> tuple[Any, ...]:
        events: list[ChatEvent] = []
        result = await answer(backend, request, events)
        return *told(result), [token for event in events for token in event.tokens]

    async def together(backend: LocalBackend) -> list[tuple[Any, ...]]:
        return list(await asyncio.gather(*(heard(backend, request) for request in asked)))

    alone = [backends.run(heard(backends.of[0], request)) for request in asked]
    assert {result[4] for result in alone} == {"stop", "length"}
    for backend in backends.of.values():
        assert backends.run(together(backend)) == alone


def test_a_cancelled_chat_still_yields_its_result(backends: Backends) -> None:
    backend, whole = backends.of[3], backends.each(ask())

    async def cancelled() -> Result:
        events: list[ChatEvent] = []
        running = asyncio.ensure_future(answer(backend, replace(ask(), id="victim"), events))
        while len(events) < 2:
            await asyncio.sleep(0)
        backend.cancel("victim")
        return await running

    result = backends.run(cancelled())
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.completion_ids) < len(whole.completion_ids)
    assert result.completion_ids == whole.completion_ids[: len(result.completion_ids)]
    assert whole.content.startswith(result.content)


def test_a_closed_iterator_stops_its_generation(backends: Backends) -> None:
    backend = backends.of[0]

    async def leave() -> None:
        async with aclosing(backend.chat(ask(max_tokens=1500, temperature=2.0))) as events:
            await anext(events)
            assert backend.stats().running == 1
        while backend.stats().running:
            await asyncio.sleep(0.001)

    backends.run(leave())


def test_who_hears_of_an_end_finds_it_counted(backends: Backends) -> None:
    backend = backends.of[3]

    async def between() -> tuple[EngineStats, tuple[Step, ...], EngineStats]:
        before = backend.stats()
        steps = (await answer(backend, ask(seed=9))).steps
        return before, steps, backend.stats()

    before, steps, after = backends.run(between())
    assert (after.running, after.waiting, after.kv_cache_usage) == (0, 0, 0.0)
    told, counted = before.drafters[0], after.drafters[0]
    assert told.drafter == counted.drafter == "mtp"
    assert counted.drafts - told.drafts == sum(step.drafted > 0 for step in steps)
    assert counted.draft_tokens - told.draft_tokens == sum(step.drafted for step in steps)
    assert counted.accepted_tokens - told.accepted_tokens == sum(step.accepted for step in steps)
    assert before.drafters[1:] == after.drafters[1:]


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    async def life() -> None:
        backend = make(2)
        with pytest.raises(BackendUnavailable, match="loading"):
            await answer(backend, ASK)
        await backend.start()
        assert backend.ready()
        events: list[ChatEvent] = []
        running = asyncio.ensure_future(answer(backend, ask(max_tokens=1500, temperature=2.0), events))
        while not events:
            await asyncio.sleep(0)
        await backend.close()
        assert (await running).finish_reason == "cancelled"
        assert not backend.ready()
        with pytest.raises(BackendUnavailable, match="shutting down"):
            await answer(backend, ASK)

    asyncio.run(asyncio.wait_for(life(), 60))


def test_long_texts_are_tokenized_one_at_a_time_and_short_ones_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, running, together, short_came = make(0), 0, [], threading.Event()

    def tokenize(request: ChatRequest) -> Prompt:
        nonlocal running
        if request.id == "short":
            short_came.set()
        else:
            running += 1
            together.append(running)
            assert short_came.wait(30)
            time.sleep(0.05)  # for another one to come where it may
            running -= 1
        return Prompt((), "", 0, in_reasoning=False)

    async def ask(name: str, **said: Any) -> None:
        await backend.tokenize(ChatRequest(name, **said))

    async def all_of_them() -> None:
        long = "x" * (LONG_TEXT + 1)
        said = {"role": "user", "content": long}
        tool = {"type": "function", "function": {"name": "f", "description": long}}
        work = [ask("messages", messages=[said]), ask("tools", tools=[tool]), ask("more", messages=[said])]
        await asyncio.wait_for(asyncio.gather(*work, ask("short", messages=[{"role": "user", "content": "x"}])), 60)

    monkeypatch.setattr(backend, "_prompt", tokenize)
    asyncio.run(all_of_them())
    assert together == [1, 1, 1]
