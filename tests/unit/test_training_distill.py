"""Distillation learns, keeps what drafts best, and goes on after a kill to the same bits; misfits are refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.drafters.student import load_student, student_drafter
from backend.models.draft_block import NativeBlock
from backend.models.forms import CausalForm
from backend.models.qwen3_5 import Qwen35
from backend.models.weights import load_model
from backend.text.tokenizer import ChatTokenizer
from tests.checkpoints import BUNDLED
from tests.forced_answers import HELD_OUT, SMALL, answers, lesson_of, write_answers, write_hot
from training.cli import main
from training.distill import DistillOptions, distill, plan
from training.distillation.batches import collate, windows
from training.distillation.native import LearningStudent
from training.distillation.schedule import Moment, Stage
from training.distillation.state import MARKER
from training.distillation.step import Counted, Lesson, Objective
from training.distillation.teacher import Teacher
from training.distillation.world import World
from training.errors import TrainingError
from training.evaluate.walk import walk
from training.repetition import loops


class KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    place = tmp_path_factory.mktemp("distill")
    return DistillOptions(
        data=write_answers(place / "forced"),
        hot_vocab=write_hot(place / "hot.safetensors"),
        out=place / "never",
        preset="sv-slim",
        widths=SMALL,
        steps=6,
        ce_steps=2,
        tokens_per_step=128,
        window=24,
        alpha=0.5,
        alpha_start=1.0,
        noise=0.02,
        visited=0.5,
        lr=2e-3,
        evaluate_every=4,
        save_every=2,
        log_every=1,
        device="cpu",
        seed=3,
    )


def lines(out: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def killed_after(step: int, options: DistillOptions) -> None:
    def report(doing: str, done: int, total: int) -> None:
        if done == step:
            raise KilledError

    with pytest.raises(KilledError):
        distill(options, report)


def test_a_killed_run_goes_on_to_the_bits_of_one_that_was_not(options: DistillOptions, tmp_path: Path) -> None:
    straight = distill(replace(options, out=tmp_path / "straight"))
    halves = replace(options, out=tmp_path / "halves")
    killed_after(5, halves)  # the state is that of step 4
    distill(replace(halves, resume="must"))
    for name in ("model.safetensors", "config.json", "last/model.safetensors"):
        assert (straight / name).read_bytes() == (halves.out / name).read_bytes()
    assert lines(straight) == lines(halves.out)
    assert [line["step"] for line in lines(straight) if "held_out" in line] == [0, 4, 8]
    assert {line["stage"] for line in lines(straight) if "stage" in line} == {"kd", "ce"}


def test_what_is_measured_and_kept_is_the_weights_running_mean(options: DistillOptions, tmp_path: Path) -> None:
    run = replace(options, out=tmp_path / "run", save_every=1, evaluate_every=0, ema=0.3)
    before: dict[str, Tensor] = {}

    def follow(doing: str, done: int, total: int) -> None:
        state = torch.load(run.out / f"state-{done}.pt", weights_only=True)
        decay = min(0.3, (1 + done) / (10 + done))
        for name, mean in before.items():
            torch.testing.assert_close(state["mean"][name], decay * mean + (1 - decay) * state["weights"][name])
        before.update(state["mean"])

    distill(run, follow)
    last = load_file(run.out / "last" / "model.safetensors")
    assert all(torch.equal(last[name], mean.bfloat16()) for name, mean in before.items())


def test_gradients_are_no_longer_than_they_may_be(options: DistillOptions, tmp_path: Path) -> None:
    """Seen where they may be next to nothing: AdamW forgets their length but for its epsilon."""

    def moved(clip: float) -> float:
        run = replace(options, out=tmp_path / f"{clip}", clip=clip, steps=3, ce_steps=0, save_every=1, weight_decay=0)
        states: list[dict[str, Tensor]] = []
        distill(run, lambda doing, done, total: states.append(torch.load(run.out / f"state-{done}.pt")["weights"]))
        return max(float((states[-1][name] - weight).abs().max()) for name, weight in states[0].items())

    assert moved(1e-12) < 1e-2 * moved(1.0)


def test_only_a_whole_state_of_the_same_run_is_continued(options: DistillOptions, tmp_path: Path) -> None:
    run = replace(options, out=tmp_path / "run")
    with pytest.raises(TrainingError, match="nothing to resume"):
        distill(replace(run, resume="must"))
    killed_after(3, run)
    with pytest.raises(TrainingError, match="another run: ce_lr, lr, seed differ"):
        distill(replace(run, lr=1e-3, seed=4))
    other = write_hot(tmp_path / "other.safetensors", 95)
    with pytest.raises(TrainingError, match="d2t"):
        distill(replace(run, hot_vocab=other))
    (state,) = run.out.glob("state-*.pt")
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(TrainingError, match="not whole"):
        distill(run)
    (run.out / MARKER).unlink()  # as a kill leaves it between the state and its marker
    distill(run)


@pytest.mark.parametrize("room", [50_000, 300_000, 500_000])  # torch has errors of its own, by where it ends
def test_a_disk_that_is_full_is_one_line_and_the_last_whole_state_goes_on(
    options: DistillOptions, tmp_path: Path, room: int
) -> None:
    run, limits = replace(options, out=tmp_path / "run"), resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(doing: str, done: int, total: int) -> None:
        if done == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))

    try:
        with pytest.raises(TrainingError, match=rf"^cannot write the state of the run to {run.out}: File too large$"):
            distill(run, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in run.out.iterdir()) == ["log.jsonl", "state-2.pt", "state.json"]
    resumed = distill(replace(run, resume="must"))
    straight = distill(replace(options, out=tmp_path / "straight"))
    assert (straight / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()


def test_learning_raises_the_held_out_walk_and_the_checkpoint_says_what_serving_will_find(
    options: DistillOptions, tmp_path: Path
) -> None:
    out = distill(
        replace(options, out=tmp_path / "s", steps=30, ce_steps=6, noise=0.0, visited=0.0, lr=3e-3, evaluate_every=18)
    )
    walks = [line["held_out"] for line in lines(out) if "held_out" in line]
    losses = [line["loss"] for line in lines(out) if line.get("stage") == "kd"]
    assert walks[-1]["tau"] > walks[0]["tau"]  # type: ignore[index]
    assert all(last < first for first, last in zip(losses[0], losses[-1], strict=True))  # type: ignore[call-overload]
    loaded = load_model(BUNDLED, torch.device("cpu"), torch.float32, with_mtp=True)
    student = load_student(out, loaded.model, loaded.weights, ChatTokenizer.load(BUNDLED).fingerprint)
    held_out = [replace(forced, hidden=forced.hidden.float()) for forced in answers()[1] if forced.document.held_out]
    counts = walk(loaded.model, student_drafter(loaded.model, student), held_out, 4)
    said = student.header.evaluation["student"]
    assert isinstance(said, dict)
    assert said["accepted"] == [sum(one.accepted[slot] for one in counts) for slot in range(4)]
    assert said["steps"] == sum(one.steps for one in counts)
    assert said["tau"] == max(walked["tau"] for walked in walks)  # type: ignore[index]
    assert student.header.training["seed"] == 3


def test_the_native_block_learns_and_is_written_as_a_checkpoint_has_it(options: DistillOptions, tmp_path: Path) -> None:
    out = distill(
        replace(options, out=tmp_path / "mtp", target="mtp", hot_vocab=None, steps=3, ce_steps=0, evaluate_every=0)
    )
    trained = load_file(out / "last" / "mtp.safetensors")  # the best may be the one it began with
    theirs = load_file(BUNDLED / "model.safetensors")
    names = {name for name in theirs if name.startswith("mtp.")}
    assert {name: (t.shape, t.dtype) for name, t in trained.items()} == {
        name: (theirs[name].shape, theirs[name].dtype) for name in names
    }
    changed = [name for name in names if not torch.equal(trained[name], theirs[name])]
    assert "mtp.fc.weight" in changed
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_bytes((BUNDLED / "config.json").read_bytes())
    save_file({**theirs, **trained}, merged / "model.safetensors")
    loaded = load_model(merged, torch.device("cpu"), torch.bfloat16, with_mtp=True)
    assert loaded.weights == load_model(BUNDLED, torch.device("cpu"), torch.bfloat16, with_mtp=False).weights
    assert loaded.model.mtp is not None
    assert torch.equal(loaded.model.mtp.fc.weight, trained["mtp.fc.weight"])


def shares(options: DistillOptions, size: int) -> tuple[list[Counted], list[Tensor]]:
    """What so many processes find of one batch, and the sum of their gradients, one after the other."""
    _, documents = answers()
    model, block, teacher = lesson_parts(options)
    lesson = Lesson(model, block, teacher, Objective(4, 0.8, "ce", 0.0, 4096))
    chosen = [window for i in range(5) for window in windows(i, 6, len(documents[i].document.tokens), 24, 4)]
    totals: list[Tensor] = []

    class Together(World):
        """Sums are those of the whole batch, which a first round adds up."""

        def sum(self, tensors: object) -> None:
            (mine,) = tensors  # type: ignore[misc]
            if len(totals) < size:
                totals.append(mine.clone())
            else:
                mine.copy_(torch.stack(totals).sum(0))

    found: list[Counted] = []
    for _ in range(2):
        found = []
        for _, parameter in block.named():
            parameter.grad = None
        for rank in range(size):
            world = Together(rank, size, torch.device("cpu"))
            batch = collate(world.share(chosen), documents, world.device, torch.float32)  # type: ignore[arg-type]
            found.append(lesson.gradients(batch, Moment("kd", 1.0, 0.5), world))
    return found, [parameter.grad for _, parameter in block.named() if parameter.grad is not None]


def lesson_parts(options: DistillOptions) -> tuple[Qwen35, LearningStudent, Teacher]:
    assert options.hot_vocab is not None
    return lesson_of(options.hot_vocab)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_together_find_what_one_finds_alone(options: DistillOptions, size: int) -> None:
    (alone,), gradients = shares(options, 1)
    together, summed = shares(options, size)
    for one in together:
        np.testing.assert_allclose(one.loss, alone.loss, rtol=1e-6)
        assert (one.rows, one.hits) == (alone.rows, alone.hits)
    for ours, theirs in zip(summed, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_slots_that_no_step_gets_to_and_tokens_that_no_row_has_weigh_nothing(
    options: DistillOptions, tmp_path: Path
) -> None:
    _, documents = answers()
    model, block, teacher = lesson_parts(replace(options, hot_vocab=write_hot(tmp_path / "few.safetensors", 40)))
    batch = collate([windows(i, 6, 26, 512, 4)[0] for i in range(5)], documents, torch.device("cpu"), torch.float32)
    alone = World(0, 1, torch.device("cpu"))

    def counted(visited: float, stage: Stage) -> Counted:
        return Lesson(model, block, teacher, Objective(4, 0.8, "ce", visited, 4096)).gradients(
            batch, Moment(stage, 1.0, 1.0), alone
        )

    everywhere, visited, hard = counted(0.0, "kd"), counted(1.0, "kd"), counted(0.0, "ce")
    assert everywhere.weight == everywhere.rows == visited.rows == [95.0, 90.0, 85.0, 80.0]
    assert visited.weight[0] == visited.rows[0]
    assert 0 < visited.weight[1] <= visited.hits[0] < visited.rows[0]
    assert visited.weight == sorted(visited.weight, reverse=True)
    assert sum(hard.outside) > 0
    assert hard.weight == [rows - outside for rows, outside in zip(hard.rows, hard.outside, strict=True)]


@pytest.mark.slow
def test_two_processes_of_torchrun_train_as_one_does(options: DistillOptions, tmp_path: Path) -> None:
    alone = distill(replace(options, out=tmp_path / "alone"))
    assert options.hot_vocab is not None
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("-m", "training.cli", "distill", str(options.data), "--hot-vocab", str(options.hot_vocab)),
        *("--out", str(tmp_path / "two"), "--preset", "sv-slim", "--steps", "6", "--ce-steps", "2"),
        *("--tokens-per-step", "128", "--window", "24", "--alpha", "0.5", "--alpha-start", "1.0", "--noise", "0.02"),
        *("--visited", "0.5", "--lr", "0.002", "--evaluate-every", "4", "--seed", "3", "--device", "cpu"),
        *(part for name, value in SMALL.items() for part in ("--width", f"{name}={value}")),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            told, _ = launcher.communicate(timeout=240)
        finally:
            launcher.terminate()  # the workers are in sessions of their own: it alone can end them, and does
    assert launcher.returncode == 0, told
    one, two = load_file(alone / "last/model.safetensors"), load_file(tmp_path / "two/last/model.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name].float(), tensor.float(), rtol=1e-2, atol=1e-4)
    ours = [line for line in lines(alone) if line["step"] == 8 and "loss" in line]
    theirs = [line for line in lines(tmp_path / "two") if line["step"] == 8 and "loss" in line]
    np.testing.assert_allclose(ours[0]["loss"], theirs[0]["loss"], rtol=1e-6)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_hundred_steps_are_a_hundred_a_kill_and_a_hundred(options: DistillOptions, tmp_path: Path) -> None:
    long = replace(options, steps=180, ce_steps=20, evaluate_every=50, save_every=50)
    straight = distill(replace(long, out=tmp_path / "straight"))
    killed_after(120, replace(long, out=tmp_path / "halves"))
    resumed = distill(replace(long, out=tmp_path / "halves", resume="must"))
    for name in ("model.safetensors", "config.json", "last/model.safetensors"):
        assert (straight / name).read_bytes() == (resumed / name).read_bytes()


def test_steps_that_are_not_finite_are_skipped_and_counted(options: DistillOptions, tmp_path: Path) -> None:
    _, documents = answers()
    spoilt = documents[5].hidden.clone()
    spoilt[8] = float("nan")
    folder = write_answers(tmp_path / "spoilt", [*documents[:5], replace(documents[5], hidden=spoilt), *documents[6:]])
    out = distill(replace(options, data=folder, out=tmp_path / "out", initialise="slice", evaluate_every=0))
    last = lines(out)[-2]
    assert last["skipped"] in range(1, 8)
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(out / "last/model.safetensors").values())
    everything = [replace(one, hidden=torch.full_like(one.hidden, float("nan"))) for one in documents]
    folder = write_answers(tmp_path / "all", everything)
    with pytest.raises(TrainingError, match="not finite"):
        distill(replace(options, data=folder, out=tmp_path / "nowhere", initialise="slice", steps=30, evaluate_every=0))


def test_a_plan_says_what_it_takes_and_writes_nothing(
    options: DistillOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(replace(options, window=512))
    looping = [loops(forced.document.answer) for forced in answers()[1]]
    assert (found.documents, found.held_out, found.left_out) == (
        11 - sum(looping[3:]),
        3 - sum(looping[:3]),
        sum(looping),
    )
    assert found.anchors == found.documents * 19  # of 20 generated tokens all but the last are bases
    assert found.steps == 8
    assert plan(options).anchors == found.anchors
    monkeypatch.setattr(sys, "argv", ["training", "distill", str(options.data), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "needs a hot vocabulary" in capsys.readouterr().err
    assert not options.out.exists()


def test_a_plan_says_how_much_disk_a_run_takes_at_the_most(options: DistillOptions, tmp_path: Path) -> None:
    run = replace(options, out=tmp_path / "run")
    told = plan(run).disk_bytes
    distill(run)
    (state,) = run.out.glob("state-*.pt")  # there are two while one is written
    weights = [place / "model.safetensors" for place in (run.out, run.out / "last")]
    taken = sum(path.stat().st_size for path in (state, state, *weights))
    assert 0.9 * taken < told < 1.1 * taken


def test_a_place_that_cannot_be_written_is_refused_in_one_line(options: DistillOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TrainingError, match=f"cannot write to {out}: [^\n]+$"):
            distill(replace(options, out=out))
    folder = write_answers(tmp_path / "held", answers()[1][:HELD_OUT])
    with pytest.raises(TrainingError, match=r"no document to learn from.*: [1-3] are held out, [0-2] repeat"):
        distill(replace(options, data=folder, out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": {"d_inner": 1024}}, "wider than the trunk"),
        ({"widths": {"depth": 2}}, "no such student"),
        ({"widths": {"num_attention_heads": 8}}, "no cut of the model's block"),
        ({"steps": 0, "ce_steps": 0}, "at least one step"),
        ({"lr": float("inf")}, "lr is inf, expected a number"),
        ({"ce_lr": float("nan")}, "lr is nan, expected a number"),
        ({"discount": -0.5}, "discount is -0.5, expected a number"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"preset": "sv-fat"}, "sv-fat"),
        ({"widths": {"hot_rows": 5, "hidden_size": 128}}, "hidden_size and hot_rows follow from the model"),
        ({"name": "two words"}, "'two words' cannot be a drafter's name.*: give a --name$"),
        ({"name": "mtp"}, "cannot be named 'mtp'"),
        ({"out": Path("no where")}, "'no where' cannot be a drafter's name"),
        ({"widths": {"d_inner": "many"}}, "no such student: d_inner Input should be a valid integer$"),
        ({"widths": {"num_attention_heads": 0}}, "num_attention_heads Input should be greater than 0$"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    options: DistillOptions, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=message) as refused:
        distill(replace(options, **({"out": tmp_path / "out"} | changes)))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "held"),
    [
        ("mtp", "config.json"),
        ("mtp", "model.safetensors"),
        ("student", "training.json"),
        ("student", "mtp.safetensors"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "must", "never"])
def test_a_directory_of_the_other_target_is_refused_before_anything_is_read(
    options: DistillOptions, tmp_path: Path, target: Any, held: str, resume: Any
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / held).write_text("theirs")
    given = replace(options, target=target, out=tmp_path / "out", resume=resume, model=str(tmp_path / "none"))
    for refusing in (distill, plan):
        with pytest.raises(TrainingError, match=rf"out holds an? [^\n]* already \({held}\): give another --out$"):
            refusing(given)
    assert [(one.name, one.read_text()) for one in (tmp_path / "out").iterdir()] == [(held, "theirs")]


def test_a_teacher_is_the_trunk_and_the_native_chain_weighed_by_what_the_head_can_propose(
    options: DistillOptions,
) -> None:
    model, block, teacher = lesson_parts(options)
    documents = answers()[1]
    batch = collate(windows(0, 6, 26, 512, 4), documents, torch.device("cpu"), torch.float32)
    ids = block.ids.long()
    at = 8
    trunk = batch.hidden[0, at][None]
    whole = model.logits(trunk).softmax(-1)
    assert batch.log_z is not None
    own = teacher.target(trunk, None, None, 1.0)
    torch.testing.assert_close(own, whole[:, ids])  # unrenormalised
    torch.testing.assert_close(teacher.target(trunk, batch.log_z[0, at][None], None, 1.0), own, rtol=2e-2, atol=1e-3)
    chain = teacher.chain(batch, 2)
    native = NativeBlock(model)
    embedded = model.embed(batch.tokens[:, 1:])
    rows = native(embedded, batch.hidden[:, :-1], CausalForm(1, embedded.shape[1], start=1))
    torch.testing.assert_close(chain[0], rows)
    theirs = model.logits(rows[0, 3])[ids].softmax(-1)
    mixed = teacher.target(trunk, None, rows[0, 3][None], 0.25)
    expected = own.sum() * (0.25 * own / own.sum() + 0.75 * theirs)
    torch.testing.assert_close(mixed, expected)
