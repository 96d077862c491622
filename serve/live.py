"""What the live page shows, made once a second for all who look: the figures of /metrics, and how they went lately.

Knows samples and the service's state; knows no engine, no page and no viewer but by their number.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from serve.metrics import PREFIX
from serve.service import Service, State

EVERY = 1.0  # seconds
RATE_SECONDS = 5.0  # over which tokens are counted per second
RECENT_SECONDS = 60.0  # over which acceptance is
LATENCY_SECONDS = 600.0  # over which latencies are, and how long a past moment is kept
LATENCIES = {
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token": "inter_token_latency_seconds",
    "end_to_end": "e2e_request_latency_seconds",
}
QUANTILES = (0.5, 0.9, 0.99)

log = logging.getLogger(__name__)

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
Counts = tuple[float, ...]


@dataclass(frozen=True)
class Slots:
    """One drafter's counts since start: verify steps with drafts, and of each slot P_s and A_s (DESIGN §6).

    `counted`: P_s are counted. Of an upstream that only tells its drafts, each slot is taken to stand in every one.
    """

    drafts: float = 0
    proposed: Counts = ()
    accepted: Counts = ()
    counted: bool = True

    def since(self, past: Slots | None) -> Slots:
        """What came after `past`; everything where the counts have begun anew meanwhile."""
        if past is None or past.drafts > self.drafts or len(past.accepted) > len(self.accepted):
            return self
        return Slots(
            self.drafts - past.drafts,
            _less(self.proposed, past.proposed),
            _less(self.accepted, past.accepted),
            self.counted,
        )

    @property
    def acceptance(self) -> list[float | None]:
        """surv_s = A_s / P_s of each slot; None where it was never proposed."""
        return [a / p if p else None for a, p in zip(self.accepted, self.proposed, strict=True)]

    @property
    def length(self) -> float | None:
        """τ = 1 + Σ A_s / verify steps with drafts."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    def as_json(self) -> dict[str, Any]:
        return {
            "drafts": self.drafts,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "length": self.length,
        }


@dataclass(frozen=True)
class Buckets:
    """A histogram's bounds, the last one infinite, and how many observations were no greater than each."""

    bounds: Counts = ()
    counts: Counts = ()

    def since(self, past: Buckets | None) -> Buckets:
        return self if past is None else Buckets(self.bounds, _less(self.counts, past.counts))

    def quantile(self, q: float) -> float | None:
        """As Prometheus' histogram_quantile has it: linear within a bucket, at most the greatest finite bound."""
        if not self.counts or not self.counts[-1]:
            return None
        rank = q * self.counts[-1]
        at = next(at for at, count in enumerate(self.counts) if count >= rank)
        if at == len(self.counts) - 1:
            return self.bounds[-2]
        lower, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (0.0, 0.0)
        return lower + (self.bounds[at] - lower) * (rank - below) / (self.counts[at] - below)

    def as_json(self) -> dict[str, Any]:
        told = {f"p{100 * q:g}": self.quantile(q) for q in QUANTILES}
        return {"count": self.counts[-1] if self.counts else 0, **told}


@dataclass(frozen=True)
class Moment:
    """What is kept of a moment to compare later ones with."""

    at: float  # of the monotonic clock
    generated: float = 0
    drafters: Mapping[str, Slots] = field(default_factory=dict)
    latencies: Mapping[str, Buckets] = field(default_factory=dict)


