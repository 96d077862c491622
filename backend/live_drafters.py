"""The drafters of a serving backend: loaded beside running ones, promoted, rolled back, let go after their last use.

Everything here runs on the event loop. What is slow goes to a worker thread, what the engine's sequences hold is
touched on the engine's, between two turns; by law L2 nothing of it changes an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from backend.default_drafter import DefaultDrafter
from backend.drafters.protocol import Drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.drafters.student import HEADER, WEIGHTS
from backend.engine.engine import Engine
from backend.engine.loop import Loop
from backend.engine.speculation import GRAMMAR, PREDICTION
from backend.engine.statistics import SpeculationCounts, TimedStep
from backend.interface import BackendUnavailable, DrafterStats, InvalidRequest
from backend.loading import Loaded
from backend.models.student import StudentBlock
from backend.trial import Candidate, Examination

SOURCES = (PREDICTION, GRAMMAR)  # of drafts, whatever drafters there are


@dataclass(eq=False)
class Live:
    """A drafter that sequences may have. `came`: over the API, and goes as it came once it has no role."""

    drafter: Drafter
    came: bool
    parameters_read: int
    loaded_at: float
    held: int = 0  # by so many sequences that have not ended
    leaving: bool = False
    release: asyncio.Task[None] | None = None

    @property
    def kind(self) -> str:
        drafter = self.drafter
        is_student = isinstance(drafter, RecursiveDrafter) and isinstance(drafter.draft_block, StudentBlock)
        return "student" if is_student else drafter.name


class LiveDrafters:
    """By name; `default` says which of them requests have that name none."""

    default: DefaultDrafter  # once adopted; a promotion outlives an engine that is started anew

    def __init__(self, directory: str | None, engine: Engine, counts: SpeculationCounts) -> None:
        """`directory`: the only place that drafters are loaded from; None: they are not."""
        self._directory, self._engine, self._counts = directory, engine, counts
        self._live: dict[str, Live] = {}
        self._blocks: Counter[str] = Counter()  # by how many drafters each block is used
        self._loading = asyncio.Lock()
        self._trying = self._closed = False

    def adopt(self, drafters: Mapping[str, Drafter], default: Drafter | None) -> None:
        """Those that the server was started with, attached; called once, before any other."""
        self.default = DefaultDrafter(default.name if default else "none")
        for name, drafter in drafters.items():
            self._add(Live(drafter, False, _parameters_read(drafter), time.time()))
            self._counts.begin(name)
        for source in SOURCES:
            self._counts.begin(source)

    def close(self) -> None:
        """Nobody waits for a trial any more."""
        self._closed = True

    def watch(self, step: TimedStep) -> None:
        """Count a step's time, but not of one that a trial ran beside; called on the engine thread."""
        if not self._trying:
            self._counts.add_timed(step)

    # -- what requests have --

    def named(self, name: str) -> Drafter | None:
        """None is the one that drafts nothing. Raises InvalidRequest where there is no such drafter."""
        live = self._live.get(name)
        if name != "none" and (live is None or live.leaving):
            known = ", ".join([*(name for name, live in self._live.items() if not live.leaving), "none"])
            raise InvalidRequest(f"There is no drafter {name!r} here, only {known}.", param="drafter")
        return live.drafter if live else None

    def of(self, request_id: str, name: str | None) -> Drafter | None:
        """The drafter of a request that names this one, or none."""
        return self.named(self.default.of(request_id) if name is None else name)

    @property
    def active(self) -> Drafter | None:
        return self.named(self.default.name)

    def hold(self, drafter: Drafter | None) -> None:
        """One more sequence has it."""
        if drafter:
            self._live[drafter.name].held += 1

    def let_go(self, drafter: Drafter | None) -> None:
        """One of its sequences has ended."""
        if drafter:
            self._live[drafter.name].held -= 1
        for live in list(self._live.values()):
            self._release_if_over(live)

    # -- what an operator does --

    async def load(self, loaded: Loaded, path: str, name: str | None, min_acceptance: float) -> Mapping[str, Any]:
        """See `ChatBackend.load_drafter`. One at a time: each takes memory and half the machine."""
        directory = self._inside(path)
        async with self._loading:
            if self._closed:
                raise BackendUnavailable("the engine is shutting down")
            examination = Examination(
                loaded, self.active, frozenset(self._live), min_acceptance, going_on=lambda: not self._closed
            )
            self._trying = True
            try:
                candidate = await asyncio.to_thread(examination.of, directory, name)
            finally:
                self._trying = False
            live = await self._attach(candidate)
            loaded.probe.tiles.update(candidate.tiles)
            return {**self._entry(live, self._counted()), "trial": candidate.trial}

    async def unload(self, name: str) -> None:
        """See `ChatBackend.unload_drafter`."""
        drafter = self.named(name)
        state = self.default.state(name)
        if drafter is None or state in ("active", "canary"):
            what = "It drafts nothing" if drafter is None else f"{name!r} is the {state} drafter"
            raise InvalidRequest(f"{what}: it cannot be unloaded.", param="drafter", code="drafter_in_use")
        live = self._live[name]
        if not live.came:
            raise InvalidRequest(
                f"The server was started with {name!r}, and nothing but another start would bring it back: "
                "only what was loaded over the API can be unloaded.",
                param="drafter",
                code="drafter_of_start",
            )
        self._leave(live)
        if live.release:
            await asyncio.shield(live.release)

    def promote(self, name: str, canary: float | None) -> None:
        """See `ChatBackend.promote`. Of those that came over the API, the ones go that a promotion leaves without role.

        The default's own name ends the canary and promotes nothing.
        """
        self.named(name)
        if canary is not None:
            self.default.begin_canary(name, canary)
            return
        before = self.default.name
        self.default.promote(name)
        if name == before:
            return
        for live in list(self._live.values()):
            if live.came and not live.leaving and self.default.state(live.drafter.name) is None:
                self._leave(live)

    # -- what is told --

    def states(self) -> dict[str, str]:
        """Of every drafter, "none" included."""
        return {name: self._state(name) for name in (*self._live, "none")}

    def fingerprints(self) -> dict[str, str]:
        return {name: live.drafter.fingerprint for name, live in self._live.items()}

    def canary(self) -> dict[str, Any] | None:
        return asdict(self.default.canary) if self.default.canary else None

    def as_json(self) -> dict[str, Any]:
        counted = self._counted()
        none = {"name": "none", "kind": "none", "fingerprint": "none", "state": self._state("none"), "loaded_at": None}
        nothing = {"drafts": 0, "draft_tokens_per_pos": (), "accepted_tokens_per_pos": ()}
        return {
            "active": self.default.name,
            "previous": self.default.previous,
            "canary": self.canary(),
            "drafters": [
                *(self._entry(live, counted) for live in self._live.values()),
                {**none, "parameters_read": 0, "evaluation": None, "acceptance": nothing, "steps": self._steps("none")},
            ],
            "history": self.default.as_json(),
        }

    # -- how --

    def _inside(self, path: str) -> Path:
        """The checkpoint directory meant. Raises InvalidRequest for any that is not inside the one allowed."""
        if self._directory is None:
            raise InvalidRequest(
                "This server loads no drafters: it was started without --drafter-dir.",
                param="path",
                code="drafter_loading_not_allowed",
            )
        try:
            root = Path(self._directory).resolve()
            found = (root / path).resolve()
            is_inside = all(place.resolve().is_relative_to(root) for place in (found, found / WEIGHTS, found / HEADER))
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name too long, a zero byte
            is_inside = False
        if not is_inside:
            raise InvalidRequest(f"{path!r} does not lie inside --drafter-dir.", param="path", code="path_not_allowed")
        return found

    async def _attach(self, candidate: Candidate) -> Live:
        drafter = candidate.drafter
        live = Live(drafter, True, _parameters_read(drafter), time.time())
        self._blocks[drafter.block] += 1  # before the engine is asked: whoever lets the block go then sees it
        try:
            await asyncio.wrap_future(self._engine.call(partial(_attach, candidate)))
        finally:
            self._blocks[drafter.block] -= 1
        self._counts.begin(drafter.name)
        self._add(live)
        return live

    def _add(self, live: Live) -> None:
        self._live[live.drafter.name] = live
        if live.drafter.block is not None:
            self._blocks[live.drafter.block] += 1

    def _leave(self, live: Live) -> None:
        live.leaving = True
        self.default.forget(live.drafter.name)
        self._release_if_over(live)

    def _release_if_over(self, live: Live) -> None:
        if live.leaving and not live.held and live.release is None:
            live.release = asyncio.get_running_loop().create_task(self._release(live), name="drafter release")

    async def _release(self, live: Live) -> None:
        """Let its pool go, if no other drafter has the same block, and forget it."""
        block, name = live.drafter.block, live.drafter.name
        if block is not None:
            self._blocks[block] -= 1
            try:
                if not self._blocks[block]:
                    await asyncio.wrap_future(self._engine.call(partial(_drop, block)))
            except BackendUnavailable:  # it ends, or begins anew: once more when the next sequence has ended
                self._blocks[block] += 1
                live.release = None
                return
        del self._live[name]
        live.release = None  # a task that its own drafter knows would keep both until they are looked for
        if name not in SOURCES:
            self._counts.forget(name)

    def _state(self, name: str) -> str:
        if (live := self._live.get(name)) and live.leaving:
            return "retiring"
        return self.default.state(name) or "loaded"

    def _counted(self) -> dict[str, DrafterStats]:
        return {one.drafter: one for one in self._counts.snapshot()}

    def _entry(self, live: Live, counted: Mapping[str, DrafterStats]) -> dict[str, Any]:
        name = live.drafter.name
        stats = counted[name]
        return {
            "name": name,
            "kind": live.kind,
            "fingerprint": live.drafter.fingerprint,
            "state": self._state(name),
            "loaded_at": live.loaded_at,
            "parameters_read": live.parameters_read,
            "evaluation": live.drafter.evaluation if isinstance(live.drafter, RecursiveDrafter) else None,
            "acceptance": {
                "drafts": stats.drafts,
                "draft_tokens_per_pos": stats.draft_tokens_per_pos,
                "accepted_tokens_per_pos": stats.accepted_tokens_per_pos,
            },
            "steps": self._steps(name),
        }

    def _steps(self, name: str) -> list[dict[str, Any]]:
        return [asdict(one) for one in self._counts.times(name)]


def _parameters_read(drafter: Drafter) -> int:
    """Weights that one draft step reads."""
    return drafter.draft_block.parameters_read if isinstance(drafter, RecursiveDrafter) else 0


def _attach(candidate: Candidate, loop: Loop) -> None:
    memory = loop.speculation.memory
    if candidate.pool is not None:
        memory.add_block(candidate.drafter.block, candidate.pool)
    candidate.drafter.attach(memory)


def _drop(block: str, loop: Loop) -> None:
    loop.speculation.memory.drop_block(block)
    if loop.scheduler.prefix is not None:
        loop.scheduler.prefix.forget_block(block)
