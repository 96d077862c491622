"""Precomputed targets stand in for the native head's chain: the same losses, its block not run, misfits refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from backend.loading import load
from tests.forced_answers import PROMPT, SMALL, answers, lesson_of, write_answers, write_hot
from training.distill import DistillOptions, distill, plan
from training.distillation.batches import Batch, collate, drawn_noise, windows
from training.distillation.schedule import Moment
from training.distillation.step import Lesson, Objective
from training.distillation.teacher import Teacher
from training.distillation.world import World
from training.errors import TrainingError
from training.forced import read_forced
from training.target_files import targets_of
from training.targets import TargetsOptions, make_targets, read_targets

CPU = torch.device("cpu")
_load = cache(load)


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.targets.load", _load)


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hot(tmp_path_factory.mktemp("hot") / "hot.safetensors", 512)


def losses(hot: Path, batch: Batch, alpha: float) -> tuple[Tensor, Tensor]:
    """By slot, and the gradients in one row."""
    model, block, teacher = lesson_of(hot)
    for _, parameter in block.named():
        parameter.grad = None
    lesson = Lesson(model, block, teacher, Objective(4, 0.8, "ce", 0.0, 64))
    counted = lesson.gradients(batch, Moment("kd", 1.0, alpha), World(0, 1, CPU))
    gradients = [parameter.grad.flatten() for _, parameter in block.named() if parameter.grad is not None]
    return torch.tensor(counted.mean), torch.cat(gradients)


def batches(folder: Path, hot: Path, top: int | None) -> tuple[Batch, Batch]:
    """The same windows, to have their chain computed, and with what was computed beforehand."""
    make_targets(TargetsOptions(folder, "tiny", hot, top=top, threads=1))
    documents = list(read_forced(folder, held_out=False))
    chosen = [window for i in range(6) for window in windows(i, PROMPT, 26, 512, 4)]
    stored = targets_of(folder, documents, {}, 4)
    return tuple(collate(chosen, documents, CPU, torch.float32, some) for some in (None, stored))  # type: ignore[return-value]


def test_all_of_the_chains_probabilities_give_the_losses_of_the_chain(tmp_path: Path, hot: Path) -> None:
    precise = [replace(forced, hidden=forced.hidden.float()) for forced in answers()[1]]
    ours, theirs = (losses(hot, batch, 0.1) for batch in batches(write_answers(tmp_path / "f", precise), hot, top=None))
    torch.testing.assert_close(theirs[0], ours[0], rtol=0, atol=1e-3)
    assert float(torch.cosine_similarity(ours[1], theirs[1], dim=0)) > 0.99999


def test_the_likeliest_and_a_tail_give_losses_a_little_lower_and_the_same_direction(tmp_path: Path, hot: Path) -> None:
    found = {}
    for top in (16, 64):
        computed, kept = batches(write_answers(tmp_path / str(top)), hot, top)
        (ours, direction), (theirs, other) = losses(hot, computed, 0.0), losses(hot, kept, 0.0)
        found[top] = ((theirs - ours) / ours, float(torch.cosine_similarity(direction, other, dim=0)))
    # What is merged is never harder to say; on tiny's flat chain over 512 ids, 64 of them leave out 1 %.
    assert all(bool((less < 1e-3).all()) for less, _ in found.values())
    assert float(found[64][0].min()) > -0.02
    assert float(found[16][0].min()) > -0.08
    assert found[64][1] > 0.9999
    assert found[16][1] > 0.999


def test_noise_is_for_the_student_alone(tmp_path: Path, hot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is taught is what it would be taught without: the trunk's rows and the native head's chain."""
    documents = list(read_forced(write_answers(tmp_path / "forced"), held_out=False))
    chosen = [window for i in range(4) for window in windows(i, PROMPT, 26, 512, 4)]
    clean = collate(chosen, documents, CPU, torch.float32)
    noisy = replace(clean, noise=drawn_noise(clean, 0.5, range(len(chosen))))
    taught: list[list[Tensor]] = []
    original = Teacher.target

    def listening(self: Teacher, trunk: Tensor, log_z: Tensor | None, native: Tensor | None, alpha: float) -> Tensor:
        wanted = original(self, trunk, log_z, native, alpha)
        taught[-1].append(wanted)
        return wanted

    monkeypatch.setattr(Teacher, "target", listening)
    found = []
    for batch in (clean, noisy):
        taught.append([])
        found.append(losses(hot, batch, 0.5)[0])
    assert all(map(torch.equal, *taught))
    assert len(taught[0]) >= 4
    assert bool((found[0] != found[1]).all())


