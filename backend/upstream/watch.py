"""How an upstream is, looked at again and again: whether it answers, which models it has, what it counts.

Knows no request; what its metrics mean is read elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import httpx

from backend.interface import BackendUnavailable
from backend.upstream.faults import UpstreamFault, limited_body, parsed

LOOK_TIMEOUT = 5.0
LOOKS_WITHOUT_METRICS = 5  # until an upstream that told none is asked for them again
MOST_BYTES = 32 * 1024 * 1024

log = logging.getLogger(__name__)


class Watch:
    """Looks from `start` to `close`; `reachable` is also set by those who find out otherwise."""

    def __init__(self, base: str, every: float) -> None:
        self.reachable = False
        self._base = base
        self._root = base.removesuffix("/v1")
        self._every = every
        self._models: list[Mapping[str, Any]] = []
        self._metrics, self._metrics_at = "", 0.0
        self._pause = 0  # looks without a look at the metrics
        self._task: asyncio.Task[None] | None = None

    async def start(self, client: httpx.AsyncClient) -> None:
        """Look once before returning; an upstream that does not answer yet may do so later."""
        self._client = client
        await self._look()
        if not self.reachable:
            log.warning("the upstream does not answer yet")
        self._task = asyncio.create_task(self._run(), name="watching the upstream")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def first_model(self) -> str | None:
        """The first of the upstream's models, as far as they are known."""
        return next((model["id"] for model in self._models if isinstance(model.get("id"), str)), None)

    def max_model_len(self, name: str | None) -> int:
        """What the upstream says of this model; 0 where it says nothing."""
        lengths = (model.get("max_model_len") for model in self._models if model.get("id") == name)
        return next((length for length in lengths if isinstance(length, int)), 0)

    def metrics(self) -> str:
        """The upstream's metrics; empty where there are none that are fresh."""
        return self._metrics if time.monotonic() - self._metrics_at < 3 * self._every else ""

    async def models(self) -> Mapping[str, Any]:
        """The upstream's own list of models, as it is now. Raises BackendUnavailable."""
        try:
            status, said = await self._get(f"{self._base}/models")
        except (httpx.HTTPError, UpstreamFault):
            raise BackendUnavailable("The upstream cannot be reached.") from None
        if status != 200 or (told := parsed(said)) is None:
            raise BackendUnavailable(f"The upstream tells no models; it answered {status}.")
        self._remember(told)
        return told

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every if self.reachable else min(1.0, self._every))
            before = self.reachable
            await self._look()
            if before != self.reachable:
                log.warning("the upstream %s", "answers again" if self.reachable else "does not answer any more")

    async def _look(self) -> None:
        self.reachable = await self._answers()
        self._pause -= 1
        if not self.reachable or self._pause > 0:
            return
        try:
            status, said = await self._get(f"{self._root}/metrics")
        except (httpx.HTTPError, UpstreamFault):
            status, said = 0, b""
        if status == 200:
            self._metrics, self._metrics_at = said.decode("utf-8", "replace"), time.monotonic()
        else:
            self._pause = LOOKS_WITHOUT_METRICS

    async def _answers(self) -> bool:
        try:
            status, said = await self._get(f"{self._base}/models")
            if status == 200 and (told := parsed(said)) is not None:
                self._remember(told)
                return True
            status, _ = await self._get(f"{self._root}/health")
        except (httpx.HTTPError, UpstreamFault):
            return False
        return status == 200

    def _remember(self, told: Mapping[str, Any]) -> None:
        given = told.get("data")
        if isinstance(given, list):
            self._models = [model for model in given if isinstance(model, dict)]

    async def _get(self, url: str) -> tuple[int, bytes]:
        """Status and body. Raises httpx.HTTPError or UpstreamFault."""
        async with self._client.stream("GET", url, timeout=LOOK_TIMEOUT) as response:
            return response.status_code, await limited_body(response, MOST_BYTES)
