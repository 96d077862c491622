"""From captured rows to the ids a drafter's head is cut to, and what a file must be for the engine to take it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.interface import BackendError
from tests.exports import PLAIN, SPECIAL, TINY, VOCAB, exported, prompt, row
from training.cli import main
from training.data import find_shards
from training.errors import TrainingError
from training.hot_vocab import Built, build

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Told:
    """How a command ended and what it printed."""

    code: int
    stdout: str
    stderr: str


def command(*arguments: object) -> Told:
    """`training hot-vocab` in this process, as its entry point runs it."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        patch.setattr("sys.argv", ["training", "hot-vocab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return Told(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def command_in_a_new_process(*arguments: object) -> Told:
    line = [sys.executable, "-m", "training.cli", "hot-vocab", *map(str, arguments)]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return Told(ended.returncode, ended.stdout, ended.stderr)


def figures(told: str) -> dict[str, str]:
    """The printed table."""
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in told.splitlines() if line.startswith("│")]
    return dict(cells)


def built(folder: Path, size: int) -> Built:
    return build(find_shards([folder]), TINY, size)


def ids_of(made: Built | HotVocab) -> list[int]:
    hot = made.hot if isinstance(made, Built) else made
    return hot.d2t.tolist()


# From rows to the file


def test_captured_answers_become_a_list_that_the_engine_loads(tmp_path: Path) -> None:
    folder = exported(
        tmp_path,
        row([300, 301, 300, 302], 0),
        row([300, 301], 1),
        row([300, 900, 900, 0], 0, is_held_out=True),
        row([1000] * 9, 2, status="failed", finish_reason="error", error="out of memory"),
    )
    out = tmp_path / "hot.safetensors"
    told = command(folder, "--size", len(SPECIAL) + 5, "--out", out)
    assert told.code == 0, told.stderr
    assert told.stdout.splitlines()[-1] == str(out)
    hot = HotVocab.load(out, TINY.fingerprint, VOCAB)
    # Two are left after 300, 301 and 302: the lowest ids that the answers did not use.
    assert ids_of(hot) == [0, 1, 300, 301, 302, *SPECIAL]
    assert hot.counts.tolist() == [0, 0, 3, 2, 1, *[0] * len(SPECIAL)]
    assert (hot.d2t.dtype, hot.counts.dtype, hot.size) == (torch.int32, torch.int64, len(SPECIAL) + 5)
    assert hot.header.train == Coverage(covered=6, tokens=6)
    assert hot.header.held_out == Coverage(covered=2, tokens=4)
    assert hot.header.sources == [
        {
            "weights": "a" * 64,
            "tokenizer": TINY.fingerprint,
            "chat_template": "c" * 64,
            "drafters": [{"name": "mtp", "fingerprint": "d" * 64}],
            "builds": ["torch 2.13.0 cpu fp32"],
        }
    ]
    assert figures(told.stdout) == {
        "documents counted": "3",
        "documents in several shards, counted once": "0",
        "size": str(len(SPECIAL) + 5),
        "distinct tokens seen": "3",
        "filled with unused ids": "2",
        "coverage of train own tokens": "1.0000 (n = 6)",
        "coverage of held-out own tokens": "0.5000 (n = 4)",
        "all": "1",  # of the held-out documents, how many
        "to 256": "1",
    }


def test_a_prompts_tokens_are_not_the_models_own(tmp_path: Path) -> None:
    asked = [*prompt(0, is_held_out=False), *[700] * 50]
    key_length = 3
    made = built(exported(tmp_path, row([300], prompt_tokens=asked, split_key_length=key_length)), len(SPECIAL) + 1)
    assert ids_of(made) == [300, *SPECIAL]
    assert made.hot.header.train.tokens == 1


def test_held_out_answers_choose_nothing(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300]), row([800] * 50, is_held_out=True))
    made = built(folder, len(SPECIAL) + 1)
    assert ids_of(made) == [300, *SPECIAL]
    assert made.hot.header.held_out == Coverage(covered=0, tokens=50)


