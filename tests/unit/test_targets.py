"""Precomputed targets: what the serving drafter's own rows say along a document; kept, resumed, refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.drafters.mtp import mtp_drafter
from backend.engine.forms import GRID
from backend.engine.memory import Place
from backend.engine.runner import Runner
from backend.loading import LocalOptions, load
from capture.export_npz import export_npz
from capture.store import Store
from tests.capture_rows import generation, write
from tests.factory import Shape
from tests.factory import build as random_model
from training.data import Document, Forced
from training.errors import TrainingError
from training.extract import ExtractOptions, extract, read_forced
from training.force import force_documents
from training.targets import TargetsOptions, chain_targets, make_targets, read_targets, write_targets

SLOTS = 4
HOT = torch.arange(0, 320, 3)
NOWHERE = TargetsOptions(data=Path(), model="", hot_vocab=Path())


def forced_document(runner: Runner, prompt: int, answer: int, seed: int = 0) -> Forced:
    tokens = np.random.default_rng(seed).integers(0, 320, prompt + answer, dtype=np.int32)
    unknown = np.full(len(tokens), np.nan, dtype=np.float32)
    [forced] = force_documents(runner, [Document("one", tokens, prompt, unknown, held_out=False)])
    return forced


@torch.inference_mode()
def served_logits(runner: Runner, forced: Forced) -> dict[tuple[int, int], Tensor]:
    """By base position and slot: the logits that the serving drafter chooses from, made to draft the document."""
    drafter, document = mtp_drafter(runner.model, "native"), forced.document
    memory, place = runner.new_memory(len(document.tokens) + GRID), Place(document.prompt_length)
    drafter.attach(memory)
    memory.take(place.pages)
    state = drafter.new_state(document.prompt, place.pages)
    for start in range(0, document.prompt_length, GRID):
        chunk = document.prompt[start : start + GRID]
        drafter.prefill(state, *runner.prefill_chunk(memory, place, chunk, start), start, len(chunk))
    tokens = document.tokens.tolist()
    found: dict[tuple[int, int], Tensor] = {}
    for base in range(document.prompt_length, len(tokens) - 1):
        drafter.observe(state, [tokens[base]], forced.hidden[base - 1 : base])
        slots = min(SLOTS, len(tokens) - 1 - base)
        seen: list[Tensor] = []

        def choose(logits: Tensor, base: int = base, seen: list[Tensor] = seen) -> Tensor:
            seen.append(logits[0])
            return torch.tensor([tokens[base + len(seen)]])

        drafter.propose([state], [slots], choose)
        found |= {(base, slot): logits for slot, logits in enumerate(seen)}
    return found


@pytest.mark.parametrize(("prompt", "answer"), [(7, 20), (70, 5), (1, 3), (5, 1)])
def test_targets_are_what_the_serving_drafter_says_along_the_document(prompt: int, answer: int) -> None:
    runner = Runner(random_model(Shape()))
    forced = forced_document(runner, prompt, answer)
    whole = chain_targets(runner, forced, HOT, replace(NOWHERE, top=None))
    top = chain_targets(runner, forced, HOT, replace(NOWHERE, top=8))
    served = served_logits(runner, forced)
    assert whole.log_z.shape == (max(answer - 1, 0), SLOTS)
    for row, slot in np.ndindex(*whole.log_z.shape):
        logits = served.get((prompt + row, slot))
        if logits is None:
            assert whole.logprobs[row, slot].isnan().all()
            assert all(one[row, slot].isnan() for one in (whole.log_z, whole.log_z_hot, whole.tail, top.tail))
            continue
        expected = logits[HOT].log_softmax(-1)
        torch.testing.assert_close(whole.logprobs[row, slot], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole.log_z[row, slot], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole.log_z_hot[row, slot], logits[HOT].logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert whole.tail[row, slot] == pytest.approx(0, abs=1e-5)
        assert top.indices is not None
        kept, places = whole.logprobs[row, slot].topk(8)
        assert torch.equal(top.logprobs[row, slot], kept)
        assert torch.equal(top.indices[row, slot], places)
        assert float(top.tail[row, slot]) == pytest.approx(1 - float(kept.exp().sum()), abs=1e-5)


def test_a_document_cut_into_windows_has_every_row_a_whole_one_has() -> None:
    runner = Runner(random_model(Shape()))
    forced = forced_document(runner, 10, 90)
    whole = chain_targets(runner, forced, HOT, NOWHERE)
    cut = chain_targets(runner, forced, HOT, replace(NOWHERE, window=40))
    assert torch.equal(whole.log_z.isnan(), cut.log_z.isnan())
    assert not cut.log_z[: -SLOTS + 1].isnan().any()
    torch.testing.assert_close(cut.log_z[:20], whole.log_z[:20])  # its first window begins where the document does


# On disk


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of forced documents of the bundled model, and a hot vocabulary."""
    place = tmp_path_factory.mktemp("targets")
    loaded = load(LocalOptions(drafter="none", max_num_seqs=1, max_model_len=64, prefix_cache=False, threads=1))
    prints = loaded.fingerprints
    rows = [
        generation(
            weights_fingerprint=prints.weights,
            tokenizer_fingerprint=prints.tokenizer,
            prompt_tokens=list(range(100, 100 + 3 * i)),
            completion_tokens=list(range(200, 200 + 9 * i)),
            logprobs=None,
        )
        for i in range(1, 4)
    ]
    with Store.open(write(place / "capture.db", *rows)) as store:
        export_npz(store, place / "export")
    extract(ExtractOptions((place / "export",), "tiny", place / "forced", threads=1, shard_bytes=60_000))
    none = Coverage(covered=0, tokens=0)
    header = Header(tokenizer=prints.tokenizer, train=none, held_out=none, sources=[])
    HotVocab(HOT.int(), torch.ones(len(HOT), dtype=torch.int64), header).save(place / "hot.safetensors")
    return place / "forced", place / "hot.safetensors"


