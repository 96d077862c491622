"""Who may ask for what: API keys and their names, the operator's keys, and what needs neither.

Knows headers and addresses; knows no body and no endpoint's meaning.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve import dashboard
from serve.errors import ApiError, wrong_key
from serve.settings import Settings, SettingsError, flag, is_loopback, variable

PAGE = frozenset({"/", *(f"/dashboard/{name}" for name in dashboard.FILES)})  # the same for everybody; asks for a key
OPEN = PAGE | {"/health", "/ready"}  # the others are for whoever watches over the process
FIGURES = frozenset({"/metrics", "/v1/live"})  # open too where the settings say so
ADMIN = ("/v1/engine", "/v1/drafters")  # and what is below them: the operator's, see `operator`
# What proxies add. Behind one, the connection's address is not the client's.
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
# What stands after a name is a key; a bare one may end in "=", as base64 does.
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=([^=].*)")


@dataclass(frozen=True)
class Key:
    """A key's name, which may be told, and a digest of the key, which is not."""

    name: str
    digest: bytes
    is_admin: bool


class Keyring:
    """The keys a server knows. Several may share a name, so that one can be replaced without a gap."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)
        self.guards_api = any(not key.is_admin for key in self._keys)
        self.guards_admin = any(key.is_admin for key in self._keys)

    @classmethod
    def of(cls, settings: Settings) -> Keyring:
        """The keys of the settings and of the file they name. Raises SettingsError."""
        given = [key.get_secret_value() for key in settings.api_key]
        if settings.api_key_file is not None:
            given += _from_file(settings.api_key_file)
        admin = [key.get_secret_value() for key in settings.admin_key]
        keys = [*_named(given, "key", is_admin=False), *_named(admin, "admin", is_admin=True)]
        for at, key in enumerate(keys):
            if any(key.digest == other.digest for other in keys[:at]):
                field = "admin_key" if key.is_admin else "api_key"
                raise SettingsError(f"{flag(field)} ({variable(field)}): the key named {key.name} is given twice")
        return cls(keys)

    def find(self, headers: Headers) -> Key | None:
        """The key that the request carries; None where it carries none of ours."""
        bearers = (value.partition(" ") for value in headers.getlist("authorization"))
        given = [token.strip() for scheme, _, token in bearers if scheme.lower() == "bearer"]
        given += headers.getlist("x-api-key")
        found = None
        # As long for a wrong key as for a right one, and for the first as for the last.
        for text in given:
            digest = _digest(text)
            for key in self._keys:
                if secrets.compare_digest(key.digest, digest):
                    found = key
        return found


class Authentication:
    """Lets pass what needs no key or carries one, whose name it leaves in the request's state as `client`."""

    def __init__(self, app: ASGIApp, keyring: Keyring, *, figures_are_open: bool) -> None:
        self._app, self._keyring = app, keyring
        self._open = OPEN | FIGURES if figures_are_open else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, key = scope["path"], self._keyring.find(Headers(scope=scope))
            scope.setdefault("state", {}).update(keyring=self._keyring, key=key, client=key and key.name)
            is_admin = any(path == root or path.startswith(f"{root}/") for root in ADMIN)
            if key is None and self._keyring.guards_api and not is_admin and path not in self._open:
                raise wrong_key()
        await self._app(scope, receive, send)


def operator(request: Request) -> None:
    """Raises ApiError for all but the operator: whoever has an admin key or, where there is none, this machine's users.

    Those are told from pages of other sites that a browser here has open, from clients of a proxy here, and from other
    machines. Such a page can make its own name resolve to this address, but its requests carry that name as their Host.
    """
    key: Key | None = request.state.key
    if request.state.keyring.guards_admin:
        if key is None:
            raise wrong_key()
        if not key.is_admin:
            raise ApiError(403, f"{request.url.path} needs an admin key.", code="admin_key_required")
        return
    path = request.url.path
    if request.client is None or not is_loopback(request.client.host):
        raise _local_only(f"{path} answers this machine's own clients only.")
    if name := next((name for name in FORWARDED if name in request.headers), None):
        raise _local_only(f"{path} answers this machine's own clients only, no proxy's: the request has '{name}'.")
    for name in (request.headers.get("host", ""), *request.headers.getlist("origin")):
        if not is_loopback(_host(name)):
            raise _local_only(f"{path} must be asked for at a loopback address, not '{_host(name)}'.")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Before it sends a DELETE to another site a browser asks, and is told no.
    if request.method not in ("GET", "HEAD", "DELETE") and content_type != "application/json":
        raise ApiError(415, f"{path} takes Content-Type: application/json, not {content_type or 'none'}.")


def _local_only(message: str) -> ApiError:
    return ApiError(403, message, code="local_only")


def _host(name: str) -> str:
    """The host of a Host or Origin header without its port; empty where it is no host."""
    try:
        return urlsplit(name if "//" in name else f"//{name}").hostname or ""
    except ValueError:
        return ""


def _named(given: Iterable[str], fallback: str, *, is_admin: bool) -> Iterable[Key]:
    for number, text in enumerate(given, start=1):
        name, key = found.groups() if (found := _NAMED.fullmatch(text)) else (f"{fallback}{number}", text)
        yield Key(name, _digest(key), is_admin)


def _from_file(path: str) -> list[str]:
    """A key a line; empty lines and those that begin with # are none."""
    field = f"{flag('api_key_file')} ({variable('api_key_file')})"
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text(encoding="ascii").splitlines()]
    except OSError as error:
        raise SettingsError(f"{field}: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{field}: {path} holds something else than ASCII") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or any(re.fullmatch("[!-~]+", key) is None for key in keys):
        raise SettingsError(f"{field}: {path} must hold keys, one a line, of printable characters without spaces")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
