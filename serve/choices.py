"""Several generations told as one answer: the choices of a prompt, or of several prompts.

Knows generations; knows neither HTTP nor shapes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from backend.interface import ChatEvent, SamplingRequest
from serve.generation import Generation


def seeded(sampling: SamplingRequest, choices: int) -> SamplingRequest:
    """With a seed where several choices have none: they share it, and each draws its own noise from it."""
    if choices > 1 and sampling.seed is None:
        return replace(sampling, seed=secrets.randbits(63))
    return sampling


class Choices:
    """`begin` them, then iterate `events`; `cancel` them when nobody wants the rest."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = generations

    async def begin(self, leaders: Sequence[int] = (0,)) -> None:
        """Wait until the leaders, one choice of each prompt, have their first events: the others fail as they do.

        Raises InvalidRequest or BackendUnavailable where a generation never started; none goes on then. Cut off while
        it waits, it can be called again.
        """
        try:
            for leader in leaders:
                await self.generations[leader].begin()
        except Exception:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[tuple[int, ChatEvent]]:
        """Every event with its choice's index, in the order of their coming. Raises BackendError where one broke."""
        told: asyncio.Queue[tuple[int, ChatEvent] | Exception | None] = asyncio.Queue()

        async def tell(index: int, generation: Generation) -> None:
            try:
                await generation.begin()
                async for event in generation.events():
                    told.put_nowait((index, event))
                told.put_nowait(None)
            except Exception as error:
                told.put_nowait(error)

        tasks = [asyncio.create_task(tell(i, generation)) for i, generation in enumerate(self.generations)]
        try:
            for _ in tasks:
                while (item := await told.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    def cancel(self) -> None:
        """End those that still run within one step of the engine."""
        for generation in self.generations:
            generation.cancel()
