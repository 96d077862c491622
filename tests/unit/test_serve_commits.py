"""Rows that end together wake the event loop once, and each is told how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from serve.commits import Commits


def ended(futures: list[Future[None]], error: Exception | None = None) -> None:
    """End them one after the other on a thread of their own, before the event loop has its turn."""

    def run() -> None:
        for future in futures:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def counted(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., object]]:
    """What is called on the loop from other threads, as it comes."""
    calls: list[Callable[..., object]] = []
    real = loop.call_soon_threadsafe

    def call(callback: Callable[..., object], *arguments: Any, **more: Any) -> asyncio.Handle:
        calls.append(callback)
        return real(callback, *arguments, **more)

    monkeypatch.setattr(loop, "call_soon_threadsafe", call)
    return calls


def test_rows_that_end_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        calls = counted(asyncio.get_running_loop(), monkeypatch)
        commits, rows = Commits(), [Future[None]() for _ in range(8)]
        told = [commits.follow(row) for row in rows]
        ended(rows[:5])
        await asyncio.gather(*told[:5])
        assert len(calls) == 1
        assert not any(future.done() for future in told[5:])
        ended(rows[5:])
        await asyncio.gather(*told[5:])
        assert len(calls) == 2

    asyncio.run(run())


def test_each_is_told_its_own_error() -> None:
    async def run() -> None:
        commits, (good, bad) = Commits(), [Future[None]() for _ in range(2)]
        fine, broken = commits.follow(good), commits.follow(bad)
        ended([bad], OSError("full"))
        ended([good])
        with pytest.raises(OSError, match="full"):
            await broken
        assert await fine is None

    asyncio.run(run())


def test_a_row_that_has_ended_before_is_told_too() -> None:
    async def run() -> None:
        row = Future[None]()
        row.set_result(None)
        assert await Commits().follow(row) is None

    asyncio.run(run())


def test_whoever_stops_waiting_holds_nobody_up() -> None:
    async def run() -> None:
        commits, rows = Commits(), [Future[None]() for _ in range(2)]
        left, stays = (commits.follow(row) for row in rows)
        left.cancel()
        ended(rows)
        assert await stays is None
        assert rows[0].result() is None

    asyncio.run(run())


def test_a_loop_that_is_no_more_is_let_be() -> None:
    row = Future[None]()

    async def follow() -> None:
        Commits().follow(row)

    asyncio.run(follow())
    ended([row])
    assert row.result() is None


def test_threads_that_end_rows_at_once_lose_none() -> None:
    async def run() -> None:
        commits, rows = Commits(), [Future[None]() for _ in range(400)]
        told = [commits.follow(row) for row in rows]
        threads = [threading.Thread(target=ended, args=(rows[part::8],)) for part in range(8)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(asyncio.gather(*told), 20)
        for thread in threads:
            thread.join()

    asyncio.run(run())
