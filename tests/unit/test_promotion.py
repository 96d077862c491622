"""The local backend's default drafter: promoted and rolled back while it serves, without any answer changing (L2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from backend.engine.scheduler import Scheduler
from backend.interface import BackendUnavailable, ChatEvent, ChatRequest, InvalidRequest, Result, SamplingRequest
from backend.loading import LocalOptions
from backend.local import LocalBackend
from tests.checkpoints import random_small

SAMPLING = SamplingRequest(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def make() -> LocalBackend:
    """The model's head is the default, the n-gram drafter stands beside it."""
    model = str(random_small().directory)
    return LocalBackend(LocalOptions(model, dtype="float32", threads=1, further_drafters=("prediction",)))


def ask(name: str, drafter: str | None = None) -> ChatRequest:
    return ChatRequest(name, [{"role": "user", "content": "Why?"}], SAMPLING, drafter=drafter)


async def answer(backend: LocalBackend, request: ChatRequest, after_first: Callable[[], None] = lambda: None) -> Result:
    events: list[ChatEvent] = []
    async for event in backend.chat(request):
        events.append(event)
        if len(events) == 1:
            after_first()
    result = events[-1].result
    assert result is not None
    return result


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Run, LocalBackend]]:
    with asyncio.Runner() as loop:
        backend = make()
        loop.run(backend.start())
        yield lambda work: loop.run(asyncio.wait_for(work, 60)), backend
        loop.run(backend.close())


@pytest.fixture
def backend(running: tuple[Run, LocalBackend]) -> Iterator[LocalBackend]:
    """It, with its first default before and after."""
    backend = running[1]
    assert backend.info().drafter == "mtp"
    yield backend
    while backend.info().drafter != "mtp" or len(backend.engine()["default_drafters"]) > 1:
        backend.roll_back()


@pytest.fixture
def run(running: tuple[Run, LocalBackend]) -> Run:
    return running[0]


def test_the_next_request_has_the_new_default_and_the_same_answer(backend, run):
    loaded = backend.engine()["drafters"]
    results = [run(answer(backend, ask("mtp")))]
    for name in ("prediction", "none"):
        backend.promote(name)
        results.append(run(answer(backend, ask(name))))
    assert [result.drafter for result in results] == ["mtp", "prediction", "none"]
    fingerprints = [result.fingerprints.drafter for result in results]
    assert fingerprints == [loaded["mtp"], loaded["prediction"], "none"]
    assert len({(result.completion_ids, result.logprobs) for result in results}) == 1
    drafted = [sum(step.drafted for step in result.steps) for result in results]
    assert drafted[0] > 0 == drafted[2]


def test_what_runs_keeps_its_drafter_to_its_end(backend, run):
    long = replace(SAMPLING, max_tokens=400)

    def promote() -> None:
        assert backend.stats().running == 1
        backend.promote("none")

    result = run(answer(backend, replace(ask("running"), sampling=long), after_first=promote))
    assert backend.info().drafter == "none"
    assert result.drafter == "mtp"
    assert all(step.drafted for step in result.steps[:-2])  # at its end there may be no room for a draft
    after = run(answer(backend, replace(ask("after"), sampling=long)))
    assert after.drafter == "none"
    assert (after.completion_ids, after.logprobs) == (result.completion_ids, result.logprobs)


def test_requests_that_name_a_drafter_are_untouched(backend, run):
    backend.promote("none")
    assert run(answer(backend, ask("named", drafter="mtp"))).drafter == "mtp"


def test_it_tells_the_current_default(backend):
    backend.promote("prediction")
    info = backend.info()
    assert (info.drafter, info.draft_tokens) == ("prediction", 2)
    assert info.fingerprints.drafter == backend.engine()["drafters"]["prediction"]
    assert [one.drafter for one in backend.stats().drafters][:2] == ["prediction", "mtp"]
    backend.promote("none")
    info = backend.info()
    assert (info.drafter, info.draft_tokens, info.fingerprints.drafter) == ("none", 0, "none")
    assert backend.stats().drafters[0].drafter == "mtp"
    assert [one["drafter"] for one in backend.engine()["default_drafters"]] == ["mtp", "prediction", "none"]


def test_roll_backs_go_the_way_back_and_no_further(backend):
    for name in ("prediction", "prediction", "none"):
        backend.promote(name)
    seen = []
    for _ in range(2):
        backend.roll_back()
        seen.append(backend.info().drafter)
    assert seen == ["prediction", "mtp"]
    with pytest.raises(InvalidRequest, match="nothing to roll back"):
        backend.roll_back()


def test_what_is_not_loaded_cannot_be_promoted(backend):
    with pytest.raises(InvalidRequest, match=r"no drafter 'hot_vocab' here, only mtp, prediction, none\.") as raised:
        backend.promote("hot_vocab")
    assert raised.value.param == "drafter"
    assert backend.info().drafter == "mtp"


def test_before_it_is_loaded_nothing_can_be_promoted():
    with pytest.raises(BackendUnavailable):
        LocalBackend(LocalOptions()).promote("none")


def test_a_promotion_outlives_an_engine_that_is_started_anew(monkeypatch):
    reserve, flags = Scheduler.reserve, ["crash"]

    def broken(scheduler: Scheduler) -> None:
        if flags and scheduler.decoding:
            flags.pop()
            raise LookupError("lost count")
        reserve(scheduler)

    monkeypatch.setattr(Scheduler, "reserve", broken)

    async def life() -> tuple[Result, Result]:
        backend = make()
        await backend.start()
        backend.promote("none")
        crashed = await answer(backend, ask("crashed"))
        while not backend.ready():
            await asyncio.sleep(0.01)
        assert backend.stats().restarts == 1
        after = await answer(backend, ask("after"))
        backend.roll_back()
        assert backend.info().drafter == "mtp"
        await backend.close()
        return crashed, after

    crashed, after = asyncio.run(asyncio.wait_for(life(), 60))
    assert (crashed.finish_reason, after.drafter) == ("error", "none")
