"""Stage A on a toy: the loss falls, a run resumes bit by bit, the schedule and the optimizer do what they say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.models.config import ModelConfig
from tests.factory import Shape
from training.errors import TrainingError
from training.pretraining.corpus import Rows
from training.pretraining.optimizer import Optimizer, Plan
from training.pretraining.pretrain import Run, Settings, evaluate, losses, pretrain

SHAPE = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), head_dim=16, linear_dim=8)
SETTINGS = Settings(rows_per_step=4, rows_per_pass=2, chunk=16, warmup=3, matrix_lr=1e-2, other_lr=1e-2)


def toy_rows(count: int, seed: int = 0) -> Rows:
    """Rows that count upwards from a random start: easy to learn."""
    rng = random.Random(seed)
    starts = [rng.randrange(64) for _ in range(count)]
    tokens = np.array([[(start + i) % 64 for i in range(24)] for start in starts], np.uint16)
    weights = np.ones_like(tokens, np.float32)
    weights[:, :4] = 0.25
    weights[:, 0] = 0.0
    return Rows(tokens, weights)


def toy_run(steps: int = 10, seed: int = 0, settings: Settings = SETTINGS) -> Run:
    rows = toy_rows(steps * settings.rows_per_step, seed)
    return Run(ModelConfig.from_dict(SHAPE.config()), rows, Plan(steps, settings.warmup, steps // 3), settings)


def same_weights(a: Run, b: Run) -> bool:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_the_losses_of_trunk_and_mtp_fall() -> None:
    run = toy_run(steps=60)
    first = run.advance()
    while not run.done:
        last = run.advance()
    assert last.trunk < 0.5 * first.trunk
    assert last.mtp < 0.5 * first.mtp
    assert evaluate(run.model, toy_rows(6, seed=9), chunk=16).trunk < 0.5 * first.trunk


def test_stopping_and_resuming_changes_no_bit(tmp_path: Path) -> None:
    straight = toy_run()
    for _ in range(10):
        straight.advance()
    broken = toy_run()
    for _ in range(5):
        broken.advance()
    assert not same_weights(straight, broken)
    broken.save(tmp_path / "run.pt")
    resumed = toy_run()
    resumed.resume(tmp_path / "run.pt")
    for _ in range(5):
        resumed.advance()
    assert resumed.done
    assert same_weights(straight, resumed)


def test_accumulating_over_passes_is_the_same_step() -> None:
    at_once, in_parts = toy_run(settings=replace(SETTINGS, rows_per_pass=4)), toy_run()
    a, b = at_once.advance(), in_parts.advance()
    assert a.trunk == pytest.approx(b.trunk, rel=1e-5)
    assert a.mtp == pytest.approx(b.mtp, rel=1e-5)


def test_a_checkpoint_of_another_corpus_or_of_other_settings_is_refused(tmp_path: Path) -> None:
    toy_run().save(tmp_path / "run.pt")
    with pytest.raises(TrainingError, match="another corpus"):
        toy_run(seed=1).resume(tmp_path / "run.pt")
    with pytest.raises(TrainingError, match="another settings"):
        toy_run(settings=replace(SETTINGS, clip=2.0)).resume(tmp_path / "run.pt")


def test_a_plan_longer_than_its_text_is_refused() -> None:
    with pytest.raises(TrainingError, match="need 400 rows"):
        Run(ModelConfig.from_dict(SHAPE.config()), toy_rows(4), Plan(100, 3, 30), SETTINGS)


def test_a_token_without_weight_is_no_target_but_still_context() -> None:
    model = toy_run().model
    tokens = torch.from_numpy(toy_rows(2).tokens.astype("int64"))
    weights = torch.zeros(2, 24)
    weights[:, 10] = 1.0
    model.requires_grad_(False)
    trunk, mtp, per_target = losses(model, tokens, weights, 16)
    assert float(trunk) == pytest.approx(float(per_target[:, 9].sum()))
    changed = tokens.clone()
    changed[:, 11:] = 5  # later than the only target
    assert float(losses(model, changed, weights, 16)[1]) == pytest.approx(float(mtp), rel=1e-5)
    changed[:, 9] = 5  # the token just before it
    assert float(losses(model, changed, weights, 16)[1]) != pytest.approx(float(mtp), rel=1e-5)


def test_a_finished_run_leaves_its_curve_and_a_checkpoint(tmp_path: Path) -> None:
    run = toy_run(steps=6)
    heard: list[int] = []
    pretrain(run, toy_rows(4, seed=9), tmp_path, minutes=None, report=lambda p: heard.append(p.step), evaluate_every=3)
    lines = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert heard == [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "held_out" in line] == [3, 6]
    resumed = toy_run(steps=6)
    resumed.resume(tmp_path / "stage_a.pt")
    assert resumed.done


def test_the_plan_shrinks_when_the_time_does_not_suffice(tmp_path: Path) -> None:
    run = toy_run(steps=600)
    pretrain(run, toy_rows(4), tmp_path, minutes=0.01, report=lambda p: None, checkpoint_seconds=0.2)
    assert run.done
    assert run.step < 600


@given(st.integers(2, 500), st.integers(1, 50), st.integers(1, 200))
def test_the_rate_warms_up_stays_and_decays_to_nearly_nothing(steps: int, warmup: int, decay: int) -> None:
    plan = Plan(steps, warmup, decay)
    rates = [plan.factor(i) for i in range(steps)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    assert rates[-1] <= 1 / decay
    assert plan.factor(steps) == 0.0
    stable = range(warmup, steps - decay)
    assert all(rates[i] == 1.0 for i in stable)


@given(st.integers(0, 99), st.integers(1, 300))
def test_a_plan_is_only_changed_before_it_decays(step: int, wanted: int) -> None:
    plan = Plan(100, 5, 30)
    changed = plan.replanned(step, wanted, 0.3)
    if step >= 70:
        assert changed == plan
    else:
        assert changed.steps >= step + changed.decay
        assert changed.factor(step) == plan.factor(step)


def test_muon_moves_a_matrix_by_a_nearly_orthogonal_step() -> None:
    torch.manual_seed(0)
    matrix, before = torch.nn.Parameter(torch.randn(48, 32)), None
    optimizer = Optimizer([("mlp.weight", matrix), ("norm.weight", torch.nn.Parameter(torch.ones(3)))], 0.1, 0.1)
    before = matrix.detach().clone()
    # A gradient with singular values from 1 down to 0.01.
    u, _, v = torch.linalg.svd(torch.randn(48, 32), full_matrices=False)
    matrix.grad = u @ torch.diag(torch.logspace(0, -2, 32)) @ v
    optimizer.step(1.0)
    moved = before * (1 - 0.1 * 0.05) - matrix.detach()
    singular = torch.linalg.svdvals(moved) / (0.1 * 0.2 * 48**0.5)
    assert singular.min() > 0.3
    assert singular.max() < 1.3
    # In the gradient's own directions, whatever their size was.
    assert torch.diag(u.T @ moved @ v.T).min() > 0


def test_embeddings_vectors_and_the_convolution_are_left_to_adam() -> None:
    run = toy_run()
    muon, adam = run._optimizer.state()
    counts = [len(part["param_groups"][0]["params"]) for part in (muon, adam)]
    parameters = dict(run.model.named_parameters())
    left = [n for n, p in parameters.items() if p.dim() != 2 or "embed" in n or "in_proj_a" in n or "in_proj_b" in n]
    assert counts == [len(parameters) - len(left), len(left)]
