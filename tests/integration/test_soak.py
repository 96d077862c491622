"""Half a minute of what `python -m tests.soak` does for ten."""

from __future__ import annotations

import pytest

from tests.checkpoints import random_small
from tests.soak import KV_MEMORY, soak

WAYS = {"auto": ("--draft-tokens", "auto"), "no prefix cache": ("--draft-tokens", "3", "--prefix-cache", "off")}


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_random_load_leaves_nothing_behind(flags: tuple[str, ...]) -> None:
    load = soak(random_small(), 15, "--kv-memory", KV_MEMORY, *flags)
    assert load.seen["preemptions"] > 0, load.seen
    assert load.seen["left"] > 5, load.seen
