"""Students loaded, promoted, tried on a share and let go while the local backend serves: no answer changes (L2)."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import trial
from backend.default_drafter import place
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.engine import Engine
from backend.engine.scheduler import Scheduler
from backend.interface import BackendUnavailable, ChatEvent, ChatRequest, InvalidRequest, Result, SamplingRequest
from backend.loading import LocalOptions
from backend.local import LocalBackend
from tests import students

SEEDED = SamplingRequest(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
GREEDY = replace(SEEDED, temperature=0.0)
SYSTEM = "You answer in short sentences, you never repeat what was asked, and you say so where you do not know. " * 4
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What --drafter-dir names: one that drafts as the native head does, one that knows nothing."""
    place = tmp_path_factory.mktemp("shelf")
    students.whole(place / "whole", evaluation={"tau": 1.5})
    students.wild(place / "wild")
    return place


def make(shelf: Path | None, **options: Any) -> LocalBackend:
    common: dict[str, Any] = {"threads": 1, "max_model_len": 1024, "max_num_seqs": 8}
    return LocalBackend(LocalOptions("tiny", drafter_dir=None if shelf is None else str(shelf), **common | options))


@asynccontextmanager
async def serving(shelf: Path | None, **options: Any) -> AsyncIterator[LocalBackend]:
    backend = make(shelf, **options)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture(scope="module")
def running(shelf: Path) -> Iterator[tuple[Run, LocalBackend]]:
    with asyncio.Runner() as loop:
        backend = make(shelf)
        loop.run(backend.start())
        yield lambda work: loop.run(asyncio.wait_for(work, 120)), backend
        loop.run(backend.close())


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TOKENS", 16)


@pytest.fixture
def run(running: tuple[Run, LocalBackend]) -> Run:
    return running[0]


@pytest.fixture
def backend(running: tuple[Run, LocalBackend]) -> Iterator[LocalBackend]:
    """It, with the native head alone before and after."""
    run, backend = running
    assert states(backend) == {"mtp": "active", "none": "loaded"}
    yield backend
    with suppress(InvalidRequest):
        while True:
            backend.roll_back()
    run(settled(backend))
    for name in set(states(backend)) - {"mtp", "none"}:
        run(backend.unload_drafter(name))


def ask(name: str, sampling: SamplingRequest = SEEDED, drafter: str | None = None, system: str = "") -> ChatRequest:
    messages = [{"role": "system", "content": system}] if system else []
    return ChatRequest(name, [*messages, {"role": "user", "content": "What is a list?"}], sampling, drafter=drafter)


async def answer(
    backend: LocalBackend, request: ChatRequest, after_first: Callable[[], Awaitable[Any]] | None = None
) -> Result:
    events: list[ChatEvent] = []
    async for event in backend.chat(request):
        events.append(event)
        if len(events) == 1 and after_first:
            await after_first()
    result = events[-1].result
    assert result is not None
    return result


def tokens(result: Result) -> tuple[Any, ...]:
    return result.completion_ids, result.logprobs


async def promote(backend: LocalBackend, name: str, canary: float | None = None) -> None:
    backend.promote(name, canary)


async def ended(end: Callable[[], None]) -> None:
    end()


def states(backend: LocalBackend) -> dict[str, str]:
    return {one["name"]: one["state"] for one in backend.list_drafters()["drafters"]}


def entry(backend: LocalBackend, name: str) -> dict[str, Any]:
    (found,) = [one for one in backend.list_drafters()["drafters"] if one["name"] == name]
    return dict(found)


async def settled(backend: LocalBackend) -> None:
    """Wait until what nobody has any more has gone."""
    while "retiring" in states(backend).values():
        await asyncio.sleep(0.01)


def between_turns(backend: LocalBackend) -> None:
    """Wait for the end of the turn under way: what a step took is known after what it said."""
    backend._engine.call(lambda loop: None).result(30)


def pools(backend: LocalBackend) -> int:
    """Of drafter blocks, in the engine's memory."""
    return len(backend._ready.loop.speculation.memory._blocks)


def load(backend: LocalBackend, path: str, name: str | None = None, at_least: float = 0.1) -> Any:
    return backend.load_drafter(path, name, at_least)


