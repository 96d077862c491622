"""What of a body must be understood to pass it on: everything else is between the client and the upstream.

Knows the wire alone.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from serve.strict import RequestModel

MOST_CHOICES = 128


class Proxied(RequestModel):
    """Base of every body that is passed on. Fields that do not stand here are passed on as they are."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    user: str | None = None
    store: bool | None = None


class ProxiedChat(Proxied):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]


class ProxiedText(Proxied):
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