def test_every_anchor_of_a_cut_document_has_its_own_row(tmp_path: Path, hot: Path) -> None:
    folder = write_answers(tmp_path / "forced")
    make_targets(TargetsOptions(folder, "tiny", hot, top=8, threads=1))
    documents = list(read_forced(folder))
    whole = list(read_targets(folder))
    chosen = [windows(5, PROMPT, 26, 16, 4)[1], windows(2, PROMPT, 26, 16, 4)[0]]
    batch = collate(chosen, documents, CPU, torch.float32, targets_of(folder, documents, {}, 4))
    assert batch.chain is not None
    assert batch.chain.indices is not None
    for slot in range(4):
        valid = batch.supervised(slot)
        chain = batch.chain.at(slot, valid[batch.anchors])
        assert chain.indices is not None
        for i, (row, column) in enumerate(valid.nonzero().tolist()):
            window = chosen[row]
            theirs, base = whole[window.document], window.start + column + 1 - PROMPT
            assert torch.equal(chain.logprobs[i].float(), theirs.logprobs[base, slot])
            assert theirs.indices is not None
            assert torch.equal(chain.indices[i], theirs.indices[base, slot])
            assert chain.tail[i] == theirs.tail[base, slot]


# Whole runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    """A run over targets that are there."""
    place = tmp_path_factory.mktemp("run")
    given = DistillOptions(
        data=write_answers(place / "forced"),
        hot_vocab=write_hot(place / "hot.safetensors"),
        out=place / "never",
        preset="sv-slim",
        widths=SMALL,
        steps=4,
        ce_steps=1,
        tokens_per_step=128,
        alpha=0.25,
        lr=2e-3,
        evaluate_every=0,
        save_every=2,
        log_every=1,
        device="cpu",
        targets=True,
    )
    assert given.hot_vocab is not None
    make_targets(TargetsOptions(given.data, "tiny", given.hot_vocab, top=64, threads=1))
    return given


def losses_of(out: Path) -> list[list[float]]:
    told = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in told if "loss" in line]


def test_a_run_over_targets_learns_what_it_would_and_runs_no_native_chain(
    made: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = distill(replace(made, out=tmp_path / "computed", targets=False))
    with monkeypatch.context() as patched:
        patched.delattr(Teacher, "chain")
        kept = distill(replace(made, out=tmp_path / "kept"))
    torch.testing.assert_close(torch.tensor(losses_of(kept)), torch.tensor(losses_of(computed)), rtol=2e-2, atol=2e-2)
    one, other = (load_file(out / "last" / "model.safetensors") for out in (computed, kept))
    assert all(torch.allclose(one[name].float(), other[name].float(), atol=2e-2) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_over_the_targets_that_it_began_with_alone(made: DistillOptions, tmp_path: Path) -> None:
    run = replace(made, out=tmp_path / "run")
    distill(run)
    with pytest.raises(TrainingError, match="another run: targets differ"):
        distill(replace(run, targets=False))
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in made.data.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    distill(replace(run, data=moved))  # the same, elsewhere
    (moved / "targets.json").write_text((moved / "targets.json").read_text() + "\n")
    with pytest.raises(TrainingError, match="another run: targets differ"):
        distill(replace(run, data=moved))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 1.0}, "no share in the teacher at alpha 1"),
        ({"target": "mtp"}, "the native block learns over all ids"),
        ({"slots": 5}, "have 4 slots, 5 are asked for"),
    ],
)
def test_targets_of_no_use_are_refused(made: DistillOptions, changes: dict[str, object], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        plan(replace(made, **changes))  # type: ignore[arg-type]


def test_targets_may_have_a_share_at_the_start_alone(made: DistillOptions) -> None:
    assert plan(replace(made, alpha=1.0, alpha_start=0.5)).steps == 5


def test_targets_of_anything_else_or_damaged_are_refused(made: DistillOptions, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="of another d2t_sha256"):
        plan(replace(made, hot_vocab=write_hot(tmp_path / "other.safetensors", 95)))
    folder = tmp_path / "forced"
    folder.mkdir()
    for file in made.data.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest, told = folder / "targets.json", (folder / "targets.json").read_text()

    def refused(message: str) -> None:
        with pytest.raises(TrainingError, match=message):
            plan(replace(made, data=folder))

    manifest.write_text(told.replace('"drafter": "', '"drafter": "0'))
    refused("of another drafter")
    manifest.write_text(told.replace('"weights": "', '"weights": "0'))
    refused("of another weights")
    sources = json.loads(told)
    manifest.write_text(json.dumps({**sources, "sources": ["another"]}))
    refused("of other shards")
    manifest.write_text(json.dumps({**sources, "shards": []}))
    refused("not the rows of document")
    manifest.write_text("{")
    refused("cannot read")
    manifest.write_text(told)
    next(folder.glob("*.tt.npz")).write_bytes(b"damaged")
    refused("is not the file that")
    manifest.unlink()
    refused("no complete targets")