def test_without_held_out_answers_their_coverage_is_not_a_figure(tmp_path: Path) -> None:
    told = command(exported(tmp_path, row([300])), "--size", 40, "--out", tmp_path / "hot")
    assert figures(told.stdout)["coverage of held-out own tokens"] == "n/a (n = 0)"
    assert HotVocab.load(tmp_path / "hot", TINY.fingerprint, VOCAB).header.held_out.share is None


def test_equal_counts_go_to_the_lowest_ids(tmp_path: Path) -> None:
    made = built(exported(tmp_path, row([303, 301, 302, 300, 304, 304])), len(SPECIAL) + 3)
    assert ids_of(made) == [300, 301, 304, *SPECIAL]


def test_special_tokens_are_in_before_the_most_frequent_one(tmp_path: Path) -> None:
    made = built(exported(tmp_path, row([300] * 100)), len(SPECIAL))
    assert ids_of(made) == SPECIAL
    assert TINY.literal_id("</think>") in SPECIAL
    assert TINY.eos_ids <= set(SPECIAL)
    assert made.filled == 0


def test_ids_that_end_an_answer_are_in_even_where_they_are_no_added_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TINY, "eos_ids", frozenset({7}))
    assert ids_of(built(exported(tmp_path, row([300])), len(SPECIAL) + 1)) == [7, *SPECIAL]


def test_a_list_may_hold_the_whole_vocabulary(tmp_path: Path) -> None:
    made = built(exported(tmp_path, row([300, 301, SPECIAL[0]])), VOCAB)
    assert ids_of(made) == list(range(VOCAB))
    assert made.filled == VOCAB - 2 - len(SPECIAL)
    assert made.distinct == 3


def test_ids_that_stand_for_no_token_fill_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TINY, "undecodable_ids", lambda vocabulary: (0, 2))
    folder = exported(tmp_path, row([300]))
    assert ids_of(built(folder, len(SPECIAL) + 3)) == [1, 3, 300, *SPECIAL]
    with pytest.raises(TrainingError, match=f"{VOCAB - 2} tokens in all"):
        built(folder, VOCAB - 1)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([*PLAIN[:6], *SPECIAL[:2], 2000]), min_size=1, max_size=12), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 12),
)
def test_the_list_is_what_counting_by_hand_gives(
    tmp_path_factory: pytest.TempPathFactory, answers: list[tuple[list[int], bool]], more: int
) -> None:
    rows = [row([PLAIN[0]]), *(row(answer, is_held_out=is_held_out) for answer, is_held_out in answers)]
    seen = Counter(
        token for answer, is_held_out in [([PLAIN[0]], False), *answers] if not is_held_out for token in answer
    )
    wanted = set(SPECIAL)
    for token in [*sorted(seen, key=lambda t: (-seen[t], t)), *range(VOCAB)]:
        if len(wanted) < len(SPECIAL) + more:
            wanted.add(token)
    made = built(exported(tmp_path_factory.mktemp("rows"), *rows, shard_bytes=20_000), len(SPECIAL) + more)
    assert ids_of(made) == sorted(wanted)
    assert made.hot.counts.tolist() == [seen[token] for token in sorted(wanted)]
    assert made.filled == sum(token not in seen and token not in SPECIAL for token in wanted)
    assert made.distinct == len(seen)
    held = [token for answer, is_held_out in answers if is_held_out for token in answer]
    assert made.hot.header.held_out == Coverage(covered=sum(token in wanted for token in held), tokens=len(held))
    assert made.hot.header.train == Coverage(covered=sum(seen[t] for t in wanted), tokens=seen.total())