# -- loading ---------------------------------------------------------------------------------------------------------


def test_a_student_is_tried_beside_the_active_drafter_before_it_is_there(backend, run):
    told = run(load(backend, "whole"))
    assert (told["name"], told["kind"], told["state"], told["evaluation"]) == (
        "whole", "student", "loaded", {"tau": 1.5},
    )  # fmt: skip
    candidate, active = told["trial"]["candidate"], told["trial"]["active"]
    assert (candidate.pop("drafter"), active.pop("drafter")) == ("whole", "mtp")
    assert candidate == active  # it is the native head
    assert candidate["acceptance"] == candidate["accepted_tokens_per_pos"][0] / candidate["drafts"] > 0.1
    assert told["parameters_read"] == entry(backend, "mtp")["parameters_read"] > 10**5
    assert entry(backend, "whole")["acceptance"]["drafts"] == 0  # a trial is nobody's answer


@pytest.mark.parametrize(
    ("path", "name", "code", "said"),
    [
        ("missing", None, "invalid_drafter", "there is no config.json"),
        ("..", None, "path_not_allowed", "inside --drafter-dir"),
        ("/etc", None, "path_not_allowed", "inside --drafter-dir"),
        ("link", None, "path_not_allowed", "inside --drafter-dir"),
        ("linked-weights", None, "path_not_allowed", "inside --drafter-dir"),
        ("a\0b", None, "path_not_allowed", "inside --drafter-dir"),
        ("whole", "mtp", "invalid_value", "means another drafter"),
        ("whole", "a/b", "invalid_value", "cannot be a drafter's name"),
        ("wild", None, "low_acceptance", "less than min_acceptance 0.1 (mtp: 0."),
        ("torn", None, "invalid_drafter", "torn"),
    ],
)
def test_whatever_is_refused_leaves_the_old_one_serving(backend, run, shelf, tmp_path, path, name, code, said):
    outside = shutil.copytree(shelf / "whole", tmp_path / "outside")
    if path == "link":
        (shelf / path).symlink_to(outside)
    if path in ("linked-weights", "torn"):
        shutil.copytree(shelf / "whole", shelf / path)
    if path == "linked-weights":
        (shelf / path / "model.safetensors").unlink()
        (shelf / path / "model.safetensors").symlink_to(outside / "model.safetensors")
    if path == "torn":
        (shelf / path / "model.safetensors").write_bytes((outside / "model.safetensors").read_bytes()[:-7])
    with pytest.raises(InvalidRequest) as raised:
        run(load(backend, path, name))
    assert (raised.value.param, raised.value.code) == ("path" if name is None else "name", code)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert states(backend) == {"mtp": "active", "none": "loaded"}
    assert pools(backend) == 1
    assert run(answer(backend, ask("after"))).drafter == "mtp"


def test_a_drafter_that_changed_an_answer_would_be_refused(backend, run, monkeypatch):
    tried = trial.Examination._tried

    def lying(self: trial.Examination, drafter: Any) -> trial.Tried:
        found = tried(self, drafter)
        return found if drafter is self.active else replace(found, answers=((1,), *found.answers[1:]))

    monkeypatch.setattr(trial.Examination, "_tried", lying)
    with pytest.raises(InvalidRequest, match="whole changes answers, which no drafter may") as raised:
        run(load(backend, "whole"))
    assert raised.value.code == "wrong_answers"
    assert states(backend) == {"mtp": "active", "none": "loaded"}


def test_without_a_directory_nothing_is_loaded(run, shelf):
    with pytest.raises(InvalidRequest, match="without --drafter-dir"):
        asyncio.run(make(None)._drafters.load(None, str(shelf / "whole"), None, 0))


def test_no_room_for_its_keys_is_one_clear_error(backend, run, monkeypatch):
    monkeypatch.setattr(trial, "free_bytes", lambda device: 1000)
    with pytest.raises(InvalidRequest, match=r"whole needs 0\.\d+ GiB for its keys and values, 0\.000 GiB are free"):
        run(load(backend, "whole"))
    assert pools(backend) == 1


def test_where_nothing_tells_what_is_free_it_is_tried(backend, run, monkeypatch):
    monkeypatch.setattr(trial, "free_bytes", lambda device: None)
    assert run(load(backend, "whole"))["state"] == "loaded"


