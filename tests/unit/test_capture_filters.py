"""Which rows a filter means: the same ones in every command, and in the functions under them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capture.cli import app
from capture.filters import EVERY_ROW, FilterError, Filters, moment, tag
from capture.records import timestamp
from capture.store import Store
from tests.capture_rows import generation, write


def asked(**metadata: object) -> dict[str, object]:
    return {"messages": [], "metadata": metadata}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        generation(
            id="a",
            created_at="2025-01-01T00:00:00.000000Z",
            client="alice",
            drafter="none",
            request=asked(team="red", round=1),
        ),
        generation(
            id="b",
            created_at="2025-01-02T00:00:00.000000Z",
            client="bob",
            finish_reason="length",
            completion_tokens=[1] * 50,
            logprobs=[],
            request=asked(team="red", **{'a "$." key': "=1="}),
        ),
        generation(
            id="c",
            created_at="2025-01-03T00:00:00.000000Z",
            model="other",
            status="failed",
            finish_reason=None,
            completion_tokens=None,
            logprobs=None,
            timings={"predicted_n": 9},
            request={"metadata": "red"},
        ),
        generation(id="d", created_at="2025-01-04T00:00:00.000000Z", status="cancelled", request={"metadata": None}),
    ]
    return write(tmp_path_factory.mktemp("filters") / "c.db", *rows)


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ([], "abcd"),
        (["--since", "2025-01-02"], "bcd"),
        (["--until", "2025-01-02"], "a"),
        (["--since", "2025-01-02T01:00+01:00", "--until", "2025-01-03T00:00:00Z"], "b"),
        (["--until", "1w"], "abcd"),
        (["--since", "1w"], ""),
        (["--model", "other"], "c"),
        (["--model", "other", "--model", "tiny"], "abcd"),
        (["--drafter", "none"], "a"),
        (["--finish", "length"], "b"),
        (["--status", "failed", "--status", "cancelled"], "cd"),
        (["--client", "bob"], "b"),
        (["--tag", "team=red"], "ab"),
        (["--tag", "team=red", "--tag", "round=1"], "a"),
        (["--tag", 'a "$." key==1='], "b"),
        (["--min-tokens", "3"], "bc"),
        (["--min-tokens", "10"], "b"),
        (["--tag", "team=red", "--client", "carol"], ""),
    ],
)
def test_the_options_choose_rows(path: Path, arguments: list[str], ids: str) -> None:
    chosen = CliRunner().invoke(app, ["list", "--json", "--capture", str(path), *arguments])
    assert chosen.exit_code == 0, chosen.output
    assert "".join(sorted(json.loads(line)["id"] for line in chosen.stdout.splitlines())) == ids


def test_figures_are_of_the_chosen_rows_alone(path: Path) -> None:
    told = CliRunner().invoke(app, ["stats", "--json", "--capture", str(path), "--tag", "team=red"])
    figures = json.loads(told.stdout)
    assert (figures["rows"], figures["completion_tokens"]) == (2, 52)
    assert figures["by_drafter"] == {"none": 1, "mtp": 1}
    assert [found["drafter"] for found in figures["acceptance"]] == ["mtp", "none"]
    assert figures["last"] == "2025-01-02T00:00:00.000000Z"


def test_a_count_and_a_stream_agree_on_what_is_chosen(path: Path) -> None:
    chosen = Filters(status=["finished"], since="2025-01-02T00:00:00.000000Z")
    with Store.open(path) as store:
        where, arguments = chosen.sql()
        assert [row.id for row in store.iterate(where=where, arguments=arguments)] == ["b"]
        assert (store.count(chosen), store.count(EVERY_ROW)) == (1, 4)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2025-01-31", "2025-01-31T00:00:00.000000Z"),
        ("2025-01-31T12:30", "2025-01-31T12:30:00.000000Z"),
        ("2025-01-31T12:30:00+02:00", "2025-01-31T10:30:00.000000Z"),
        (" 2025-01-31T12:30:00.5Z ", "2025-01-31T12:30:00.500000Z"),
    ],
)
def test_a_time_is_in_utc_where_it_names_no_zone(text: str, time: str) -> None:
    assert moment(text) == time


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90s", timedelta(seconds=90)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(days=14)),
    ],
)
def test_a_duration_is_so_long_ago(text: str, ago: timedelta) -> None:
    before = datetime.now(UTC)
    found = moment(text)
    assert timestamp(before - ago) <= found <= timestamp(datetime.now(UTC) - ago)


@pytest.mark.parametrize("text", ["", "soon", "7", "7y", "-7d", "999999999999w", "2025-13-01", "0001-01-01T00:00+23"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(FilterError, match="is no time"):
        moment(text)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--since", "soon"], ["--tag", "red"], ["--tag", "=red"], ["--status", "done"]),
        *(["--since", ""], ["--until", ""]),  # of an unset variable: not the same as none
    ],
)
def test_a_wrong_filter_is_explained_with_exit_code_two(path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["list", "--capture", str(path), *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert arguments[1] in done.stderr


def test_a_tag_is_cut_at_its_first_equals_sign() -> None:
    assert tag("a=b=c") == ("a", "b=c")
    assert tag("a=") == ("a", "")