_load = cache(load)


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes longer than what most of these tests are about."""
    monkeypatch.setattr("training.targets.load", _load)


@pytest.fixture
def asked(extracted: tuple[Path, Path], tmp_path: Path) -> TargetsOptions:
    """Targets of the extraction, in a folder of this test's own."""
    folder = tmp_path / "forced"
    folder.mkdir()
    for file in extracted[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return TargetsOptions(folder, "tiny", extracted[1], top=16, shard_bytes=20_000, threads=1)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "targets" in path.name or ".tt." in path.name}


def test_targets_read_back_in_the_order_of_their_documents(asked: TargetsOptions) -> None:
    before = {path.name: path.read_bytes() for path in asked.data.iterdir()}
    assert make_targets(asked) == asked.data / "targets.json"
    runner = _load(
        LocalOptions(dtype="bfloat16", threads=1, max_num_seqs=1, max_model_len=1, prefix_cache=False)
    ).runner
    documents = list(read_forced(asked.data))
    for forced, found in zip(documents, read_targets(asked.data), strict=True):
        made = chain_targets(runner, forced, HOT, asked)
        assert (found.id, found.held_out) == (forced.document.id, forced.document.held_out)
        assert found.indices is not None
        assert made.indices is not None
        assert torch.equal(found.indices, made.indices)
        torch.testing.assert_close(found.logprobs, made.logprobs.half().float(), rtol=0, atol=0, equal_nan=True)
        for name in ("log_z", "log_z_hot", "tail"):
            torch.testing.assert_close(getattr(found, name), getattr(made, name), rtol=0, atol=0, equal_nan=True)
    assert {name: data for name, data in before.items() if (asked.data / name).read_bytes() == data} == before
    split = [[one.id for one in read_targets(asked.data, side)] for side in (True, False)]
    assert sorted(split[0] + split[1]) == sorted(one.document.id for one in documents)


class Killed(BaseException):
    """The process ends here."""


def test_a_killed_run_goes_on_to_the_same_files(asked: TargetsOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    make_targets(asked)
    straight = written(asked.data)
    assert len(straight) > 3
    for name in straight:
        (asked.data / name).unlink()
    count = 0

    def write_or_die(*arguments: Any) -> None:
        nonlocal count
        write_targets(*arguments)
        count += 1
        if count == 2:
            raise Killed

    monkeypatch.setattr("training.targets.write_targets", write_or_die)
    with pytest.raises(Killed):
        make_targets(asked)
    with pytest.raises(TrainingError, match="has no complete targets"):
        list(read_targets(asked.data))
    make_targets(asked)
    assert count == len(straight)  # without the manifest, and one file twice
    assert written(asked.data) == straight


def test_all_of_the_hot_vocabulary_is_kept_where_asked(asked: TargetsOptions) -> None:
    make_targets(replace(asked, top=None))
    assert all(one.logprobs.shape[2] == len(HOT) and one.indices is None for one in read_targets(asked.data))


def test_other_options_another_list_and_too_much_are_refused(asked: TargetsOptions, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"targets of \d+ rows take .* --max-gb allows 1e-06 GB"):
        make_targets(replace(asked, max_gb=1e-6))
    make_targets(asked)
    with pytest.raises(TrainingError, match="of another top"):
        make_targets(replace(asked, top=8))
    with pytest.raises(TrainingError, match="no complete extraction"):
        make_targets(replace(asked, data=tmp_path))


def test_targets_of_shards_that_changed_are_refused(asked: TargetsOptions) -> None:
    make_targets(asked)
    path = asked.data / "manifest.json"
    path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0'))
    with pytest.raises(TrainingError, match="is of other shards"):
        list(read_targets(asked.data))


def test_a_damaged_file_is_refused(asked: TargetsOptions) -> None:
    make_targets(asked)
    next(asked.data.glob("*.tt.npz")).write_bytes(b"damaged")
    with pytest.raises(TrainingError, match="is not the file that"):
        list(read_targets(asked.data))


def test_an_extraction_for_another_list_is_refused(asked: TargetsOptions) -> None:
    path = asked.data / "manifest.json"
    path.write_text(path.read_text().replace('"d2t_sha256": null', f'"d2t_sha256": "{"a" * 64}"'))
    with pytest.raises(TrainingError, match="another hot vocabulary"):
        make_targets(asked)


def test_targets_that_were_never_made_are_told_of(asked: TargetsOptions) -> None:
    with pytest.raises(TrainingError, match="has no complete targets"):
        list(read_targets(asked.data))


def test_no_more_ids_are_kept_than_there_are() -> None:
    runner = Runner(random_model(Shape()))
    made = chain_targets(runner, forced_document(runner, 4, 3), HOT, replace(NOWHERE, top=1000))
    assert made.logprobs.shape == (2, SLOTS, len(HOT))
