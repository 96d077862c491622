"""Proxies over an upstream that says what a test tells it to. Most tests share one; each sees its own rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from backend.upstream.backend import UpstreamBackend, UpstreamOptions
from capture.records import Generation
from tests.misbehaving_upstream import Upstream, misbehaving
from tests.servers import AppServer, eventually, running_app

COUNTS = ("_total", "_count", "_sum")


@dataclass
class Fresh(AppServer):
    """A server as one that has just started: what it had written and counted before does not show."""

    old_rows: set[str] = field(default_factory=set)
    old_counts: dict[Any, float] = field(default_factory=dict)

    def rows(self) -> list[Generation]:
        return [row for row in super().rows() if row.id not in self.old_rows]

    def metric(self, name: str, **labels: str) -> float:
        return super().metric(name, **labels) - self.old_counts.get((f"draftloop_{name}", frozenset(labels.items())), 0)


def fresh(server: AppServer) -> Fresh:
    """A view of a running server from now on."""
    from prometheus_client.parser import text_string_to_metric_families as parse

    eventually(lambda: server.service.running == 0, 20)
    samples = [sample for family in parse(server.http.get("/metrics").text) for sample in family.samples]
    return Fresh(
        **{one.name: getattr(server, one.name) for one in fields(AppServer)},
        old_rows={row.id for row in server.rows()},
        old_counts={(s.name, frozenset(s.labels.items())): s.value for s in samples if s.name.endswith(COUNTS)},
    )


@dataclass
class Proxies:
    """An upstream with a proxy before it; further ones on demand."""

    upstream: Upstream
    directory: Path
    stack: ExitStack
    shared: AppServer | None = None

    def __call__(self, **options: Any) -> AppServer:
        """The shared proxy as if it were new; with options, one of its own: see `start`."""
        if options:
            return self.start(**options)
        self.shared = self.shared or self.start()
        return fresh(self.shared)

    def start(
        self,
        url: str | None = None,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 60.0,
        look_every: float = 5.0,
        served_model_name: str = "",
        **settings: Any,
    ) -> AppServer:
        """A proxy with options of its upstream, and settings, until the module's tests have run."""
        aliases = tuple(served_model_name.split(",")) if served_model_name else ()
        options = UpstreamOptions(url or self.upstream.url, model, aliases, key, timeout, look_every)
        path = self.directory / f"{len(list(self.directory.iterdir()))}.db"
        given = {"capture": path, "upstream": "http://it", "ready": url is None, **settings}
        if served_model_name:
            given["served_model_name"] = served_model_name
        return self.stack.enter_context(running_app(backend=UpstreamBackend(options), **given))  # type: ignore[arg-type]


@contextmanager
def proxies(directory: Path) -> Iterator[Proxies]:
    with misbehaving() as upstream, ExitStack() as stack:
        yield Proxies(upstream, directory, stack)