class Live:
    """Looks from `start` to `close`, or until the service has drained; `lines` are what a viewer is sent."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._moments = deque([Moment(time.monotonic())])
        self._points: deque[Mapping[str, Any]] = deque(maxlen=round(LATENCY_SECONDS / EVERY))
        self._told: Mapping[str, Any] = {}
        self._line = ""
        self._tick = asyncio.Event()  # of the next look; a viewer who is slow misses some
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._look()
        self._task = asyncio.create_task(self._run(), name="live figures")

    async def close(self) -> None:
        """End every viewer's stream."""
        self._over = True
        self._tick.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def lines(self) -> AsyncIterator[str]:
        """JSON: the figures now and the last minutes' points, then the figures of each second with their point."""
        yield json.dumps({**self._told, "history": list(self._points)})
        while not self._over:
            await self._tick.wait()
            yield self._line

    async def _run(self) -> None:
        failing = False
        while not self._over:
            await asyncio.sleep(EVERY)
            try:
                self._look()
            except Exception:
                if not failing:
                    log.exception("the live figures cannot be made")
                failing = True
                continue  # a page that hears nothing says so
            failing = False
            # A stream that did not end would keep the server from ending.
            self._over = self._service.state is State.DRAINING and not self._service.running
            tick, self._tick = self._tick, asyncio.Event()
            if self._over:
                self._tick.set()
            tick.set()

    def _look(self) -> None:
        samples = {(one.name, frozenset(one.labels.items())): one.value for one in self._service.metrics.samples()}
        now = Moment(
            at=time.monotonic(),
            generated=_value(samples, "generation_tokens_total") or 0,
            drafters=_drafters(samples),
            latencies={name: _buckets(samples, metric) for name, metric in LATENCIES.items()},
        )
        while len(self._moments) > 1 and now.at - self._moments[1].at >= LATENCY_SECONDS:
            self._moments.popleft()
        self._told = self._figures(samples, now)
        self._moments.append(now)
        self._points.append(self._told["point"])
        self._line = json.dumps(self._told)

    def _ago(self, now: Moment, seconds: float) -> Moment:
        """The last moment that is so long ago, or the first of all."""
        return next((past for past in reversed(self._moments) if now.at - past.at >= seconds), self._moments[0])

    def _figures(self, samples: Samples, now: Moment) -> dict[str, Any]:
        service = self._service
        before = self._ago(now, RATE_SECONDS)
        minute, minutes = self._ago(now, RECENT_SECONDS), self._ago(now, LATENCY_SECONDS)
        recent = {name: slots.since(minute.drafters.get(name)) for name, slots in now.drafters.items()}
        engine = service.backend.engine() if service.has_model else {}
        prints = engine.get("drafters", {})
        defaults = [one["drafter"] for one in engine.get("default_drafters", ())]
        states = engine.get("drafter_states", {})
        requests = {
            "running": _value(samples, "num_requests_running"),
            "waiting": _value(samples, "num_requests_waiting"),
            "ended": _by(samples, "request_success_total", "finished_reason"),
        }
        rate = (now.generated - before.generated) / (now.at - before.at) if now.at > before.at else 0.0
        draft_tokens = _value(samples, "spec_decode_draft_length")
        return {
            "state": service.state.value,
            "model": service.model_name if service.has_model else None,
            "has_engine": draft_tokens is not None,  # else an upstream's, which tells no steps and has its own cache
            "requests": requests,
            "tokens": {
                "per_second": rate,
                "prompt": _value(samples, "prompt_tokens_total"),
                "generated": now.generated,
            },
            "latency": {
                name: all_.since(minutes.latencies.get(name)).as_json() for name, all_ in now.latencies.items()
            },
            "latency_seconds": now.at - minutes.at,
            "cache": {
                "usage": _value(samples, "kv_cache_usage_ratio"),
                "queries": _value(samples, "prefix_cache_queries_total"),
                "hits": _value(samples, "prefix_cache_hits_total"),
                "preemptions": _value(samples, "num_preemptions_total"),
            },
            "draft_tokens": draft_tokens,
            "length": Slots(
                drafts=sum(slots.drafts for slots in recent.values()),
                accepted=tuple(sum(slots.accepted) for slots in recent.values()),
            ).length,  # of all drafters together
            "drafters": [
                {
                    "name": name,
                    "fingerprint": prints.get(name),
                    "state": states.get(name),
                    "counted": slots.counted,
                    "total": slots.as_json(),
                    "recent": recent[name].as_json(),
                }
                for name, slots in now.drafters.items()
            ],
            # What an operator can make the default, and what a roll back would; None where nothing drafts here.
            "promotion": {
                "default": defaults[-1],
                "others": [name for name, state in states.items() if state not in ("active", "retiring")],
                "canary": engine["canary"],
                "previous": defaults[-2] if len(defaults) > 1 else None,
            }
            if defaults
            else None,
            "capture": {
                "state": service.recorder.state,
                "rows": _by(samples, "capture_generations_total", "status"),
                "queue": _value(samples, "capture_queue_depth"),
                "late": _value(samples, "capture_late_total"),
                "lost": _value(samples, "capture_failures_total"),
            },
            "point": {
                "at": round(time.time(), 2),
                "tokens_per_second": round(rate, 1),
                "running": requests["running"],
                "waiting": requests["waiting"],
                "draft_tokens": draft_tokens,
                "drafters": {
                    name: {"length": _rounded(slots.length), "acceptance": [*map(_rounded, slots.acceptance)]}
                    for name, slots in recent.items()
                    if slots.drafts
                },
            },
        }


def _drafters(samples: Samples) -> dict[str, Slots]:
    """By name, in the order in which /metrics tells them: the default first."""
    drafts = _by(samples, "spec_decode_num_drafts_total", "drafter")
    proposed = _by_slot(samples, "spec_decode_num_draft_tokens_per_pos_total")
    accepted = _by_slot(samples, "spec_decode_num_accepted_tokens_per_pos_total")
    return {
        name: Slots(
            count,
            proposed.get(name) or (count,) * len(accepted.get(name, ())),
            accepted.get(name, ()),
            name in proposed or name not in accepted,
        )
        for name, count in drafts.items()
    }


def _value(samples: Samples, name: str) -> float | None:
    return samples.get((PREFIX + name, frozenset()))


def _by(samples: Samples, name: str, label: str) -> dict[str, float]:
    return {dict(labels)[label]: value for (its, labels), value in samples.items() if its == PREFIX + name}


def _by_slot(samples: Samples, name: str) -> dict[str, Counts]:
    found: dict[str, dict[int, float]] = {}
    for (its, labels), value in samples.items():
        if its == PREFIX + name:
            of = dict(labels)
            found.setdefault(of["drafter"], {})[int(of["position"])] = value
    return {drafter: tuple(slots.get(at, 0) for at in range(max(slots) + 1)) for drafter, slots in found.items()}


def _buckets(samples: Samples, name: str) -> Buckets:
    counts = sorted((float(bound), count) for bound, count in _by(samples, f"{name}_bucket", "le").items())
    return Buckets(tuple(bound for bound, _ in counts), tuple(count for _, count in counts))


def _less(now: Sequence[float], past: Sequence[float]) -> Counts:
    return tuple(count - (past[at] if at < len(past) else 0) for at, count in enumerate(now))


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)
