"""The event loop's side of rows on their way: a future for each, and one wake-up for those that end together.

Knows the writer's futures; knows neither rows nor why they are waited for.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future


class Commits:
    """Of one event loop. `asyncio.wrap_future` wakes the loop for every single one, and each waking is a turn in which
    the writer's thread and the loop's take the interpreter from each other, and from the engine's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[tuple[asyncio.Future[None], Future[None]]] = []

    def follow(self, row: Future[None]) -> asyncio.Future[None]:
        """A future of the running loop that ends as the row's does. Cancelling it does nothing to the row's."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()

        def end(row: Future[None]) -> None:
            with self._lock:
                first = not self._ended
                self._ended.append((told, row))
            if first and not loop.is_closed():
                loop.call_soon_threadsafe(self._tell)

        row.add_done_callback(end)
        return told

    def _tell(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for told, row in ended:
            if told.done():
                continue
            if (error := row.exception()) is None:
                told.set_result(None)
            else:
                told.set_exception(error)
