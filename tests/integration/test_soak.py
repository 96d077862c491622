"""Half a minute of what `python -m tests.soak` does for ten."""

from __future__ import annotations

import pytest

from tests.checkpoints import random_small
from tests.soak import KV_MEMORY, soak


@pytest.mark.parametrize("flags", [("--draft-tokens", "auto"), ("--draft-tokens", "3", "--prefix-cache", "off")])
def test_random_load_leaves_nothing_behind(flags: tuple[str, ...]) -> None:
    load = soak(random_small(), 15, "--kv-memory", KV_MEMORY, *flags)
    assert load.seen["preemptions"] > 0, load.seen
    assert load.seen["left"] > 5, load.seen
