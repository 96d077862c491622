"""Ten seconds of what `python -m tests.soak` does for ten minutes; longer, and another way, among the slow tests."""

from __future__ import annotations

import pytest

from tests.checkpoints import random_small
from tests.soak import KV_MEMORY, soak

AUTO = ("--draft-tokens", "auto")
WITHOUT_PREFIXES = ("--draft-tokens", "3", "--prefix-cache", "off")


@pytest.mark.parametrize(
    ("seconds", "flags"),
    [
        pytest.param(10, AUTO, id="auto"),
        pytest.param(30, AUTO, id="auto-longer", marks=pytest.mark.slow),
        pytest.param(30, WITHOUT_PREFIXES, id="no-prefix-cache", marks=pytest.mark.slow),
    ],
)
def test_random_load_leaves_nothing_behind(seconds: int, flags: tuple[str, ...]) -> None:
    load = soak(random_small(), seconds, "--kv-memory", KV_MEMORY, *flags)
    assert load.seen["preemptions"] > 0, load.seen
    assert load.seen["left"] > 5, load.seen
