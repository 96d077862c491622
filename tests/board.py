"""The queries of the Grafana board, as Grafana sends them to Prometheus. Knows JSON; asks nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[1] / "docker"
BOARD: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/draftloop.json").read_text(encoding="utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text(encoding="utf-8"))

# What Grafana puts in for its variables: all servers and drafters, over one width for rates and for the time shown.
WINDOW = "10m"
VARIABLES = {"$instance": ".*", "$drafter": ".*", "$__rate_interval": WINDOW, "$__range": WINDOW}


def queries() -> Iterator[tuple[str, str, str]]:
    """(panel's title, legend, PromQL) of everything drawn."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield panel["title"], target["legendFormat"], expression


def choices() -> Iterator[tuple[str, str]]:
    """(series, label) of every list to choose from."""
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            text = variable["query"]["query"].replace("$instance", ".*")
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", text)
            assert found, text
            yield found[1], found[2]


def metric_names(text: str) -> set[str]:
    """Our metrics that a text of PromQL names."""
    return set(re.findall(r"\bdraftloop_\w+", text))
