"""The live page without a browser: its files, who may have them, and the figures it is sent, against /metrics."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from backend.interface import EngineStats
from serve import live
from serve.live import Buckets, Slots
from tests.fake_backend import SLOTS, FakeBackend, Script
from tests.servers import CHAT, Server, eventually, running_app

LIVE = "/v1/live"
EVERY = 0.15


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is long for a test; processes of their own take it all the same."""
    assert live.EVERY == 1.0
    monkeypatch.setattr(live, "EVERY", EVERY)


@contextmanager
def following(server: Server, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What a viewer is told, one thing after the other."""
    with server.http.stream("GET", LIVE, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        yield (json.loads(one) for one in data)


def now(server: Server) -> dict[str, Any]:
    """The figures of a moment after whatever has happened."""
    with following(server) as told:
        next(told)
        next(told)
        return next(told)


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_and_all_it_asks_for_are_ours_and_allow_nothing_else(serve):
    server = serve()
    page = server.http.get("/")
    asked = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
    assert {name.rpartition(".")[2] for name in asked} == {"css", "js"}
    todo, seen = list(asked), {}
    while todo:
        path = todo.pop()
        seen[path] = server.http.get(f"/{path}")
        todo += [f"dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', seen[path].text)]
    assert len(seen) > 5
    for path, response in {"index.html": page, **seen}.items():
        assert response.status_code == 200, path
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
            "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        }  # fmt: skip
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "https://" not in response.text
        assert "innerHTML" not in response.text
    kinds = {path.rpartition(".")[2]: response.headers["content-type"] for path, response in seen.items()}
    assert kinds == {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", page.text)


@pytest.mark.parametrize(
    "path", ["/dashboard/none.js", "/dashboard/__init__.py", "/dashboard/..%2fapp.py", "/dashboard/"]
)
def test_there_are_no_other_files(serve, path):
    response = serve().http.get(path)
    assert response.status_code == 404
    assert "error" in response.json()


def test_the_page_needs_no_key_and_its_figures_do(serve):
    server = serve(api_key="alice=first-key", admin_key="the-operators")
    page = server.http.get("/")
    assert page.status_code == 200
    for name in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text):
        assert server.http.get(f"/{name}").status_code == 200
    assert server.http.get("/dashboard/none.js").status_code == 401
    assert server.http.get(LIVE).status_code == 401
    for key in ("first-key", "the-operators"):
        with following(server, Authorization=f"Bearer {key}") as told:
            assert any(one["state"] == "ready" for one in told)


# -- the figures -----------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_metrics(serve):
    server = serve(Script(repeat=2, cached=5))
    for limit in (None, 7, 12):
        server.chat(max_tokens=limit)
    server.chat(store=False)
    told = now(server)
    assert (told["state"], told["model"], told["has_engine"]) == ("ready", "fake", True)
    assert told["requests"] == {
        "running": server.metric("num_requests_running"),
        "waiting": server.metric("num_requests_waiting"),
        "ended": {"stop": 2, "length": 2},
    }
    assert told["tokens"]["generated"] == server.metric("generation_tokens_total") == 59
    assert told["tokens"]["prompt"] == server.metric("prompt_tokens_total") == 28
    assert told["cache"] == {
        "usage": server.metric("kv_cache_usage_ratio"),
        "queries": server.metric("prefix_cache_queries_total"),
        "hits": server.metric("prefix_cache_hits_total"),
        "preemptions": server.metric("num_preemptions_total"),
    }
    assert told["draft_tokens"] == server.metric("spec_decode_draft_length")
    (drafter,) = told["drafters"]
    assert drafter["name"] == "mtp"
    assert drafter["total"]["drafts"] == server.metric("spec_decode_num_drafts_total", drafter="mtp")
    for slot in range(SLOTS):
        labels = {"drafter": "mtp", "position": str(slot)}
        proposed = server.metric("spec_decode_num_draft_tokens_per_pos_total", **labels)
        accepted = server.metric("spec_decode_num_accepted_tokens_per_pos_total", **labels)
        assert (drafter["total"]["proposed"][slot], drafter["total"]["accepted"][slot]) == (proposed, accepted)
        assert drafter["recent"]["acceptance"][slot] == pytest.approx(
            server.metric("spec_decode_acceptance_ratio", **labels)
        )
    tau = 1 + sum(drafter["total"]["accepted"]) / drafter["total"]["drafts"]
    assert tau == drafter["total"]["length"] == drafter["recent"]["length"] == told["length"]
    assert told["capture"] == {
        "state": "on",
        "rows": {
            status: server.metric("capture_generations_total", status=status)
            for status in ("finished", "cancelled", "failed", "opted_out")
        },
        "queue": server.metric("capture_queue_depth"),
        "late": server.metric("capture_late_total"),
        "lost": server.metric("capture_failures_total"),
    }
    assert (told["capture"]["rows"]["finished"], told["capture"]["rows"]["opted_out"]) == (3, 1)
    for name, metric in {
        "time_to_first_token": "time_to_first_token_seconds",
        "inter_token": "inter_token_latency_seconds",
        "end_to_end": "e2e_request_latency_seconds",
    }.items():
        latency = told["latency"][name]
        assert latency["count"] == server.metric(f"{metric}_count") > 0
        buckets = _buckets(server, metric)
        for q, quantile in ((0.5, latency["p50"]), (0.9, latency["p90"]), (0.99, latency["p99"])):
            below = max((count for le, count in buckets.items() if le < quantile), default=0)
            up_to = min(count for le, count in buckets.items() if le >= quantile)
            assert below <= q * latency["count"] <= up_to


def _buckets(server: Server, metric: str) -> dict[float, float]:
    found = re.findall(rf'^draftloop_{metric}_bucket{{le="(.+)"}} (.+)$', server.http.get("/metrics").text, re.M)
    return {float(le): float(count) for le, count in found}


def test_two_drafters_are_told_apart(serve):
    server = serve(backend=FakeBackend(drafters=("mtp", "prediction")), allow_drafter_choice=True)
    server.chat(max_tokens=10)
    server.chat(drafter="prediction", max_tokens=5)
    told = now(server)
    assert [drafter["name"] for drafter in told["drafters"]] == ["mtp", "prediction"]
    drafts = [drafter["recent"]["drafts"] for drafter in told["drafters"]]
    assert drafts == [server.metric("spec_decode_num_drafts_total", drafter=name) for name in ("mtp", "prediction")]
    assert told["point"]["drafters"].keys() == {"mtp", "prediction"}


def test_a_viewer_is_told_regularly_and_first_what_was_before(serve):
    server = serve(Script(repeat=20, pause=0.02))
    server.chat()
    with following(server) as told:
        first = next(told)
        assert first["history"][-1] == first["point"]
        times = [point["at"] for point in first["history"]]
        assert times == sorted(times)
        later = [next(told) for _ in range(3)]
    assert all("history" not in one for one in later)
    gaps = [b["point"]["at"] - a["point"]["at"] for a, b in pairwise(later)]
    assert all(gap >= EVERY - 0.1 for gap in gaps)
    with following(server) as told:
        history = next(told)["history"]
    assert [one["point"] for one in later] == [point for point in history if point["at"] in
                                               {one["point"]["at"] for one in later}]  # fmt: skip
    assert max(point["tokens_per_second"] for point in history) > 0


def test_all_viewers_are_told_the_same(serve):
    server = serve()
    told: list[list[dict[str, Any]]] = [[], []]

    def look(at: int) -> None:
        with following(server) as lines:
            told[at] = [next(lines) for _ in range(4)]

    threads = [threading.Thread(target=look, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = ({line["point"]["at"]: line for line in lines[1:]} for lines in told)
    both = one.keys() & other.keys()
    assert len(both) >= 2
    assert all(one[at] == other[at] for at in both)


def test_what_runs_is_told_while_it_runs(serve):
    server = serve(Script(repeat=500, pause=0.02))
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with server.http.stream("POST", CHAT, json=body), following(server) as told:
        seen = [next(told) for _ in range(4)]
    assert seen[-1]["requests"]["running"] == 1
    assert seen[-1]["tokens"]["per_second"] > 0
    assert seen[-1]["tokens"]["generated"] > seen[1]["tokens"]["generated"]


def test_a_server_that_loads_has_a_page_and_says_so(serve):
    server = serve(backend=FakeBackend(start_delay=0.5), ready=False)
    with following(server) as told:
        first = next(told)
        assert (first["state"], first["model"], first["drafters"], first["length"]) == ("loading", None, [], None)
        assert first["requests"]["running"] is None
        assert any(one["state"] == "ready" for one in told)


def test_a_proxys_figures_are_the_upstreams_as_far_as_it_tells_them():
    exposition = """
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
"""

    class Proxy(FakeBackend):
        def stats(self) -> EngineStats:
            return replace(super().stats(), kv_cache_usage=None, drafters=(), upstream_metrics=exposition)

    with running_app(backend=Proxy(), capture="off") as server:
        told = now(server)
    assert (told["has_engine"], told["draft_tokens"], told["cache"]["usage"]) == (False, None, None)
    (drafter,) = told["drafters"]
    assert (drafter["name"], drafter["counted"]) == ("upstream", False)
    assert drafter["total"]["acceptance"] == [0.8, 0.4]
    assert drafter["total"]["length"] == pytest.approx(2.2)
    assert told["capture"]["state"] == "off"


def test_a_page_that_is_open_does_not_keep_the_server_from_ending(serve_process):
    server = serve_process()
    ended: list[float] = []

    def look() -> None:
        with following(server) as told:
            for _ in told:
                pass
        ended.append(time.monotonic())

    viewer = threading.Thread(target=look)
    viewer.start()
    eventually(lambda: server.http.get("/ready").status_code == 200)
    time.sleep(0.2)
    assert server.stop(signal.SIGTERM) == 0
    viewer.join(10)
    assert ended
    assert "timeout" not in "".join(server.output).lower()


def test_figures_that_cannot_be_made_are_logged_once_and_come_back(serve, monkeypatch, caplog):
    server = serve()
    with following(server) as told:
        next(told)
        monkeypatch.setattr(server.backend, "engine", lambda: 1 / 0)
        eventually(lambda: "the live figures cannot be made" in caplog.text)
        time.sleep(3 * EVERY)
        monkeypatch.undo()
        assert next(told)["state"] == "ready"
    assert caplog.text.count("the live figures cannot be made") == 1


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_histogram_quantile():
    inf = float("inf")
    buckets = Buckets((0.1, 0.5, 1.0, inf), (0, 10, 20, 20))
    assert buckets.quantile(0.5) == pytest.approx(0.5)
    assert buckets.quantile(0.25) == pytest.approx(0.3)
    assert buckets.quantile(0.9) == pytest.approx(0.9)
    assert Buckets((0.1, inf), (4, 4)).quantile(0.5) == pytest.approx(0.05)
    assert Buckets((0.1, 0.5, inf), (0, 0, 3)).quantile(0.5) == 0.5
    assert Buckets((0.1, inf), (0, 0)).quantile(0.5) is None
    assert Buckets().quantile(0.5) is None
    later = Buckets((0.1, 0.5, 1.0, inf), (10, 20, 30, 30))
    assert later.since(buckets).counts == (10, 10, 10, 10)
    assert later.since(None) == later


def test_counts_that_have_begun_anew_are_not_taken_from_what_was():
    past = Slots(10, (10, 10), (8, 4))
    assert Slots(15, (15, 12), (11, 5)).since(past) == Slots(5, (5, 2), (3, 1))
    assert Slots(3, (3, 3), (2, 1)).since(past) == Slots(3, (3, 3), (2, 1))
    assert Slots(12, (12, 12, 2), (9, 5, 1)).since(past) == Slots(2, (2, 2, 2), (1, 1, 1))
    assert Slots(15, (15,), (11,)).since(past) == Slots(15, (15,), (11,))
    assert Slots(4, (4, 2), (3, 1)).acceptance == [0.75, 0.5]
    assert Slots(4, (4, 2), (3, 1)).length == 2.0
    assert Slots(0, (0,), (0,)).acceptance == [None]
    assert Slots().length is None
