"""The names behind requests that name no drafter: promotions and the way back, and a canary's share."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.default_drafter import DefaultDrafter
from backend.interface import InvalidRequest

names = st.sampled_from("abcd")
ids = st.text(max_size=20)
shares = st.floats(min_value=0, max_value=1, exclude_min=True)


def canary(share: float) -> DefaultDrafter:
    default = DefaultDrafter("old")
    default.begin_canary("new", share)
    return default


@given(ids, shares, shares)
def test_who_has_a_small_canary_has_a_greater_one_too(request_id: str, one: float, other: float) -> None:
    small, great = canary(min(one, other)), canary(max(one, other))
    assert small.of(request_id) == "old" or great.of(request_id) == "new"


@given(ids, shares)
def test_an_id_alone_says_who_drafts(request_id: str, share: float) -> None:
    first = int(hashlib.sha256(request_id.encode()).hexdigest()[:16], 16)
    assert canary(share).of(request_id) == ("new" if first < share * 2**64 else "old")


@given(ids)
def test_a_whole_share_is_everybody(request_id: str) -> None:
    assert canary(1.0).of(request_id) == "new"


def test_a_share_is_about_that_many_requests() -> None:
    default = canary(0.3)
    found = sum(default.of(f"request-{i}") == "new" for i in range(2000))
    assert abs(found / 2000 - 0.3) < 0.05


@given(st.lists(names, max_size=12))
def test_rolling_back_goes_the_way_of_the_promotions_in_reverse(promoted: list[str]) -> None:
    default, way = DefaultDrafter("a"), ["a"]
    for name in promoted:
        default.promote(name)
        way += [name] if name != way[-1] else []
    for name in reversed(way[:-1]):
        assert default.previous == name
        default.roll_back()
        assert default.name == name
    with pytest.raises(InvalidRequest):
        default.roll_back()


@given(st.lists(names, max_size=12), names)
def test_what_is_forgotten_is_never_gone_back_to(promoted: list[str], gone: str) -> None:
    default = DefaultDrafter("a")
    for name in promoted:
        default.promote(name)
    active, since = default.name, default.as_json()[-1]["since"]
    default.forget(gone)
    told = default.as_json()
    assert (told[-1]["drafter"], told[-1]["since"]) == (active, since)
    before = [one["drafter"] for one in told]
    assert gone not in before[:-1]
    assert all(one != other for one, other in pairwise(before))


def test_one_state_is_told_of_a_drafter_with_several() -> None:
    default = DefaultDrafter("a")
    default.promote("b")
    default.begin_canary("a", 0.5)
    assert [default.state(name) for name in "abc"] == ["canary", "active", None]
    default.roll_back()
    assert [default.state(name) for name in "abc"] == ["previous", "active", None]


def test_a_promotion_ends_the_canary_and_a_canary_is_another_one() -> None:
    default = canary(0.5)
    with pytest.raises(InvalidRequest, match="default already"):
        default.begin_canary("old", 0.5)
    default.promote("new")
    assert (default.name, default.previous, default.canary) == ("new", "old", None)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_is_above_none_and_at_most_all(share: float) -> None:
    with pytest.raises(InvalidRequest) as raised:
        canary(share)
    assert raised.value.param == "canary"
