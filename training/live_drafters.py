"""A running server as its operator sees it: which drafters it has, what each one's steps cost, and who is the default.

Knows the bodies of /v1/drafters; knows nothing of when a drafter is worth having.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from capture.server import Server, ServerError

PATH = "/v1/drafters"
ACTIVE = f"{PATH}/active"


@dataclass(frozen=True)
class Steps:
    """Verify steps in which one drafter alone ran, with so many sequences; `seconds` from the draft's begin to the
    verify's end, summed, and `sequences` and `accepted` summed over the steps too."""

    steps: int = 0
    sequences: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def __sub__(self, earlier: Steps) -> Steps:
        return Steps(
            self.steps - earlier.steps,
            self.sequences - earlier.sequences,
            self.accepted - earlier.accepted,
            self.seconds - earlier.seconds,
        )

    def __add__(self, other: Steps) -> Steps:
        return Steps(
            self.steps + other.steps,
            self.sequences + other.sequences,
            self.accepted + other.accepted,
            self.seconds + other.seconds,
        )


Buckets = Mapping[int, Steps]
"""By the power of two that holds the number of sequences."""


@dataclass(frozen=True)
class Drafter:
    """One that is loaded. `parameters_read`: weights read per draft step, None where the server does not say."""

    name: str
    fingerprint: str
    state: str
    parameters_read: int | None
    buckets: Buckets


@dataclass(frozen=True)
class Drafters:
    """All that are loaded. `previous` is what a roll-back makes the default; `canary` is on trial."""

    active: str
    previous: str | None
    canary: str | None
    loaded: Mapping[str, Drafter]


class Operator:
    """`server` asks with the operator's key. Every method raises ServerError where the server cannot be asked, and
    RefusedError, with the server's words, where it does not do what it is asked."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def drafters(self) -> Drafters:
        return self._read(self._server.ask("GET", PATH))

    def load(self, path: str, name: str, min_acceptance: float | None) -> None:
        body: dict[str, Any] = {"path": path, "name": name}
        if min_acceptance is not None:
            body["min_acceptance"] = min_acceptance
        self._server.ask("POST", PATH, body)

    def activate(self, name: str, canary: float | None = None) -> None:
        """Make it the default of the requests that come, which ends any canary; or a canary with that share of them."""
        self._server.ask("PUT", ACTIVE, {"drafter": name} if canary is None else {"drafter": name, "canary": canary})

    def unload(self, name: str) -> None:
        self._server.ask("DELETE", f"{PATH}/{quote(name, safe='')}")

    def _read(self, told: Mapping[str, Any]) -> Drafters:
        try:
            return Drafters(
                active=str(told["active"]),
                previous=None if told["previous"] is None else str(told["previous"]),
                canary=None if told["canary"] is None else str(told["canary"]["drafter"]),
                loaded={one["name"]: _drafter(one) for one in told["drafters"]},
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ServerError(f"{self._server.url} tells of its drafters in a way this build does not know") from None


def _drafter(told: Mapping[str, Any]) -> Drafter:
    read = told["parameters_read"]
    return Drafter(
        name=str(told["name"]),
        fingerprint=str(told["fingerprint"]),
        state=str(told["state"]),
        parameters_read=None if read is None else int(read),
        buckets={
            int(one["batch"]): Steps(
                int(one["steps"]), int(one["sequences"]), int(one["accepted"]), float(one["seconds"])
            )
            for one in told["steps"]
        },
    )
