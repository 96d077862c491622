"""The board's queries and the alerts in a real Prometheus, which scrapes a real `serve` configured by docker/."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.board import DOCKER, choices, queries
from tests.checkpoints import tiny
from tests.servers import CHAT, ProcessServer, eventually, running_process, serve_command

KEY = "K2"
ONLY_OF_AN_UPSTREAM = "of all steps"  # in the legend of what only an upstream's counters draw

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
)


@dataclass
class Prometheus:
    http: httpx.Client

    def get(self, path: str, **parameters: str) -> Any:
        response = self.http.get(f"/api/v1/{path}", params=parameters)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def values(self, expression: str) -> dict[tuple[str, ...], float]:
        """What a query has now, by its labels' values."""
        series = self.get("query", query=expression)["result"]
        return {tuple(one["metric"].values()): float(one["value"][1]) for one in series}


def configured(folder: Path, target: str) -> Path:
    """docker/prometheus/ as a container sees it, but for the key's file, the server's address and its patience."""
    shutil.copytree(DOCKER / "prometheus", folder)
    path = folder / "prometheus.yml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "metrics_key")
    job["static_configs"] = [{"targets": [target]}]
    (folder / "metrics_key").write_text(KEY)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextmanager
def scraping(config: Path, data: Path) -> Iterator[Prometheus]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}"]
    log = data.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=20) as http:

            def ready() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return http.get("/-/ready").status_code == 200
                except httpx.ConnectError:
                    return False

            eventually(ready, 30)
            yield Prometheus(http)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessServer, Prometheus]]:
    """A server after a little traffic, and a Prometheus that saw it from before its first request to after its last."""
    folder = tmp_path_factory.mktemp("watched")
    keys = ["env", f"DRAFTLOOP_API_KEY=alice=K1,prometheus={KEY}"]
    with running_process([*keys, *serve_command(tiny(), "--draft-tokens", "3")], folder / "capture.db") as server:
        server.http.headers["Authorization"] = "Bearer K1"
        config = configured(folder / "config", httpx.URL(server.url).netloc.decode())
        with scraping(config, folder / "data") as prometheus:
            eventually(lambda: prometheus.values("draftloop_generation_tokens_total"), 30)
            for content in ("What does len() do?", "What does sorted() do?", "What does len() do?"):
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 48, "temperature": 0}
                assert server.http.post(CHAT, json=body).status_code == 200

            def caught_up() -> bool:
                told = prometheus.values("draftloop_capture_generations_total{status='finished'}")
                return list(told.values()) == [3]

            eventually(caught_up, 30)
            yield server, prometheus


