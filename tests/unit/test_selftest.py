"""`serve --selftest` from outside: what it prints and returns on sound checkpoints, and on what it is there to find."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import backend.selftest as selftest
from backend.drafters.protocol import Proposal
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.cache import DeltaNetSlots
from backend.engine.forms import GRID
from backend.interface import BackendError, Step
from backend.loading import Loaded, LocalOptions, load
from backend.ops.delta_replay import Records
from backend.selftest import (
    PROMPTS,
    SLOTS,
    Answer,
    Decoding,
    Findings,
    decoding_failures,
    measure,
    remarks,
    run,
    standard_errors,
)
from tests import checkpoints

TOKENS = 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(directory: Path, **more: Any) -> LocalOptions:
    return LocalOptions(model=str(directory), device="cpu", **more)


def told(given: LocalOptions) -> tuple[int, str]:
    """The exit code and what was printed."""
    out = io.StringIO()
    code = run(given, Console(file=out, width=100), TOKENS)
    return code, out.getvalue()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    torch.set_num_threads(1)
    return load(options(checkpoints.random_endless().directory))


@pytest.fixture(scope="module")
def findings(loaded: Loaded) -> Findings:
    return measure(loaded, Console(file=io.StringIO()), 2 * TOKENS)


def test_a_sound_checkpoint_passes_and_every_figure_is_shown() -> None:
    code, text = told(options(checkpoints.random_small().directory))
    assert code == 0, text
    assert text.rstrip().endswith("PASS")
    for part in (
        "K = 0",
        "K = 3, mtp ",
        "K = 3, mtp pre-norm",
        "K = 3, known answers",
        "K = 3, 16 at once",
        "16/16",
        "surv_2",
        "tok/s",
    ):
        assert part in text
    assert "attention rows: bitwise equal, verify blocks: bitwise equal" in text
    assert "France" in text


def test_a_checkpoint_without_mtp_is_checked_without_it_and_says_so() -> None:
    code, text = told(options(checkpoints.without_mtp(checkpoints.random_small()).directory))
    assert code == 0, text
    assert "Checked without a drafter: the checkpoint ships no mtp.* tensors" in text
    assert "K = 3, known answers" in text
    assert "pre-norm" not in text


def test_no_drafter_asked_for_is_no_drafter_checked() -> None:
    code, text = told(options(checkpoints.random_small().directory, drafter="none"))
    assert code == 0
    assert "No MTP head was checked." in text


def test_a_checkpoint_that_cannot_be_read_is_the_loaders_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError):
        run(options(tmp_path), Console(file=io.StringIO()), TOKENS)


def test_logits_that_are_not_numbers_fail_in_one_line(tmp_path: Path) -> None:
    for file in checkpoints.without_mtp(checkpoints.random_small()).directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    code, text = told(options(tmp_path, drafter="none"))
    assert code == 1
    assert "FAIL the model produced logits that are not finite" in text


def test_answers_that_depend_on_the_draft_length_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that lose precision between one step and the next: a mutant of the law tests."""
    records = DeltaNetSlots.records

    def lossy(self: DeltaNetSlots, layer: int, batch: int) -> Records:
        found = records(self, layer, batch)
        found.u.copy_(found.u.bfloat16())
        return found

    monkeypatch.setattr(DeltaNetSlots, "records", lossy)
    code, text = told(options(checkpoints.random_endless().directory, dtype="float32"))
    assert code == 1
    assert "verify blocks are not bitwise equal" in text
    assert "K = 3, known answers: " in text
    assert "answers differ from K = 0" in text