def test_the_same_documents_give_the_same_bytes_in_any_order_of_shards(tmp_path: Path) -> None:
    rows = [row([300 + n, 300], n, weights_fingerprint=str(n) * 64) for n in range(6)]
    folder = exported(tmp_path, *rows)
    shards = sorted(folder.glob("*.npz"))
    assert len(shards) == 6
    # Hash seeds differ between processes, and the order of whatever is kept in a set with them.
    for name, run, inputs in (("one", command, [folder]), ("other", command_in_a_new_process, reversed(shards))):
        told = run(*inputs, "--size", 40, "--out", tmp_path / name)
        assert told.code == 0, told.stderr
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_document_in_two_exports_counts_once(tmp_path: Path) -> None:
    first, second = row([300], 0), row([301, 301], 1)
    folders = [exported(tmp_path, first, name="old"), exported(tmp_path, first, second, name="new")]
    made = build(find_shards([*folders, folders[0] / "shard-00000.npz"]), TINY, len(SPECIAL) + 2)
    assert dict(zip(ids_of(made), made.hot.counts.tolist(), strict=True))[300] == 1
    assert (made.documents, made.repeated) == (2, 1)


def test_shards_of_several_weights_are_counted_together_and_both_named(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300]), row([301], 1, weights_fingerprint="e" * 64))
    made = built(folder, 40)
    assert [source["weights"][0] for source in made.hot.header.sources] == ["a", "e"]


# What the command refuses


def test_the_command_explains_itself() -> None:
    told = command("--help")
    assert told.code == 0
    assert all(option in told.stdout for option in ("EXPORT", "--size", "--model", "--out"))


def refused(told: Told, *words: object) -> None:
    assert told.code == 2
    assert told.stdout == ""
    [line] = [line for line in told.stderr.splitlines() if line.startswith("error: ")]
    assert line == told.stderr.strip().splitlines()[-1]
    for word in words:
        assert str(word) in line


def test_a_shard_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300], tokenizer_fingerprint="f" * 64))
    told = command(folder, "--size", 40, "--out", tmp_path / "hot")
    refused(told, "another tokenizer", "f" * 12, TINY.fingerprint[:12])
    assert not (tmp_path / "hot").exists()


def test_a_mixture_of_tokenizers_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300]), row([300], 1, tokenizer_fingerprint="f" * 64))
    assert len(list(folder.glob("*.npz"))) == 2
    refused(command(folder, "--size", 40, "--out", tmp_path / "hot"), "another tokenizer")


@pytest.mark.parametrize("size", [len(SPECIAL) - 1, VOCAB + 1])
def test_a_size_that_cannot_be_is_refused(tmp_path: Path, size: int) -> None:
    told = command(exported(tmp_path, row([300])), "--size", size, "--out", tmp_path / "hot")
    refused(told, size, f"{len(SPECIAL)} special tokens", f"{VOCAB} tokens in all")


def test_no_answer_in_the_train_split_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300], is_held_out=True))
    with pytest.raises(TrainingError, match="nothing to count"):
        built(folder, 40)


def test_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    told = command(tmp_path / "nowhere", "--size", 40, "--out", tmp_path / "hot")
    refused(told, "no shard at", tmp_path / "nowhere")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    told = command(exported(tmp_path, row([300])), "--size", 40, "--out", tmp_path)
    refused(told, "cannot write the hot vocabulary")
    assert not list(tmp_path.parent.glob("*.tmp"))


def test_an_export_without_a_manifest_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300]))
    (folder / "manifest.json").unlink()
    with pytest.raises(TrainingError, match="no complete export"):
        built(folder, 40)


def test_a_shard_changed_since_its_export_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300]))
    changed(folder / "shard-00000.npz", tokens=lambda tokens: tokens + 1)
    with pytest.raises(TrainingError, match="not the file that its manifest names"):
        built(folder, 40)


