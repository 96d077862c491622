"""Settings every test process needs before torch is imported."""

from __future__ import annotations

import os

# Two torch threads that spin at each other's barriers make no progress on a machine whose cores are taken; sleeping
# ones do. Bits do not depend on it. Server processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
