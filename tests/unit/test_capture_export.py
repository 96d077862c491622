"""The export: every token where it belongs, whole documents, one provenance a shard, complete or not there at all."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.export import Export, NothingToExportError, Skipped, Wanted, held_out
from capture.export_folder import default_folder
from capture.export_npz import export_npz
from capture.records import CaptureError, Generation
from capture.store import Store
from capture.writer import CaptureWriter
from tests.capture_rows import generation, write

NAMES = {"tokens", "doc_offsets", "prompt_lengths", "loss_mask", "logprobs", "doc_ids", "split", "meta"}
NAMES |= {"seeds", "sampling", "builds", "tags"}


def export(path: Path, out: Path, **options: Any) -> Export:
    with Store.open(path) as store:
        return export_npz(store, out, **options)


def shards(out: Path) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    for path in sorted(out.glob("*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            yield {name: archive[name] for name in archive.files}


def documents(out: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for shard in shards(out):
        for i, name in enumerate(shard["doc_ids"]):
            span = slice(shard["doc_offsets"][i], shard["doc_offsets"][i + 1])
            found[str(name)] = {
                "prompt_length": int(shard["prompt_lengths"][i]),
                "split": int(shard["split"][i]),
                **{key: shard[key][span] for key in ("tokens", "loss_mask", "logprobs")},
            }
    return found


def check_document(row: Generation, found: dict[str, Any]) -> None:
    assert row.prompt_tokens is not None
    assert row.completion_tokens is not None
    n, m = len(row.prompt_tokens), len(row.completion_tokens)
    assert found["tokens"].tolist() == [*row.prompt_tokens, *row.completion_tokens]
    assert found["prompt_length"] == n
    assert found["loss_mask"].tolist() == [0] * n + [1] * m
    assert np.isnan(found["logprobs"][:n]).all()
    np.testing.assert_array_equal(found["logprobs"][n:], np.array(row.logprobs, dtype=np.float32))
    assert found["split"] == held_out(row.prompt_tokens, row.split_key_length)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "capture.db"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_names_and_types_are_those_of_the_format(path: Path, out: Path) -> None:
    export(write(path, generation(), generation()), out)
    [shard] = shards(out)
    assert shard.keys() == NAMES
    types = {name: str(array.dtype) for name, array in shard.items() if name != "meta"}
    assert types == {
        "tokens": "int32",
        "doc_offsets": "int64",
        "prompt_lengths": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "doc_ids": "<U36",
        "split": "uint8",
        "seeds": "uint64",
        "sampling": "int32",
        "builds": "int32",
        "tags": "int32",
    }
    assert shard["doc_offsets"].tolist() == [0, 5, 10]
    meta = json.loads(str(shard["meta"]))
    assert (meta["format"], meta["format_version"]) == ("draftloop-npz", 1)
    assert meta["created"].endswith("Z")
    assert meta["tool"].startswith("draftloop ")
    assert meta["fingerprints"]["weights"] == "a" * 64


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**31 - 1), max_size=12),
            st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32)), min_size=1, max_size=12),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 30_000),
)
def test_every_token_comes_out_as_it_was_captured(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[list[int], list[tuple[int, float]]]],
    shard_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("round")
    rows = [
        generation(
            prompt_tokens=prompt,
            completion_tokens=[token for token, _ in completion],
            logprobs=[logprob for _, logprob in completion],
            split_key_length=len(prompt) // 2,
        )
        for prompt, completion in pairs
    ]
    result = export(write(folder / "capture.db", *rows), folder / "out", shard_bytes=shard_bytes)
    found = documents(folder / "out")
    assert result.documents == len(found) == len(rows)
    for row in rows:
        check_document(row, found[row.id])


def test_shards_stay_within_their_size_and_documents_stay_whole(path: Path, out: Path) -> None:
    rows = [generation(completion_tokens=range(n), logprobs=[-1.0] * n) for n in (900, 1, 2000, 30, 1500, 700, 5) * 5]
    limit = 50_000
    result = export(write(path, *rows), out, shard_bytes=limit)
    assert len(result.shards) > 2
    assert all(file.stat().st_size <= limit for file in out.glob("*.npz"))
    found = documents(out)
    for row in rows:
        check_document(row, found[row.id])


def test_a_document_larger_than_a_shard_has_one_of_its_own(path: Path, out: Path) -> None:
    rows = [generation(completion_tokens=range(n), logprobs=[-1.0] * n) for n in (10, 20_000, 10)]
    result = export(write(path, *rows), out, shard_bytes=30_000)
    assert [shard.documents for shard in result.shards] == [1, 1, 1]
    check_document(rows[1], documents(out)[rows[1].id])


def test_rows_of_different_provenance_never_share_a_shard(path: Path, out: Path) -> None:
    rows = [
        generation(weights_fingerprint=w, tokenizer_fingerprint=t, template_fingerprint=c)
        for w, t, c in ("abc", "abd", "aec", "fbc", "abc")
    ]
    result = export(write(path, *rows), out)
    assert [shard.documents for shard in result.shards] == [2, 1, 1, 1]
    for shard in shards(out):
        names = json.loads(str(shard["meta"]))["fingerprints"]
        for name in shard["doc_ids"]:
            [row] = [row for row in rows if row.id == name]
            assert names["weights"] == row.weights_fingerprint
            assert names["tokenizer"] == row.tokenizer_fingerprint
            assert names["chat_template"] == row.template_fingerprint


def test_drafters_may_share_a_shard_and_are_all_named(path: Path, out: Path) -> None:
    rows = [generation(drafter="mtp"), generation(drafter="none", drafter_fingerprint=""), generation(drafter="mtp")]
    [shard] = export(write(path, *rows), out).shards
    assert shard.fingerprints["drafters"] == [
        {"name": "mtp", "fingerprint": "d" * 64},
        {"name": "none", "fingerprint": ""},
    ]


def test_the_manifest_counts_what_is_there_and_vouches_for_each_shard(path: Path, out: Path) -> None:
    rows = [generation(prompt_tokens=[i], split_key_length=1) for i in range(60)]
    rows += [generation(status="failed"), generation(completion_tokens=[], logprobs=[])]
    export(write(path, *rows), out, shard_bytes=20_000)
    manifest = json.loads((out / "manifest.json").read_text())
    assert {p.name for p in out.iterdir()} == {"manifest.json", *(shard["file"] for shard in manifest["shards"])}
    for shard, arrays in zip(manifest["shards"], shards(out), strict=True):
        content = (out / shard["file"]).read_bytes()
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert shard["bytes"] == len(content)
        assert shard["documents"] == len(arrays["doc_ids"])
        assert shard["held_out_documents"] == arrays["split"].sum()
        assert shard["completion_tokens"] == arrays["loss_mask"].sum()
        assert shard["fingerprints"] == json.loads(str(arrays["meta"]))["fingerprints"]
    assert manifest["counts"] == {
        "documents": 60,
        "held_out_documents": sum(held_out([i], 1) for i in range(60)),
        "prompt_tokens": 60,
        "completion_tokens": 120,
        "skipped_rows": {**asdict(Skipped()), "unfinished": 1, "no_completion": 1},
    }


def test_unfinished_rows_are_exported_only_when_asked_for(path: Path, out: Path, tmp_path: Path) -> None:
    rows = [generation(status=status) for status in ("finished", "cancelled", "failed")]
    assert export(write(path, *rows), out).documents == 1
    assert documents(out).keys() == {rows[0].id}
    everything = export(path, tmp_path / "all", wanted=Wanted(include_unfinished=True))
    assert (everything.documents, everything.skipped.unfinished) == (3, 0)


def test_rows_whose_tokens_are_not_kept_are_skipped_and_counted(path: Path, out: Path) -> None:
    kept = generation()
    dropped = generation(prompt_tokens=None, completion_tokens=None, logprobs=None, seed=None)
    result = export(write(path, kept, dropped), out)
    assert (result.documents, result.skipped.no_tokens_kept) == (1, 1)


def test_unknown_log_probabilities_are_not_a_number(path: Path, out: Path) -> None:
    row = generation(logprobs=[])
    export(write(path, row), out)
    assert np.isnan(documents(out)[row.id]["logprobs"]).all()


@pytest.mark.parametrize("rows", [[], [generation(status="failed")], [generation(completion_tokens=[], logprobs=[])]])
def test_nothing_to_export_is_one_line_and_no_folder(path: Path, out: Path, rows: list[Generation]) -> None:
    with pytest.raises(NothingToExportError, match="nothing to export") as caught:
        export(write(path, *rows), out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_the_split_is_the_hash_of_the_first_user_turn() -> None:
    prompt = [1, 2, 70_000, 4, 5]
    digest = hashlib.sha256(struct.pack("<3I", 1, 2, 70_000)).digest()
    assert held_out(prompt, 3) == (int.from_bytes(digest[:8], "big") % 10 == 0)
    everything = hashlib.sha256(struct.pack("<5I", *prompt)).digest()
    assert held_out(prompt, 0) == (int.from_bytes(everything[:8], "big") % 10 == 0)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 2**31 - 1)), st.lists(st.integers(0, 9))
)
def test_retries_and_later_turns_stay_on_one_side(first: list[int], later: list[int], other: list[int]) -> None:
    assert held_out(first + later, len(first)) == held_out(first + other, len(first)) == held_out(first, 0)


def test_about_a_tenth_is_held_out() -> None:
    assert 350 < sum(held_out([i, i + 1], 2) for i in range(4000)) < 450


def test_rows_that_arrive_during_an_export_wait_for_the_next(path: Path, out: Path) -> None:
    write(path, *(generation(weights_fingerprint=w) for w in "aab"))
    writer = CaptureWriter(path)
    writer.start()
    result = export(path, out, on_row=lambda: writer.submit(generation(weights_fingerprint="b")).result(timeout=10))
    assert writer.close(timeout=10)
    assert result.documents == 3


def test_a_folder_that_holds_something_is_refused(path: Path, out: Path) -> None:
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(CaptureError, match="not empty"):
        export(write(path, generation()), out)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_taken(path: Path, out: Path) -> None:
    out.mkdir()
    assert export(write(path, generation()), out).documents == 1


@pytest.mark.parametrize("existing", [False, True])
def test_an_export_that_fails_midway_leaves_nothing(
    path: Path, out: Path, existing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        out.mkdir()
    real = np.savez

    def full_disk(file: Any, **arrays: Any) -> None:
        real(file, **arrays)
        if (out / "shard-00000.npz").exists():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    rows = [generation(completion_tokens=range(900), logprobs=[-1.0] * 900) for _ in range(9)]
    with pytest.raises(CaptureError, match="No space left on device"):
        export(write(path, *rows), out, shard_bytes=30_000)
    assert list(path.parent.glob("out/*")) == []
    assert out.exists() == existing


def test_an_export_is_private(path: Path, out: Path) -> None:
    export(write(path, generation()), out)
    assert out.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o600}  # a folder that was there may be open


def test_memory_follows_the_shard_and_not_the_file(path: Path, out: Path) -> None:
    n = 20_000
    tokens, logprobs = np.arange(n, dtype=np.uint32), np.zeros(n, dtype=np.float32)
    write(path, *(generation(completion_tokens=tokens, logprobs=logprobs) for _ in range(150)))  # 27 MB of shards
    tracemalloc.start()
    try:
        export(path, out, shard_bytes=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000


def test_the_default_folder_is_named_for_the_time_and_never_taken(tmp_path: Path) -> None:
    made = set()
    for _ in range(3):
        folder = default_folder(tmp_path)
        folder.mkdir()
        made.add(folder.name)
    assert len(made) == 3
    assert all(name.startswith("draftloop-export-2") for name in made)


def chosen_by(out: Path) -> dict[str, tuple[int, dict[str, Any] | None, str]]:
    """Of every document: its seed, the parameters its shard names for it, and its build."""
    found = {}
    for shard in shards(out):
        meta = json.loads(str(shard["meta"]))
        for name, seed, sampling, build in zip(
            *(shard[key].tolist() for key in ("doc_ids", "seeds", "sampling", "builds")), strict=True
        ):
            parameters = meta["sampling"][sampling] if sampling >= 0 else None
            found[name] = seed, parameters, meta["fingerprints"]["builds"][build]
    return found


def test_each_document_keeps_its_seed_its_parameters_and_its_build(path: Path, out: Path) -> None:
    cold, warm = {"temperature": 0.0, "choice": 0}, {"temperature": 0.7, "choice": 1, "logit_bias": {"5": -1.5}}
    rows = [
        generation(seed=2**64 - 1, parameters=warm, build="torch 2"),
        generation(seed=0, parameters=cold, build="torch 1"),
        generation(seed=-1, parameters={**warm, "response": "the id of another row"}, build="torch 1"),
    ]
    export(write(path, *rows), out)
    assert chosen_by(out) == {
        rows[0].id: (2**64 - 1, warm, "torch 2"),
        rows[1].id: (0, cold, "torch 1"),
        rows[2].id: (2**64 - 1, warm, "torch 1"),
    }
    [shard] = shards(out)
    assert len(json.loads(str(shard["meta"]))["sampling"]) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": None},
        {"build": "upstream"},
        {"parameters": {"temperature": 0.7, "thinking_budget": 16}},
        {"request": {"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]}},
        {"request": {"messages": [], "response_format": {"type": "json_object"}}},
        {"request": {"messages": [], "structured_outputs": {"regex": "a+"}}},
        {"request": {"input": "Hello", "text": {"format": {"type": "json_schema", "schema": {}}}}},
    ],
)
def test_a_row_whose_tokens_parameters_and_seed_do_not_decide_has_neither(
    path: Path, out: Path, fields: dict[str, Any]
) -> None:
    free = generation(request={"input": "Hello", "text": {"format": {"type": "text"}}})
    bound = generation(**fields)
    export(write(path, free, bound), out)
    found = chosen_by(out)
    assert found[free.id][:2] == (7, {"temperature": 0.7})
    assert found[bound.id][:2] == (0, None)


def test_a_shard_takes_so_many_different_parameters_and_no_more(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.export_npz.MOST_SAMPLINGS", 3)
    rows = [generation(parameters={"temperature": 0.1 * (i // 2)}) for i in range(10)]
    result = export(write(path, *rows), out)
    assert [shard.documents for shard in result.shards] == [6, 4]
    assert [found[1] for found in chosen_by(out).values()] == [row.parameters for row in rows]


def test_parameters_count_for_a_shards_size(path: Path, out: Path) -> None:
    rows = [generation(parameters={"logit_bias": {str(n): n for n in range(100 * i)}}) for i in range(1, 9)]
    limit = 100_000
    result = export(write(path, *rows), out, shard_bytes=limit)
    assert len(result.shards) > 2
    assert all(shard.bytes <= limit for shard in result.shards)


def test_each_document_keeps_the_class_and_the_client_of_its_request(path: Path, out: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rows = [
        generation(request={"messages": messages, "metadata": {"class": "code", "other": "kept out"}}, client="editor"),
        generation(request={"messages": messages, "metadata": {"class": ["no", "text"]}}),
        generation(request={"messages": messages, "metadata": None}, client="editor"),
        generation(request={"messages": messages, "metadata": {"class": "code"}}, client="editor"),
    ]
    export(write(path, *rows), out)
    [shard] = shards(out)
    listed = json.loads(str(shard["meta"]))["tags"]
    assert listed == [{"class": "code", "client": "editor"}, {"client": "editor"}]
    assert shard["tags"].tolist() == [0, -1, 1, 0]
