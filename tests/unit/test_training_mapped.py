"""Hidden states stay on disk until they are looked at, and are bit for bit what was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.forced_answers import answers, write_answers
from training.data import Document, Forced, Scalars
from training.distillation.batches import collate, windows
from training.errors import TrainingError
from training.forced import FORMAT, FORMAT_VERSION, digest, read_forced, write_shard
from training.mapped import find

WIDTH, LENGTH = 512, 1024  # 1 MB a document in bfloat16
# A pass over all windows, four documents together, and another with all of them held: by how much memory grew, in kB.
PASS = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from training.distillation.batches import collate, windows
from training.forced import read_forced
def peak():  # in kB; getrusage's begins with the peak of the process that started this one
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
def total(documents):
    found = 0.0
    for first in range(0, len(documents), 4):
        chosen = [w for i in range(first, first + 4) for w in windows(i, 4, len(documents[i].document.tokens), 2048, 4)]
        found += float(collate(chosen, documents, torch.device("cpu"), torch.bfloat16).hidden[:, :, 0].float().sum())
    return found
before = peak()
documents = list(read_forced(Path(sys.argv[1])))
print(len(documents), total(documents), peak() - before)
documents = [replace(one, hidden=one.hidden.clone()) for one in documents]
print(len(documents), total(documents), peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc says how much memory was held at most")
def test_a_pass_over_more_than_is_held_takes_no_more_memory_than_its_batches(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    fingerprints = dict.fromkeys(("weights", "tokenizer", "chat_template", "build"), "f")
    nothing = np.full(LENGTH, np.nan, dtype=np.float32)
    entries = []
    for shard in range(8):
        members = []
        for i in range(8):
            zeros = torch.zeros(LENGTH)
            tokens = np.zeros(LENGTH, dtype=np.int32)
            hidden = torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float32).bfloat16()
            scalars = Scalars(zeros, zeros.long(), zeros, zeros)
            members.append(Forced(Document(f"{shard} {i}", tokens, 4, nothing, held_out=False), hidden, scalars))
        path = tmp_path / f"forced-{shard:05d}.npz"
        with path.open("wb") as file:
            write_shard(file, members, {"dtype": "bfloat16", "fingerprints": fingerprints})
        entries.append({"file": path.name, "sha256": digest(path)})
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprints": fingerprints,
        "dtype": "bfloat16",
        "d2t_sha256": None,
        "counts": {"documents": 64, "answer_tokens": 64 * (LENGTH - 4)},
        "shards": entries,
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    command = [sys.executable, "-c", PASS, str(tmp_path)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc keeps no batch that was let go
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    print(told)
    mapped, held = (line.split() for line in told.splitlines())
    assert mapped[0] == "64"
    assert mapped[:2] == held[:2]
    assert int(held[2]) > 64 * 1024
    assert int(mapped[2]) < 32 * 1024  # a batch of 4 MB, the documents it is cut out of, what is kept beside the states


def test_batches_of_documents_on_disk_are_those_of_documents_in_memory(tmp_path: Path) -> None:
    _, made = answers()
    documents = list(read_forced(write_answers(tmp_path / "forced")))
    chosen = [window for i in (3, 0, 11) for window in windows(i, 6, 26, 16, 4)]
    for dtype in (torch.bfloat16, torch.float32):
        one, other = (collate(chosen, given, torch.device("cpu"), dtype) for given in (documents, made))
        assert one.hidden.dtype == dtype
        assert torch.equal(one.hidden, other.hidden)
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_rows_are_read_wherever_an_array_begins(tmp_path: Path, before: int, dtype: type) -> None:
    path = tmp_path / "some.npz"
    array = np.arange(60, dtype=dtype).reshape(5, 3, 4)
    np.savez(path, before=np.zeros(before, dtype=np.uint8), array=array)
    found = find(path, "array", "absent")
    assert list(found) == ["array"]
    with warnings.catch_warnings(action="error"):
        for start, stop in ((0, 5), (2, 4), (3, 3), (4, 5)):
            np.testing.assert_array_equal(found["array"].rows(start, stop).numpy(), array[start:stop])


def test_the_file_stays_as_it_is_when_a_tensor_is_written_to(tmp_path: Path) -> None:
    [*_, last] = read_forced(write_answers(tmp_path / "forced"))
    kept = last.hidden.clone()
    last.hidden.zero_()
    assert torch.equal(last.hidden, kept)


def test_states_begin_where_they_need_no_copy(tmp_path: Path) -> None:
    for count in (12, 13, 14):
        folder = write_answers(tmp_path / str(count), answers()[1][:count])
        assert find(folder / "forced-00000.npz", "hidden")["hidden"].offset % 4 == 0


def test_a_file_put_in_the_place_of_one_that_was_checked_is_noticed(tmp_path: Path) -> None:
    folder = write_answers(tmp_path / "forced")
    documents = list(read_forced(folder))
    shard = folder / "forced-00000.npz"
    other = tmp_path / "other.npz"
    with other.open("wb") as file:
        spoilt = [replace(one, hidden=one.hidden + 1) for one in answers()[1]]
        write_shard(file, spoilt, {"dtype": "bfloat16", "fingerprints": {"weights": "w", "build": "b"}})
    other.replace(shard)
    with pytest.raises(TrainingError, match="has changed"):
        _ = documents[0].hidden
    shard.unlink()
    with pytest.raises(TrainingError, match="cannot read"):
        _ = documents[0].hidden


def test_compressed_arrays_and_other_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez_compressed(path, array=np.zeros((4, 4), dtype=np.float32))
    with pytest.raises(ValueError, match="compressed"):
        find(path, "array")
    np.savez(path, array=np.zeros((4, 4), dtype=np.float64))
    with pytest.raises(ValueError, match="f8"):
        find(path, "array")
    np.savez(path, array=np.asfortranarray(np.zeros((4, 4), dtype=np.float32)))
    with pytest.raises(ValueError, match="f4"):
        find(path, "array")
