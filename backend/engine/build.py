"""What "within one build" means (law L1): every fact a bit of output may depend on besides weights and tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from backend.engine.forms import DELTA_CHUNK, GRID
from backend.engine.probe import ProbeReport, shape_of
from backend.engine.runner import Runner
from backend.models.layers import products


def describe_build(runner: Runner, report: ProbeReport) -> dict[str, Any]:
    """JSON-ready facts: torch, device, CPU capability, threads, dtype, quantisation, kernels, grid, row tiles."""
    device, model = runner.device, runner.model
    # The drafter's own projections have no part in what is emitted (law L2).
    trunk = {shape_of(product) for part in (model.model, model.lm_head) for product in products(part)}
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,  # draws the noise on a CPU
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantisation": "none",
        "kernels": "reference",
        "prefill_grid": GRID,
        "delta_chunk": DELTA_CHUNK,
        "row_tiles": {shape: tile for shape, tile in report.as_json()["row_tiles"].items() if shape in trunk},
    }


def build_string(build: dict[str, Any]) -> str:
    """One canonical line of `describe_build`, compared for equality."""
    return json.dumps(build, sort_keys=True, separators=(",", ":"))
