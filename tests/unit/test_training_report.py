"""The report: one page, of what ledgers say and nothing else; what went wrong stands in it, and none of it is code."""

from __future__ import annotations

import base64
import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from training import report
from training.cli import app
from training.errors import TrainingError
from training.learning import learning_curve
from training.ledger import Ledger

EVIL = "<script>alert(1)</script>\"'&$\\frac{$"


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 50}


def row(name: str) -> dict[str, Any]:
    walk = {"surv": [figure(0.8), figure(0.6)], "chain": figure(0.7), "tau": figure(2.4), "steps": 50}
    return {"name": name, "fingerprint": f"{name}-print", "parameters_read": 1234567, "walk": walk}


def promotion(promoted: bool, reason: str) -> dict[str, Any]:
    return {
        "promoted": promoted,
        "reason": reason,
        "candidate": EVIL,
        "incumbent": "mtp",
        "requests": 8,
        "steps": figure(1.2),
        "throughput": figure(1.1),
        "candidate_tau": 2.2,
        "incumbent_tau": 2.4,
        "blocks": [[100.0, 90.0], [110.0, 95.0]],
    }


def shares(*covered: int) -> list[dict[str, int]]:
    return [{"covered": one, "tokens": 100} for one in covered]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A run of each kind, one of them broken off, one negative, with text in it that nobody can trust."""
    book = Ledger(tmp_path / "ledger.jsonl")
    with book.run("hot-vocab") as entry:
        entry.figures = {"size": 64, "documents": 9, "reach": [{"kind": "all", "runs": shares(95, 90)}]}
        entry.figures |= dict(zip(("train", "held_out"), shares(99, 97), strict=True))
    with book.run("distill", {"note": EVIL}) as entry:
        entry.figures = {
            "name": EVIL,
            "curve": [{"step": 0, "held_out": {"tau": 2.0}}, {"step": 10, "loss": 3.5}, {"step": 20, "loss": 3.0}],
            "training": {"documents": 9, "anchors": 90, "step": 20},
            "evaluation": {"student": {"chain": 0.55, "steps": 70}, "native": {"chain": 0.66}},
        }
    with book.run("evaluate") as entry:
        entry.figures = {"documents": 11, "rows": [row("mtp"), row(EVIL)]}
    with book.run("promote") as entry:
        entry.figures = promotion(False, EVIL)
        entry.negative(f"not surely faster {EVIL}")
    with pytest.raises(ValueError), book.run("extract"):
        raise ValueError(EVIL)
    return book


class Reader(HTMLParser):
    """What a page is made of: its elements, the addresses in it, its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_tells_of_every_run_and_draws_what_there_is(ledger: Ledger, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(ledger.path), "-o", str(tmp_path / "report.html")])
    assert told.exit_code == 0, told.output
    page = Reader((tmp_path / "report.html").read_text())
    heads = ("Speed: promotions", "Acceptance per slot", "Learning curves", "Coverage of hot vocabularies", "Every run")
    assert all(head in page.text for head in heads)
    assert page.elements.count("picture") == 5
    assert "0.800 [0.700, 0.900] (n = 50)" in page.text
    assert "1,234,567" in page.text
    assert f"ValueError: {EVIL}" in page.text  # a failure is told, in its own words
    assert f"not surely faster {EVIL}" in page.text


def test_a_page_needs_nothing_and_runs_nothing(ledger: Ledger, tmp_path: Path) -> None:
    text = report.report([ledger.path], tmp_path / "report.html").read_text()
    page = Reader(text)
    assert page.addresses
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.elements)
    assert not page.handlers
    assert "default-src 'none'" in text
    for address in page.addresses:
        picture = base64.b64decode(address.partition(",")[2]).decode()
        assert "<script" not in picture
        assert not re.search(r'(href|src)="(?!#)', picture)


def test_every_picture_is_there_for_the_light_and_for_the_dark(ledger: Ledger, tmp_path: Path) -> None:
    page = Reader(report.report([ledger.path], tmp_path / "report.html").read_text())
    for dark, light in zip(page.addresses[::2], page.addresses[1::2], strict=True):
        pictures = [base64.b64decode(one.partition(",")[2]).decode() for one in (dark, light)]
        assert "#dde4ec" in pictures[0]
        assert "#1d2733" in pictures[1]


def test_the_same_runs_are_the_same_page_and_each_is_told_once(ledger: Ledger, tmp_path: Path) -> None:
    runs, _ = ledger.read()
    copied = tmp_path / "copy.jsonl"
    copied.write_bytes(ledger.path.read_bytes())
    assert report.report([ledger.path, copied], tmp_path / "report.html").read_text() == report.html(runs)