def test_the_configuration_and_the_alerts_are_valid(tmp_path):
    done = subprocess.run(
        ["promtool", "check", "config", configured(tmp_path / "config", "draftloop:8000")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 rules found" in done.stdout


def test_prometheus_is_let_in_with_the_key_of_its_own(watched):
    _, prometheus = watched
    (target,) = prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")


def test_every_query_of_the_board_has_an_answer(watched):
    _, prometheus = watched
    # In the order of the board; what is empty is named by the first panel that is.
    for title, legend, expression in queries():
        answer = prometheus.values(expression)
        if legend.endswith(ONLY_OF_AN_UPSTREAM):
            assert not answer, f"{title} counts the engine's own slots twice"
        else:
            assert answer, f"{title} ({legend}) is empty: {expression}"
            assert all(value == value for value in answer.values()), f"{title} ({legend}) is no number"


def test_there_is_something_to_choose_in_every_list_of_the_board(watched):
    server, prometheus = watched
    chosen = {label: prometheus.get(f"label/{label}/values", **{"match[]": selector}) for selector, label in choices()}
    assert chosen["instance"] == [httpx.URL(server.url).netloc.decode()]
    assert "mtp" in chosen["drafter"]


def test_the_board_shows_the_acceptance_that_the_server_counts(watched):
    server, prometheus = watched
    (surv, *_) = (expression for title, _, expression in queries() if title == "Acceptance per slot")
    (length, *_) = (expression for title, _, expression in queries() if title == "Acceptance length")

    def counted(name: str, **labels: str) -> float:
        return server.metric(f"spec_decode_num_{name}_total", drafter="mtp", **labels)

    shown = prometheus.values(surv)
    assert set(shown) == {("mtp", str(slot)) for slot in range(3)}
    for (_, slot), value in shown.items():
        accepted, proposed = (counted(f"{kind}_tokens_per_pos", position=slot) for kind in ("accepted", "draft"))
        assert value == pytest.approx(accepted / proposed)
    tau = 1 + counted("accepted_tokens") / counted("drafts")
    assert prometheus.values(length) == {("mtp",): pytest.approx(tau)}


def test_no_alert_is_up_and_every_rule_is_understood(watched):
    _, prometheus = watched
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}  # unknown: not evaluated yet
    assert {rule["state"] for rule in group["rules"]} == {"inactive"}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in ({"instance": "a:8000"} | labels).items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def promtool_test(folder: Path, **test: Any) -> None:
    """Evaluate rules and expressions over made-up series."""
    path = folder / "test.yml"
    rules = str(DOCKER / "prometheus/alerts.yml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [{"interval": "15s", **test}]}), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_slots_of_an_upstream_that_counts_only_acceptance_are_of_all_its_steps(tmp_path):
    expressions = [expression for title, _, expression in queries() if title == "Acceptance per slot"]
    own, of_steps = (expressions[0], expressions[1])
    counters = "draftloop_spec_decode_num_"
    promtool_test(
        tmp_path,
        input_series=[
            series(f"{counters}drafts_total", "0+10x20", drafter="upstream"),
            series(f"{counters}accepted_tokens_per_pos_total", "0+8x20", drafter="upstream", position="0"),
            series(f"{counters}accepted_tokens_per_pos_total", "0+5x20", drafter="upstream", position="1"),
            series(f"{counters}drafts_total", "0+10x20", drafter="mtp"),
            series(f"{counters}draft_tokens_per_pos_total", "0+5x20", drafter="mtp", position="0"),
            series(f"{counters}accepted_tokens_per_pos_total", "0+4x20", drafter="mtp", position="0"),
        ],
        promql_expr_test=[
            {
                "expr": f"round({of_steps}, 0.001)",
                "eval_time": "4m",
                "exp_samples": [
                    {"labels": '{drafter="upstream", position="0"}', "value": 0.8},
                    {"labels": '{drafter="upstream", position="1"}', "value": 0.5},
                ],
            },
            {
                "expr": f"round({own}, 0.001)",
                "eval_time": "4m",
                "exp_samples": [{"labels": '{drafter="mtp", position="0"}', "value": 0.8}],
            },
        ],
    )


@pytest.mark.parametrize(
    ("alert", "severity", "name", "values", "labels"),
    [
        ("DraftloopDown", "critical", "up", "0x80", {"job": "draftloop"}),
        ("DraftloopCaptureLoses", "critical", "draftloop_capture_failures_total", "0x50 1x30", {}),
        ("DraftloopCaptureLate", "warning", "draftloop_capture_late_total", "0x50 2x30", {}),
        ("DraftloopCaptureLate", "warning", "draftloop_capture_queue_depth", "1001x80", {}),
        ("DraftloopCaptureFailing", "critical", "draftloop_capture_failing", "0x50 1x30", {}),
        ("DraftloopEngineRestarted", "warning", "draftloop_engine_restarts_total", "0x50 1x30", {}),
        ("DraftloopQueueGrows", "warning", "draftloop_num_requests_waiting", "1x80", {}),
    ],
)
def test_an_alert_tells_what_happened(tmp_path, alert, severity, name, values, labels):
    rules = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    (summary,) = (rule["annotations"]["summary"] for rule in rules if rule["alert"] == alert)
    expected = {
        "exp_labels": {"instance": "a:8000", "severity": severity} | labels,
        "exp_annotations": {"summary": summary.replace("{{ $labels.instance }}", "a:8000")},
    }
    promtool_test(
        tmp_path,
        input_series=[series(name, values, **labels)],
        alert_rule_test=[
            {"eval_time": "0m", "alertname": alert, "exp_alerts": [expected] if "depth" in name else []},
            {"eval_time": "18m", "alertname": alert, "exp_alerts": [expected]},
        ],
    )
