"""A generation as a row: what goes in comes out, and what fits no row is refused by name."""

from __future__ import annotations

import json
import math
import threading
import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlite_utils import Database

from capture.migrations import upgrade
from capture.records import Generation, RecordError, from_row, new_id, to_json, to_row, utc_now
from tests.capture_rows import generation

TEXT = st.text(max_size=30)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
STEPS = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)).map(lambda p: (max(p), min(p))), max_size=10)


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    completion = draw(TOKENS)
    logprobs = draw(st.lists(st.floats(width=32), min_size=len(completion), max_size=len(completion)))
    return generation(
        status=draw(st.sampled_from(["finished", "cancelled", "failed"])),
        finish_reason=draw(st.none() | TEXT),
        model=draw(TEXT),
        drafter=draw(TEXT),
        seed=draw(st.integers(0, 2**64 - 1)),
        parameters=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        request=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        response_text=draw(TEXT),
        reasoning=draw(TEXT),
        tool_calls=draw(st.lists(JSON, max_size=2)),
        prompt_tokens=draw(TOKENS),
        completion_tokens=completion,
        logprobs=logprobs,
        steps=draw(STEPS),
        client=draw(st.none() | TEXT),
        error=draw(st.none() | TEXT),
    )


def through_sqlite(g: Generation) -> Generation:
    db = Database(memory=True)
    upgrade(db, Path("memory"))
    db["generations"].insert(to_row(g))
    [row] = db["generations"].rows
    return from_row(row)


@given(generations())
def test_every_field_comes_back_from_sqlite_as_it_went_in(g: Generation) -> None:
    back = through_sqlite(g)
    for name in (f.name for f in fields(Generation)):
        sent, got = getattr(g, name), getattr(back, name)
        if name in ("prompt_tokens", "completion_tokens"):
            assert got.dtype == np.uint32
            assert got.tolist() == sent
        elif name == "logprobs":
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, np.array(sent, dtype=np.float32))
        else:
            assert got == sent, name


def test_blobs_are_little_endian() -> None:
    row = to_row(generation(prompt_tokens=[1], completion_tokens=[258], logprobs=[-1.0], steps=[(3, 2)]))
    assert row["prompt_tokens"] == b"\x01\0\0\0"
    assert row["completion_tokens"] == b"\x02\x01\0\0"
    assert row["logprobs"] == b"\0\0\x80\xbf"
    assert row["steps"] == b"\x03\x02"


@pytest.mark.parametrize(
    ("seed", "stored", "read"),
    [(0, 0, 0), (2**63, -(2**63), 2**63), (2**64 - 1, -1, 2**64 - 1), (-1, -1, 2**64 - 1), (None, None, None)],
)
def test_a_seed_keeps_its_64_bits(seed: int | None, stored: int | None, read: int | None) -> None:
    assert to_row(generation(seed=seed))["seed"] == stored
    assert through_sqlite(generation(seed=seed)).seed == read


def test_tokens_that_are_not_kept_come_back_as_none() -> None:
    back = through_sqlite(generation(prompt_tokens=None, completion_tokens=None, logprobs=None))
    assert (back.prompt_tokens, back.completion_tokens, back.logprobs) == (None, None, None)


def test_lone_surrogates_cost_no_row_and_stay_the_same_in_json() -> None:
    back = through_sqlite(generation(request={"user": "a\ud800"}, client="a\ud800"))
    assert back.request == {"user": "a\ud800"}
    assert back.client == "a\\ud800"


def test_a_figure_that_is_not_finite_becomes_null() -> None:
    back = through_sqlite(generation(timings={"per_second": math.inf, "list": [math.nan, "NaN"]}))
    assert back.timings == {"per_second": None, "list": [None, "NaN"]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("id", "x" * 37),
        ("id", None),
        ("created_at", "yesterday"),
        ("created_at", None),
        ("status", "done"),
        ("prompt_tokens", [-1]),
        ("prompt_tokens", [2**31]),
        ("prompt_tokens", [1.5]),
        ("prompt_tokens", [[1]]),
        ("completion_tokens", ["a", "b"]),
        ("logprobs", [-1.0]),
        ("logprobs", ["a", "b"]),
        ("steps", [(1, 2)]),
        ("steps", [(256, 0)]),
        ("steps", [(1, -1)]),
        ("steps", [1, 2]),
        ("steps", [(1, 2), (3,)]),
        ("seed", 2**64),
        ("seed", "7"),
        ("split_key_length", 4),
        ("split_key_length", -1),
        ("request", {"a": object()}),
        ("tool_calls", 3),
    ],
)
def test_what_fits_no_row_is_refused_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(RecordError) as caught:
        to_row(generation(**{field: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("request", "{"), ("request", "[]"), ("parameters", "3"), ("timings", "null"), ("tool_calls", "{}")),
        ("request", '{"a":' * 5000 + "1" + "}" * 5000),
        *(("prompt_tokens", "text"), ("completion_tokens", b"123"), ("steps", None), ("steps", b"1"), ("seed", "7")),
    ],
)
def test_what_holds_no_generation_is_refused_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(RecordError) as caught:
        from_row(to_row(generation(id="one")) | {field: value})
    assert "generation one cannot be read" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_of_a_generation_is_complete_and_valid() -> None:
    g = through_sqlite(generation(logprobs=[-math.inf, -1.0], seed=2**64 - 1))
    back = json.loads(json.dumps(to_json(g), allow_nan=False))
    assert back.keys() == {f.name for f in fields(Generation)}
    assert back["prompt_tokens"] == [5, 6, 7]
    assert back["logprobs"] == [None, -1.0]
    assert back["seed"] == 2**64 - 1


def test_ids_are_uuid_version_7_of_the_present() -> None:
    made = uuid.UUID(new_id())
    assert str(made) == str(made).lower()
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    now = int(np.datetime64(utc_now().rstrip("Z"), "ms").astype(int))
    assert abs((made.int >> 80) - now) < 5000


def test_ids_of_many_threads_are_distinct_and_each_thread_sees_them_grow() -> None:
    made: list[list[str]] = [[] for _ in range(4)]

    def make(into: list[str]) -> None:
        into.extend(new_id() for _ in range(2000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(into == sorted(into) for into in made)
    assert len({i for into in made for i in into}) == 8000


def test_ids_grow_though_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_id()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    after = [new_id() for _ in range(5)]
    assert [before, *after] == sorted([before, *after])
    assert all(uuid.UUID(i).version == 7 for i in after)


def test_times_are_utc_with_microseconds() -> None:
    assert len(utc_now()) == len("2025-01-31T12:00:00.000000Z")
    assert utc_now().endswith("Z")