@pytest.mark.parametrize("at", ["load_student", "_room", "settle", "_prompts"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_memory_that_ends_while_it_is_loaded_or_tried_is_one_clear_error(backend, run, monkeypatch, at, error):
    def none_left(*given: Any) -> Any:
        raise error("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr(trial, at, none_left)
    with pytest.raises(InvalidRequest, match=r"^Memory ran out while whole was tried: [^\n]*$") as raised:
        run(load(backend, "whole"))
    assert (raised.value.param, raised.value.code) == ("path", "not_enough_memory")
    assert pools(backend) == 1


def test_loads_at_once_are_one_after_the_other_and_one_name_is_one_drafter(backend, run):
    async def both() -> list[Any]:
        loads = [load(backend, "whole", "a"), load(backend, "whole", "a"), load(backend, "wild", "b", at_least=0)]
        return await asyncio.gather(*loads, return_exceptions=True)

    first, second, third = run(both())
    assert (first["name"], third["name"]) == ("a", "b")
    assert isinstance(second, InvalidRequest)
    assert (second.param, second.code) == ("name", "name_taken")
    assert pools(backend) == 3
    assert run(load(backend, "whole", "c"))["fingerprint"] == first["fingerprint"]
    assert pools(backend) == 3  # the same block is kept once
    run(backend.unload_drafter("a"))
    assert pools(backend) == 3
    run(backend.unload_drafter("c"))
    assert pools(backend) == 2


def test_a_server_that_ends_waits_for_no_trial(shelf, monkeypatch):
    entered = asyncio.Event()

    async def life() -> None:
        loop = asyncio.get_running_loop()
        read = trial.load_student

        def reading(*given: Any) -> Any:
            loop.call_soon_threadsafe(entered.set)
            return read(*given)

        monkeypatch.setattr(trial, "load_student", reading)
        async with serving(shelf) as backend:
            loading, waiting = (asyncio.create_task(load(backend, "whole", name)) for name in ("a", "b"))
            await entered.wait()
            await backend.close()
            for task in (loading, waiting):
                with pytest.raises(BackendUnavailable, match="shutting down"):
                    await task

    asyncio.run(asyncio.wait_for(life(), 60))


# -- the swap --------------------------------------------------------------------------------------------------------


def test_streams_do_not_notice_a_swap(backend, run):
    """Eight of them run on until it is over; afterwards they are asked again, and another drafter answers."""
    requests = [ask(f"stream-{i}", replace((GREEDY, SEEDED)[i % 2], seed=i, max_tokens=900)) for i in range(8)]

    async def swapped() -> list[Result]:
        begun = [asyncio.Event() for _ in requests]

        def begin(event: asyncio.Event) -> Callable[[], Awaitable[Any]]:
            return lambda: asyncio.sleep(0, event.set())

        tasks = [
            asyncio.create_task(answer(backend, request, begin(event)))
            for request, event in zip(requests, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        await load(backend, "whole")
        backend.promote("whole", 0.5)
        backend.promote("whole")
        backend.roll_back()
        backend.promote("whole")
        assert backend.stats().running == 8
        for request in requests:
            backend.cancel(request.id)
        return list(await asyncio.gather(*tasks))

    async def again(results: list[Result]) -> list[Result]:
        asked = [
            replace(request, sampling=replace(request.sampling, max_tokens=len(result.completion_ids)))
            for request, result in zip(requests, results, strict=True)
        ]
        return list(await asyncio.gather(*(answer(backend, request) for request in asked)))

    before = run(swapped())
    assert {(result.finish_reason, result.drafter) for result in before} == {("cancelled", "mtp")}
    assert min(len(result.completion_ids) for result in before) > 5
    after = run(again(before))
    assert {result.drafter for result in after} == {"whole"}
    assert [tokens(result) for result in after] == [tokens(result) for result in before]
    whole = entry(backend, "whole")
    assert {result.fingerprints.drafter for result in after} == {whole["fingerprint"]}
    drafted = sum(step.drafted > 0 for result in after for step in result.steps)
    assert whole["acceptance"]["draft_tokens_per_pos"][0] == whole["acceptance"]["drafts"] == drafted


def test_a_canary_has_its_share_by_the_requests_ids_and_their_rows_say_so(backend, run):
    run(load(backend, "whole"))
    run(promote(backend, "whole", 0.4))
    assert backend.stats().canary_share == 0.4
    prints = backend.engine()["drafters"]
    short = replace(SEEDED, max_tokens=2)
    results = {f"request-{i}": run(answer(backend, ask(f"request-{i}", short))) for i in range(30)}
    assert {result.drafter for result in results.values()} == {"mtp", "whole"}
    for name, result in results.items():
        assert result.drafter == ("whole" if place(name) / 2**64 < 0.4 else "mtp")
        assert result.fingerprints.drafter == prints[result.drafter]
    backend.roll_back()
    assert states(backend) == {"mtp": "active", "whole": "loaded", "none": "loaded"}
    assert backend.info().drafter == "mtp"


def test_who_names_a_drafter_gets_it_whatever_the_canary(backend, run):
    run(load(backend, "whole"))
    run(promote(backend, "whole", 1))
    assert run(answer(backend, ask("any"))).drafter == "whole"
    assert run(answer(backend, ask("named", drafter="mtp"))).drafter == "mtp"
    with pytest.raises(InvalidRequest, match="the canary drafter"):
        run(backend.unload_drafter("whole"))


def test_a_promotion_lets_go_of_what_has_no_role_any_more(backend, run):
    for name in ("a", "b", "c"):
        run(load(backend, "whole", name))
    run(promote(backend, "a"))
    run(settled(backend))
    assert states(backend) == {"mtp": "previous", "a": "active", "none": "loaded"}
    run(load(backend, "whole", "b"))
    run(promote(backend, "b"))
    assert states(backend) == {"mtp": "loaded", "a": "previous", "b": "active", "none": "loaded"}
    backend.roll_back()
    assert states(backend) == {"mtp": "previous", "a": "active", "b": "loaded", "none": "loaded"}


def test_the_end_of_a_canary_is_no_promotion_and_lets_go_of_nothing(backend, run):
    for name in ("a", "b", "c"):
        run(load(backend, "whole", name))
    run(promote(backend, "a"))  # b and c go
    run(settled(backend))
    for name in ("b", "c"):
        run(load(backend, "whole", name))
    history = backend.list_drafters()["history"]
    for end in (backend.roll_back, lambda: backend.promote("a")):
        run(promote(backend, "b", 1))
        run(ended(end))
        assert states(backend) == {"mtp": "previous", "a": "active", "b": "loaded", "c": "loaded", "none": "loaded"}
    assert backend.list_drafters()["history"] == history


# -- letting go ------------------------------------------------------------------------------------------------------


def test_a_drafter_goes_after_its_last_sequence(backend, run):
    run(load(backend, "whole"))

    async def unload() -> None:
        await backend.unload_drafter("whole")
        assert states(backend)["whole"] == "retiring"
        with pytest.raises(InvalidRequest, match=r"no drafter 'whole' here, only mtp, none"):
            await answer(backend, ask("late", drafter="whole"))
        with pytest.raises(InvalidRequest, match="already"):
            await load(backend, "whole")
        assert pools(backend) == 2
        backend.cancel("last")

    result = run(answer(backend, ask("last", replace(SEEDED, max_tokens=900), "whole"), unload))
    assert (result.drafter, result.finish_reason) == ("whole", "cancelled")
    assert sum(step.accepted for step in result.steps) > 0
    again = replace(SEEDED, max_tokens=len(result.completion_ids))
    assert tokens(result) == tokens(run(answer(backend, ask("again", again))))
    run(settled(backend))
    assert states(backend) == {"mtp": "active", "none": "loaded"}
    assert pools(backend) == 1
    assert "whole" not in {one.drafter for one in backend.stats().drafters}


def test_its_memory_is_free_at_once(backend, run):
    """Not only once the collector looks for what refers to itself: on a GPU that is gigabytes for minutes."""
    run(load(backend, "whole"))
    run(answer(backend, ask("one", drafter="whole")))
    weights = weakref.ref(backend._drafters.named("whole").draft_block)
    gc.collect()
    gc.disable()
    try:
        run(backend.unload_drafter("whole"))
        run(asyncio.sleep(0))
        assert weights() is None
    finally:
        gc.enable()


def test_the_active_one_and_none_cannot_be_unloaded(backend, run):
    for name, said in (("mtp", "the active drafter"), ("none", "drafts nothing"), ("other", "no drafter 'other'")):
        with pytest.raises(InvalidRequest, match=said):
            run(backend.unload_drafter(name))


def test_what_the_server_was_started_with_cannot_be_unloaded(run, shelf):
    """Whatever its kind, and in whatever role it has no requests: the API could not bring it back."""

    async def life() -> None:
        further = ("prediction", f"student:{shelf / 'whole'}")
        async with serving(shelf, further_drafters=further) as backend:
            backend.promote("prediction")
            await load(backend, "wild", at_least=0)
            before = states(backend)
            assert (before["mtp"], before["prediction"], before["whole"]) == ("previous", "active", "loaded")
            for name, code in (
                ("mtp", "drafter_of_start"),
                ("whole", "drafter_of_start"),
                ("prediction", "drafter_in_use"),
            ):
                with pytest.raises(InvalidRequest) as refused:
                    await backend.unload_drafter(name)
                assert (refused.value.param, refused.value.code) == ("drafter", code)
            assert states(backend) == before
            await backend.unload_drafter("wild")
            assert states(backend) == {name: state for name, state in before.items() if name != "wild"}

    run(life())


def test_the_previous_one_can_and_is_not_gone_back_to(backend, run):
    run(load(backend, "whole", "a"))
    run(promote(backend, "a"))
    run(load(backend, "whole", "c"))
    run(promote(backend, "c"))
    run(backend.unload_drafter("a"))
    told = backend.list_drafters()
    assert (told["active"], told["previous"]) == ("c", "mtp")


def test_what_a_drafter_left_in_the_prefix_cache_goes_with_it(backend, run):
    """Its pool is another one when it comes back: what snapshots say of its rows would be of the first."""
    greedy = replace(GREEDY, max_tokens=60)

    def steps(name: str) -> list[tuple[int, int]]:
        result = run(answer(backend, replace(ask(name, greedy, "whole", SYSTEM), cache_salt="prefix")))
        return [(step.drafted, step.accepted) for step in result.steps]

    run(load(backend, "whole"))
    first = steps("first")
    assert steps("hit") == first
    run(backend.unload_drafter("whole"))
    run(load(backend, "whole"))
    hits = backend.stats().prefix_cache_hits
    assert steps("after") == first
    assert backend.stats().prefix_cache_hits > hits


def test_a_new_drafter_runs_the_rows_of_a_known_prefix_once(backend, run, monkeypatch):
    resume, found = RecursiveDrafter.resume, []

    def resuming(drafter: RecursiveDrafter, state: Any, boundary: int, known: bool) -> None:
        found.append((drafter.name, known))
        resume(drafter, state, boundary, known)

    run(load(backend, "whole"))
    monkeypatch.setattr(RecursiveDrafter, "resume", resuming)
    greedy = replace(GREEDY, max_tokens=30)
    names = ("mtp", "whole", "whole", "mtp")
    results = [
        run(answer(backend, replace(ask(f"{name}-{i}", greedy, name, SYSTEM), cache_salt="once")))
        for i, name in enumerate(names)
    ]
    assert found == [("whole", False), ("whole", True), ("mtp", True)]
    assert len({tokens(result) for result in results}) == 1
    assert len({tuple((step.drafted, step.accepted) for step in result.steps) for result in results}) == 1


# -- what is counted -------------------------------------------------------------------------------------------------


def test_steps_are_timed_where_one_drafter_had_them_alone(backend, run):
    run(load(backend, "whole"))
    alone = run(answer(backend, ask("alone", drafter="whole"))).steps[1:]  # beside the first its prompt was run
    between_turns(backend)
    (steps,) = entry(backend, "whole")["steps"]
    assert (steps["batch"], steps["steps"], steps["sequences"]) == (1, len(alone), len(alone))
    assert steps["accepted"] == sum(step.accepted for step in alone)
    assert steps["seconds"] > 0

    async def mixed() -> None:
        requests = [ask(f"mixed-{name}", drafter=name) for name in ("whole", "mtp", "none")]
        await asyncio.gather(*(answer(backend, request) for request in requests))

    before = backend.stats().step_times
    run(mixed())
    between_turns(backend)
    after = backend.stats().step_times
    assert [times for one in after.values() for times in one if times.batch == 4] == [
        times for one in before.values() for times in one if times.batch == 4
    ]

    async def together() -> None:
        await asyncio.gather(*(answer(backend, ask(f"together-{i}", drafter="whole")) for i in range(3)))

    run(together())
    between_turns(backend)
    (three,) = [one for one in entry(backend, "whole")["steps"] if one["batch"] == 4]
    assert three["sequences"] == 3 * three["steps"] > 0


def test_steps_beside_a_trial_are_not_timed(backend, run, monkeypatch):
    may_read, read = threading.Event(), trial.load_student

    def reading(*given: Any) -> Any:
        assert may_read.wait(60)
        return read(*given)

    monkeypatch.setattr(trial, "load_student", reading)

    async def beside() -> None:
        loading = asyncio.create_task(load(backend, "whole"))
        await asyncio.sleep(0)
        before = entry(backend, "mtp")
        await answer(backend, ask("beside"))
        between_turns(backend)
        after = entry(backend, "mtp")
        may_read.set()
        await loading
        assert after["steps"] == before["steps"]
        assert after["acceptance"]["drafts"] > before["acceptance"]["drafts"]

    run(beside())


def test_where_nothing_drafted_a_student_can(shelf):
    async def life() -> None:
        async with serving(shelf, drafter="none") as backend:
            before = await answer(backend, ask("before"))
            told = await load(backend, "whole")
            assert told["trial"]["active"]["drafter"] == "none"
            backend.promote("whole")
            after = await answer(backend, ask("after"))
            assert tokens(after) == tokens(before)
            assert sum(step.accepted for step in after.steps) > 0 == sum(step.drafted for step in before.steps)
            assert backend.info().draft_tokens == 2

    asyncio.run(asyncio.wait_for(life(), 60))


def test_an_engine_that_begins_anew_still_has_them(shelf, monkeypatch):
    reserve = Scheduler.reserve
    to_break: list[Engine] = []
    left: list[Future[None]] = []  # what an engine was called for and did not come to

    def broken(scheduler: Scheduler) -> None:
        if to_break and scheduler.decoding:
            left.append(to_break.pop().call(lambda loop: None))
            raise LookupError("lost count")
        reserve(scheduler)

    monkeypatch.setattr(Scheduler, "reserve", broken)

    async def life() -> None:
        async with serving(shelf) as backend:
            await load(backend, "whole")
            await load(backend, "whole", "other")
            backend.promote("whole")
            await load(backend, "wild", "leaving", at_least=0)
            before = await answer(backend, ask("before"))

            async def crash() -> None:
                await backend.unload_drafter("leaving")
                to_break.append(backend._engine)

            crashed = await answer(backend, ask("crashed", replace(SEEDED, max_tokens=400), "leaving"), crash)
            assert crashed.finish_reason == "error"
            with pytest.raises(BackendUnavailable, match="lost count"):
                left[0].result(30)
            while not backend.ready():
                await asyncio.sleep(0.01)
            after = await answer(backend, ask("after"))
            assert (tokens(after), after.drafter) == (tokens(before), "whole")
            assert [(one.drafted, one.accepted) for one in after.steps] == [
                (one.drafted, one.accepted) for one in before.steps
            ]
            while "leaving" in states(backend):
                await asyncio.sleep(0.01)
            assert pools(backend) == 2

    asyncio.run(asyncio.wait_for(life(), 60))


# -- the engine's part -----------------------------------------------------------------------------------------------


def test_the_engine_thread_does_what_it_is_called_for_and_outlives_its_faults(backend, run):
    engine = backend._engine
    assert engine.call(lambda loop: loop.busy).result(10) is False
    failing = engine.call(lambda loop: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert run(answer(backend, ask("after"))).finish_reason == "length"


def test_an_engine_that_has_ended_takes_no_call(shelf):
    async def life() -> None:
        async with serving(shelf) as backend:
            pass
        with pytest.raises(BackendUnavailable, match="shutting down"):
            backend._engine.call(lambda loop: None)

    asyncio.run(life())
