"""What an operator says to change the default drafter, and the drafters as they are then told of.

Knows the wire alone: not which drafters there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from serve.strict import RequestModel


class PromoteRequest(RequestModel):
    """`drafter`: a loaded one's name, or none."""

    drafter: str


class RollBackRequest(RequestModel):
    """Nothing: the last promotion is meant."""


class DefaultOf(BaseModel):
    """A default drafter, and the Unix time from which on it was one."""

    drafter: str
    since: float


class Drafters(BaseModel):
    """`drafters`: fingerprints of the loaded ones. `default_drafters`: oldest first, the last in force."""

    drafter: str
    drafters: Mapping[str, str]
    default_drafters: list[DefaultOf]
