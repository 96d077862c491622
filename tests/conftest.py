"""Settings every test process needs before torch is imported."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Two torch threads that spin at each other's barriers make no progress on a machine whose cores are taken; sleeping
# ones do. Bits do not depend on it. Server processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Machines are shared: how long an example takes says nothing of the code. `--hypothesis-profile` still chooses another.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