def changed(path: Path, **edits: Any) -> Path:
    """The same shard with some arrays replaced."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(path, **{name: edits.get(name, lambda array: array)(array) for name, array in arrays.items()})
    return path


def newer(meta: Any) -> Any:
    return np.array(json.dumps({**json.loads(str(meta)), "format_version": 2}))


def saying(**told: Any) -> Callable[[Any], Any]:
    """The meta with these entries in place of its own, those of its fingerprints too."""

    def edit(meta: Any) -> Any:
        entries = json.loads(str(meta))
        prints = {name: told.get(name, value) for name, value in entries["fingerprints"].items()}
        return np.array(
            json.dumps({name: told.get(name, value) for name, value in entries.items()} | {"fingerprints": prints})
        )

    return edit


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"meta": saying(weights=None)}, "does not say which weights and builds"),
        ({"meta": saying(builds=[5])}, "does not say which weights and builds"),
        ({"meta": saying(sampling=[5])}, "a list in its meta is none"),
        ({"meta": saying(tags={})}, "a list in its meta is none"),
        ({"meta": saying(tags=[{"class": 5}])}, "a tag in its meta is no text"),
        ({"meta": lambda meta: np.array("[" * 100_000)}, "cannot read the shard"),
        ({"meta": newer}, "not of format draftloop-npz 1"),
        ({"meta": lambda meta: np.array("[]")}, "cannot read the shard"),
        ({"meta": lambda meta: np.array("{")}, "cannot read the shard"),
        ({"tokens": lambda tokens: tokens.astype(np.int64)}, "tokens of .* is int64"),
        ({"loss_mask": lambda mask: mask[:-1]}, "do not add up"),
        ({"doc_offsets": lambda offsets: offsets[::-1]}, "do not add up"),
        ({"split": lambda split: np.append(split, split)}, "do not add up"),
        ({"tokens": lambda tokens: np.full_like(tokens, VOCAB)}, "token ids that its tokenizer"),
        ({"tokens": lambda tokens: np.full_like(tokens, -1)}, "token ids that its tokenizer"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, edits: dict[str, Any], said: str) -> None:
    path = changed(exported(tmp_path, row([300])) / "shard-00000.npz", **edits)
    with pytest.raises(TrainingError, match=said):
        build(find_shards([path]), TINY, 40)


@pytest.mark.parametrize("content", [b"", b"text, not an archive", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_shard_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shard.npz"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match="cannot read the shard"):
        build(find_shards([path]), TINY, 40)


def test_a_shard_that_is_spoilt_or_lies_about_its_size_is_refused_in_a_short_line(tmp_path: Path) -> None:
    path = exported(tmp_path, row([300] * 500)) / "shard-00000.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    for made in (np.savez, np.savez_compressed):
        made(path, **arrays)
        whole = path.read_bytes()
        for at in range(0, len(whole), len(whole) // 40):
            path.write_bytes(whole[:at] + bytes(255 - byte for byte in whole[at : at + 40]) + whole[at + 40 :])
            with pytest.raises(TrainingError) as refused:
                build(find_shards([path]), TINY, 40)
            assert len(str(refused.value)) < 600
            assert "\n" not in str(refused.value)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta.npy", npy(arrays["meta"]))
        archive.writestr("tokens.npy", header.getvalue())
    with pytest.raises(TrainingError, match="cannot read the shard"):
        build(find_shards([path]), TINY, 40)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "draftloop-npz", "format_version": 1, "shards": [1]}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(TrainingError, match="cannot read"):
        find_shards([tmp_path])


# What the engine refuses

HEADER = Header(
    tokenizer="b" * 64, train=Coverage(covered=3, tokens=4), held_out=Coverage(covered=0, tokens=0), sources=[]
)


def saved(path: Path, ids: list[int]) -> Path:
    HotVocab(torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), dtype=torch.int64), HEADER).save(path)
    return path


def rewritten(path: Path, header: Any = None, **tensors: Any) -> Path:
    """The file with its header or some tensors replaced; None takes a tensor out."""
    with safe_open(path, framework="pt") as file:
        [(key, text)] = file.metadata().items()
        content = {"d2t": file.get_tensor("d2t"), "counts": file.get_tensor("counts")} | tensors
    new = text if header is None else json.dumps({**json.loads(text), **header})
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path, metadata={key: new})
    return path


def why_not(path: Path, tokenizer: str = "b" * 64, vocab_size: int = 100) -> str:
    with pytest.raises(BackendError) as error:
        HotVocab.load(path, tokenizer, vocab_size)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved(tmp_path / "hot.safetensors", [3, 5, 99])


def test_what_was_saved_is_loaded(file: Path) -> None:
    hot = HotVocab.load(file, "b" * 64, 100)
    assert (ids_of(hot), hot.counts.tolist(), hot.header) == ([3, 5, 99], [1, 1, 1], HEADER)
    assert hot.header.train.share == 0.75
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_missing_file_is_refused_and_says_what_writes_one(tmp_path: Path) -> None:
    assert "training hot-vocab" in why_not(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hot.safetensors"
    path.write_bytes(content)
    assert "cannot read" in why_not(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "cannot read" in why_not(tmp_path)


def test_another_tokenizers_list_is_refused(file: Path) -> None:
    assert "another tokenizer" in why_not(file, tokenizer="c" * 64)


def test_ids_out_of_the_models_vocabulary_are_refused(file: Path) -> None:
    assert "lists id 99" in why_not(file, vocab_size=99)
    assert "lists id -1" in why_not(saved(file, [-1, 5]))


@pytest.mark.parametrize("ids", [[5, 3], [3, 3], [3, 9, 8]])
def test_ids_that_do_not_ascend_are_refused(file: Path, ids: list[int]) -> None:
    assert "ascending" in why_not(saved(file, ids))


def test_an_empty_list_is_refused(file: Path) -> None:
    assert "0 ids" in why_not(saved(file, []))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"d2t": torch.tensor([3, 5, 99])}, "d2t of .* is int64"),
        ({"d2t": torch.tensor([[3, 5, 99]], dtype=torch.int32)}, r"d2t of .* is int32 \[1, 3\]"),
        ({"counts": torch.tensor([1.0, 1.0, 1.0])}, "counts of .* is float32"),
        ({"counts": torch.tensor([1, 1])}, "3 ids and 2 counts"),
        ({"d2t": None}, "no tensor 'd2t'"),
        ({"counts": None}, "no tensor 'counts'"),
    ],
)
def test_wrong_tensors_are_refused(file: Path, tensors: dict[str, Any], said: str) -> None:
    assert re.search(said, why_not(rewritten(file, **tensors)))


@pytest.mark.parametrize("version", [0, 2])
def test_an_unknown_version_is_refused(file: Path, version: int) -> None:
    assert f"has format {version}; this build reads 1" in why_not(rewritten(file, {"format_version": version}))


@pytest.mark.parametrize(
    "header", [{"format_version": "new"}, {"tokenizer": 7}, {"train": {}}, {"train": {"covered": -1, "tokens": 4}}]
)
def test_a_damaged_header_is_refused(file: Path, header: dict[str, Any]) -> None:
    assert "is damaged" in why_not(rewritten(file, header))


def test_a_checkpoint_is_no_hot_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    assert "is not a hot vocabulary" in why_not(path)


def test_a_failed_write_leaves_the_old_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BackendError, match="No space left on device"):
        saved(file, [1, 2])
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_fingerprint_is_of_the_ids_alone(tmp_path: Path) -> None:
    one, same, other = (saved(tmp_path / str(i), ids) for i, ids in enumerate(([1, 2], [1, 2], [1, 3])))
    rewritten(same, counts=torch.tensor([8, 9]))
    found = [HotVocab.load(path, "b" * 64, 100).fingerprint for path in (one, same, other)]
    assert found[0] == found[1] == hashlib.sha256(b"\x01\0\0\0\x02\0\0\0").hexdigest()
    assert found[2] != found[0]


# The cut
