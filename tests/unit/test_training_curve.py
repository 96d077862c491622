"""The curve kept beside the model is the run's own, averaged over windows."""

from __future__ import annotations

import json
from pathlib import Path

from training.pretraining.curve import summary


def test_windows_average_the_steps_and_keep_the_held_out_figures(tmp_path: Path) -> None:
    lines = [
        {"stage": "a", "step": i, "trunk": float(i), "mtp": 1.0, "answers": 2.0, "seconds": 3.0 * i}
        for i in range(1, 31)
    ]
    lines[4]["held_out"] = {"trunk": 0.123456}
    lines += [{"stage": "b", "step": 0, "held_out_hits": [0.55555, 0.4], "seconds": 0.0}]
    lines += [{"stage": "b", "step": i, "loss": [1.0, float(i)], "hits": [0.5, 0.25], "seconds": i} for i in (1, 2)]
    (tmp_path / "loss.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "run.json").write_text('{"planned_steps": 30}')
    found = summary(tmp_path)
    assert found["run"] == {"planned_steps": 30}
    assert [(point["step"], point["trunk"]) for point in found["a"]] == [(20, 10.5), (30, 25.5)]
    assert found["a"][0]["held_out"] == {"trunk": 0.1235}
    assert "held_out" not in found["a"][1]
    assert found["b"] == [
        {"step": 2, "seconds": 2, "loss": [1.0, 1.5], "hits": [0.5, 0.25], "held_out_hits": [0.5555, 0.4]}
    ]
