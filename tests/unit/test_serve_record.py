"""The timings block and the row, from a result."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.interface import Fingerprints, Result, Step, Timings
from capture.records import to_row
from serve.record import Origin, timings, to_generation

RESULT = Result(
    finish_reason="stop",
    prompt_ids=(1, 2),
    completion_ids=(3,),
    logprobs=(-0.5,),
    seed=7,
    sampling={"temperature": 0.0},
    drafter="mtp",
    steps=(),
    fingerprints=Fingerprints("w", "t", "c", "d", "b"),
    timings=Timings(queue_ms=1.0, prompt_n=2, prompt_ms=4.0, predicted_n=1, predicted_ms=0.0),
    content="x",
    reasoning="",
    first_user_end=2,
)
ORIGIN = Origin(model="m", body={"messages": []})

steps = st.lists(
    st.integers(0, 8).flatmap(lambda drafted: st.builds(Step, st.just(drafted), st.integers(0, drafted))), max_size=30
)


@given(steps)
def test_slots_are_counted_as_proposed_and_as_accepted_with_all_before_them(given_steps):
    block = timings(replace(RESULT, steps=tuple(given_steps)))
    proposed = [0] * 8
    accepted = [0] * 8
    for step in given_steps:
        for slot in range(step.drafted):
            proposed[slot] += 1
        for slot in range(step.accepted):
            accepted[slot] += 1
    slots = len(block.draft_n_per_pos)
    assert block.draft_n_per_pos == proposed[:slots]
    assert not any(proposed[slots:])
    assert block.draft_n_accepted_per_pos == accepted[:slots]
    assert block.draft_n == sum(proposed)
    assert block.draft_n_accepted == sum(accepted)


def test_a_rate_over_no_time_is_null_and_never_infinite():
    block = timings(RESULT)
    assert block.predicted_per_second is None
    assert block.predicted_per_token_ms == 0
    assert block.prompt_per_second == 500
    assert block.prompt_per_token_ms == 2
    json.loads(block.model_dump_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("finish", "status", "kept"),
    [
        ("stop", "finished", "stop"),
        ("length", "finished", "length"),
        ("cancelled", "cancelled", None),
        ("error", "failed", None),
    ],
)
def test_every_end_has_its_status_and_only_finished_ones_a_reason(finish, status, kept):
    row = to_generation(ORIGIN, replace(RESULT, finish_reason=finish))
    assert (row.status, row.finish_reason) == (status, kept)
    to_row(row)  # capture takes it as it is


def test_two_requests_never_share_an_id():
    assert len({Origin(model="m", body={}).id for _ in range(1000)}) == 1000