def test_an_empty_ledger_is_a_page_too() -> None:
    assert "No run yet." in report.html([])
    assert "2 damaged lines were left out." in report.html([], damaged=2)


@pytest.mark.parametrize(
    "held",
    [b"No ledger\n", b'{"a": 1}\n', b'{\n "schema": 1\n}\n', b"[]", b"PK\x03\x04\xff\x00", b"<html></html>\n\n"],
    ids=["text", "json", "indented", "list", "binary", "page"],
)
def test_a_file_that_is_no_ledger_is_one_line_and_no_page(ledger: Ledger, tmp_path: Path, held: bytes) -> None:
    (tmp_path / "other").write_bytes(held)
    for listed in ([tmp_path / "other"], [ledger.path, tmp_path / "other"]):
        with pytest.raises(TrainingError, match=r"other is no ledger: none of its \d lines tells of a run$"):
            report.report(listed, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "other").write_text("")
    assert "No run yet." in report.report([tmp_path / "other"], tmp_path / "report.html").read_text()


def test_without_matplotlib_one_line_says_what_to_install(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TrainingError, match=r"pip install 'draftloop\[train\]'"):
        report.report([ledger.path], tmp_path / "report.html")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from([10**400, -(10**400), 1e308, -1e100])
    | st.floats()
    | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("rows", "curve", "blocks", "held_out", "train", "reach", "candidate", "steps", "walk", "surv", "training")


@settings(max_examples=40)
@given(
    st.sampled_from(["evaluate", "distill", "hot-vocab", "promote", "extract"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1),
)
def test_whatever_a_line_says_there_is_a_page(
    tmp_path_factory: pytest.TempPathFactory, command: str, figures: dict[str, Any]
) -> None:
    place = tmp_path_factory.mktemp("page")
    fields = {"schema": 1, "id": "x", "command": command, "started": "s", "outcome": "ok", "figures": figures}
    (place / "ledger.jsonl").write_text(json.dumps(fields) + "\n")
    page = report.report([place / "ledger.jsonl"], place / "page.html").read_text()
    assert page.endswith("</body></html>\n")
    assert "1 runs" in page


def test_figures_that_nothing_can_draw_and_names_that_no_text_holds_cost_no_other(tmp_path: Path) -> None:
    """Too large for a float, none at all, half a character, and a line nested deeper than anybody reads."""
    huge, nan, half = 10**400, float("nan"), "\ud800"
    walk = {"surv": [{"value": huge, "low": nan, "high": 1.0, "n": huge}, {"value": 0.5, "n": 3}]}
    said: list[dict[str, Any]] = [
        {"command": "evaluate", "figures": {"rows": [{"name": half, "walk": walk}]}, "reason": half},
        {
            "command": "distill",
            "figures": {"curve": [{"step": huge, "loss": [1.0]}, {"step": 1, "loss": float("inf")}]},
        },
        {"command": "promote", "figures": {"blocks": [[huge, 1.0], [nan, 2.0], [3.0, 4.0]], "candidate": half}},
        {"command": "extract", "wall_seconds": huge, "memory": {"process_bytes": huge}},
    ]
    lines = [
        json.dumps({"schema": 1, "id": str(i), "started": half, "outcome": "ok", **one}) for i, one in enumerate(said)
    ]
    deep = lines[0].replace(json.dumps(walk), "[" * 100_000 + "]" * 100_000)
    (tmp_path / "ledger.jsonl").write_text("\n".join([*lines, deep]) + "\n")
    page = report.report([tmp_path / "ledger.jsonl"], tmp_path / "page.html").read_text()
    assert "4 runs" in page
    assert "1 damaged" in page
    assert page.count("<picture>") == 2, "the slot's and the blocks' that are figures"


def test_a_log_is_kept_in_few_lines_and_every_walk(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines: list[dict[str, Any]] = [{"step": step, "stage": "kd", "loss": 1.0, "lr": 0.1} for step in range(1000)]
    lines += [{"step": step, "held_out": {"tau": 2.0}} for step in range(0, 1000, 100)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10')
    found = learning_curve(log, most=50)
    assert len([line for line in found if "loss" in line]) == 50
    assert len([line for line in found if "held_out" in line]) == 10
    assert found[0] == {"step": 0, "stage": "kd", "loss": 1.0}
    assert learning_curve(tmp_path / "none") == []