def test_answers_that_depend_on_company_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sequence's records run into the first one's."""
    records = DeltaNetSlots.records

    def leaking(self: DeltaNetSlots, layer: int, batch: int) -> Records:
        found = records(self, layer, batch)
        if batch > 1:
            found.u[0] += 0.01 * found.u[1]
        return found

    monkeypatch.setattr(DeltaNetSlots, "records", leaking)
    code, text = told(options(checkpoints.random_endless().directory, dtype="float32"))
    assert code == 1
    (failure,) = [line for line in text.splitlines() if "FAIL" in line]
    assert failure.startswith("FAIL K = 3, 16 at once: ")


def test_known_answers_try_every_number_of_accepted_drafts(findings: Findings) -> None:
    assert {step.accepted for step in findings.rehearsed.steps} == set(range(SLOTS + 1))


def test_half_of_the_answers_are_greedy_and_half_are_not(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = selftest.SamplingParams

    def noting(**given: Any) -> Any:
        seen.append(given["temperature"])
        return real(**given)

    monkeypatch.setattr(selftest, "SamplingParams", noting)
    measure(replace(loaded, default=None), Console(file=io.StringIO()), 2)
    assert seen == [0.0, 1.0] * (len(PROMPTS) // 2) * 3


def test_the_pre_norm_drafter_gets_what_enters_the_final_norm(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put through the final norm, all it was fed is what the MTP drafter was fed in its place."""
    mtp = loaded.default
    assert isinstance(mtp, RecursiveDrafter)
    observe, run_rows = mtp.observe, mtp._run
    fed: list[torch.Tensor] = []

    def noting_observe(state: Any, tokens: Any, hidden: torch.Tensor) -> None:
        fed.append(hidden)
        observe(state, tokens, hidden)

    def noting_run(states: Any, tokens: Any, hidden: torch.Tensor, starts: Any, counts: Any) -> torch.Tensor:
        fed.append(hidden[0, : counts[0]])
        return run_rows(states, tokens, hidden, starts, counts)

    monkeypatch.setattr(mtp, "observe", noting_observe)
    monkeypatch.setattr(mtp, "_run", noting_run)
    # Drafts that do not come from the hidden states, so that both see the same steps.
    monkeypatch.setattr(
        mtp, "propose", lambda states, counts, choose: Proposal(torch.ones(1, counts[0], dtype=torch.int64), counts)
    )
    monkeypatch.setattr(selftest, "PROMPTS", ("Hi", 20 * "A prompt of more than one chunk. "))
    measure(loaded, Console(file=io.StringIO()), 4)
    norm = loaded.runner.model.model.norm
    assert max(map(len, fed)) == GRID
    with torch.inference_mode():
        for post, pre in zip(fed[: len(fed) // 2], fed[len(fed) // 2 :], strict=True):
            assert not torch.equal(post, pre)
            assert torch.allclose(norm(pre).float(), post.float(), atol=1e-2, rtol=1e-2)


# -- what the acceptance figures are taken to say -------------------------------------------------------------------


def decoding(name: str, accepted: int, proposed: int, tokens: tuple[int, ...] = (1, 2)) -> Decoding:
    steps = (Step(1, 1),) * accepted + (Step(1, 0),) * (proposed - accepted)
    return Decoding(name, (Answer(tokens, (0.0,) * len(tokens), "", steps),), timed=1, seconds=1.0)


def found(post: int, pre: int, of: int = 300) -> Findings:
    return Findings(
        plain=decoding("K = 0", 0, 0),
        post_norm=decoding("post", post, of),
        pre_norm=decoding("pre", pre, of),
        rehearsed=decoding("known", 200, of),
        together=decoding("at once", 200, of),
    )


def test_far_more_acceptance_with_pre_norm_is_a_failure_to_report() -> None:
    (failure,) = decoding_failures(found(post=100, pre=200))
    assert "pre-norm accepts more" in failure
    assert "66.7 % (200/300)" in failure
    assert "please report" in failure


def test_far_more_acceptance_with_post_norm_confirms_it() -> None:
    outcome = found(post=220, pre=100)
    assert decoding_failures(outcome) == []
    assert remarks(outcome) == ["Post-norm is right: slot 0 accepts 73.3 % (220/300), with pre-norm 33.3 % (100/300)."]


def test_a_difference_that_chance_explains_says_nothing() -> None:
    for post, pre in ((200, 205), (205, 200), (0, 0), (300, 300)):
        outcome = found(post, pre)
        assert decoding_failures(outcome) == []
        assert "cannot be told apart" in remarks(outcome)[0]


def test_acceptance_no_trained_head_has_is_remarked_upon() -> None:
    assert any("unless this one is untrained" in line for line in remarks(found(post=30, pre=20)))
    assert not any("untrained" in line for line in remarks(found(post=200, pre=20)))


def test_an_answer_with_other_tokens_is_named_with_its_decoding() -> None:
    outcome = replace(found(220, 100), rehearsed=decoding("known", 200, 300, tokens=(1, 3)))
    assert decoding_failures(outcome) == ["known: 1 of 1 answers differ from K = 0"]


def test_figures_are_those_of_the_design() -> None:
    steps = (Step(3, 3), Step(3, 1), Step(3, 0), Step(1, 1), Step(0, 0))
    answer = Answer(tuple(range(11)), (0.0,) * 11, "", steps)
    figures = Decoding("x", (answer,), timed=10, seconds=2.0)
    assert figures.slots() == [(3, 4), (1, 3), (1, 3)]
    assert figures.acceptance_length == pytest.approx(1 + 5 / 5)
    assert figures.tokens_per_second == pytest.approx(5.0)


def test_standard_errors_are_those_of_two_shares() -> None:
    assert standard_errors((60, 100), (40, 100)) == pytest.approx(0.2 / (0.5 * 0.02**0.5))
    assert standard_errors((40, 100), (60, 100)) == -standard_errors((60, 100), (40, 100))
    assert standard_errors((0, 0), (1, 1)) == 0.0
