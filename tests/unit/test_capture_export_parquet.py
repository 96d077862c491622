"""Parquet: every column of every row as it was captured, read back by pyarrow."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capture import export_parquet as module
from capture.export import Export, held_out
from capture.export_parquet import export_parquet
from capture.records import CaptureError, Generation
from capture.store import Store
from tests.capture_rows import generation, write


def export(path: Path, out: Path, **options: Any) -> Export:
    with Store.open(path) as store:
        return export_parquet(store, out, **options)


def read(out: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(out.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def check(row: Generation, found: dict[str, Any]) -> None:
    prompt, completion = list(row.prompt_tokens or ()), list(row.completion_tokens or ())
    assert found["input_ids"] == [*prompt, *completion]
    assert found["loss_mask"] == [0] * len(prompt) + [1] * len(completion)
    assert found["prompt_length"] == len(prompt)
    logprobs = np.array(found["logprobs"], dtype=np.float32)
    assert np.isnan(logprobs[: len(prompt)]).all()
    np.testing.assert_array_equal(logprobs[len(prompt) :], np.array(row.logprobs, dtype=np.float32))
    assert found["split"] == ("held_out" if held_out(row.prompt_tokens or (), row.split_key_length) else "train")
    for name in (*module.TEXTS, *module.PRINTS, "seed"):
        assert found[name] == getattr(row, name)
    for name in module.JSON_TEXTS:
        assert json.loads(found[name]) == (list(row.tool_calls) if name == "tool_calls" else getattr(row, name))


def test_every_row_comes_out_as_it_was_captured(tmp_path: Path) -> None:
    rows = [
        generation(seed=2**64 - 1, response_text="Grüße \x00", client=None, reasoning="Hm", tool_calls=[{"id": "c"}]),
        generation(prompt_tokens=[2**31 - 1], completion_tokens=[0, 5, 9], logprobs=[-1e-7, -3.25, -88.0]),
        generation(request={"prompt": [1, 2]}, finish_reason="length"),
    ]
    result = export(write(tmp_path / "capture.db", *rows), tmp_path / "out")
    assert result.documents == 3
    for row, found in zip(rows, read(tmp_path / "out"), strict=True):
        check(row, found)


def test_half_a_character_is_kept_as_json_has_it(tmp_path: Path) -> None:
    called = [{"id": "c", "function": {"name": "f", "arguments": "\ud83d"}}]
    row = generation(request={"prompt": "\ud83d"}, tool_calls=called, parameters={"stop": "\udc00"})
    export(write(tmp_path / "capture.db", row), tmp_path / "out")
    check(row, read(tmp_path / "out")[0])


def test_types_are_those_of_training(tmp_path: Path) -> None:
    export(write(tmp_path / "capture.db", generation()), tmp_path / "out")
    schema = pq.read_schema(tmp_path / "out" / "shard-00000.parquet")
    types = {name: str(schema.field(name).type) for name in ("input_ids", "loss_mask", "logprobs", "seed", "request")}
    # Field names inside of lists are the writer's own.
    assert {name: kind.replace("element: ", "item: ") for name, kind in types.items()} == {
        "input_ids": "list<item: int32>",
        "loss_mask": "list<item: int8>",
        "logprobs": "list<item: float>",
        "seed": "uint64",
        "request": "string",
    }
    meta = json.loads(schema.metadata[b"draftloop"])
    assert (meta["format"], meta["fingerprints"]["weights"]) == ("draftloop-parquet", "a" * 64)


def test_unknown_log_probabilities_are_not_a_number(tmp_path: Path) -> None:
    export(write(tmp_path / "capture.db", generation(logprobs=[])), tmp_path / "out")
    assert np.isnan(read(tmp_path / "out")[0]["logprobs"]).all()


def test_shards_are_as_many_as_their_size_says_and_the_manifest_vouches_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    rows = [generation(completion_tokens=range(n), logprobs=[-1.0] * n) for n in [400] * 8 + [5000] + [10] * 8]
    out = tmp_path / "out"
    result = export(write(tmp_path / "capture.db", *rows), out, shard_bytes=20_000)
    assert [shard.documents for shard in result.shards] == [4, 4, 1, 8]
    for row, found in zip(rows, read(out), strict=True):
        check(row, found)
    manifest = json.loads((out / "manifest.json").read_text())
    for shard in manifest["shards"]:
        assert shard["sha256"] == hashlib.sha256((out / shard["file"]).read_bytes()).hexdigest()
    assert manifest["counts"]["completion_tokens"] == 8 * 400 + 5000 + 80


def test_memory_follows_the_shard_and_not_the_file(tmp_path: Path) -> None:
    tokens, logprobs = np.arange(20_000, dtype=np.uint32), np.zeros(20_000, dtype=np.float32)
    path = write(tmp_path / "capture.db", *(generation(completion_tokens=tokens, logprobs=logprobs) for _ in range(80)))
    before = pa.total_allocated_bytes()
    seen: list[int] = []
    export(path, tmp_path / "out", shard_bytes=1_000_000, on_row=lambda: seen.append(pa.total_allocated_bytes()))
    assert max(seen) - before < 5_000_000


def test_without_pyarrow_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "capture.db", generation())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(CaptureError, match=r"draftloop\[train\]") as caught:
        export(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
