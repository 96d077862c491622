"""The MTP drafter against transformers' MtpModel, slot by slot, through prefill, verify, rejection and recursion.

Every classic mistake (pre-norm hidden state, position off by one, swapped halves, a stale row) must be seen here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.drafters.mtp import MTPDrafter, MTPState
from backend.engine.cache import SequenceCache
from backend.engine.forms import GRID, AttentionForm
from backend.engine.runner import Runner
from backend.models.weights import load_model
from tests import factory, reference
from tests.factory import Shape

SHAPE = Shape(seed=7, vocab=200, std=0.12)
TOLERANCE = 1e-4


class Oracle:
    def __init__(self, directory: Path) -> None:
        self.main, self.block = reference.mtp(directory)

    def slots(self, tokens: list[int], drafts: list[int]) -> Tensor:
        return reference.draft_logits(self.main, self.block, tokens, drafts)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.save(factory.build(SHAPE), SHAPE, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture
def runner(directory: Path) -> Runner:
    return Runner(load_model(directory, torch.device("cpu"), torch.float32, with_mtp=True).model)


class Walk:
    """A sequence driven by hand: `committed` tokens, the drafter's state, and the logits it saw per slot."""

    def __init__(self, runner: Runner, drafter: MTPDrafter, prompt: list[int]) -> None:
        self.runner, self.drafter, self.tokens = runner, drafter, list(prompt)
        self.cache: SequenceCache = runner.new_cache()
        self.state: MTPState = drafter.new_state()
        for start in range(0, len(prompt), GRID):
            chunk = prompt[start : start + GRID]
            ids, hidden = runner.prefill_chunk(self.cache, chunk, start)
            drafter.prefill(self.state, ids, hidden, start, len(chunk))
        self.hidden = hidden[:, len(chunk) - 1 : len(chunk)]
        self.seen: list[Tensor] = []
        self.positions: list[int] = []

    def commit(self, token: int) -> None:
        """The first generated token, paired with the prompt's last hidden state."""
        self.tokens.append(token)
        self.drafter.observe(self.state, [token], self.hidden)

    def propose(self, count: int) -> list[int]:
        self.seen, self.positions = [], []

        def choose(logits: Tensor, position: int) -> int:
            self.seen.append(logits.clone())
            self.positions.append(position)
            return int(logits.argmax())

        return self.drafter.propose(self.state, count, choose)

    def verify(self, drafts: list[int], accepted: int, then: int) -> None:
        """Accept the first `accepted` drafts, then the target's own token `then`."""
        rows = self.runner.verify(self.cache, [self.tokens[-1], *drafts], len(self.tokens) - 1)
        self.cache.accept(accepted + 1)
        new = [*drafts[:accepted], then]
        self.tokens += new
        self.drafter.observe(self.state, new, rows.hidden[:, : len(new)])


SCHEDULE = ((3, 3), (8, 0), (1, 1), (5, 2), (2, 0), (8, 8), (4, 1))  # (K, accepted)


def worst(runner: Runner, drafter: MTPDrafter, oracle: Oracle, prompt_length: int) -> float:
    """The largest logit difference over a schedule of drafts, rejections and acceptances."""
    generator = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(0, SHAPE.vocab, (prompt_length,), generator=generator).tolist()
    largest = 0.0
    with torch.inference_mode():
        walk = Walk(runner, drafter, prompt)
        walk.commit(11)
        for count, accepted in SCHEDULE:
            drafts = walk.propose(count)
            expected = oracle.slots(walk.tokens, drafts[:-1])
            assert walk.positions == list(range(len(walk.tokens), len(walk.tokens) + count))
            largest = max(largest, float((torch.stack(walk.seen) - expected).abs().max()))
            walk.verify(drafts, accepted, then=(17 * len(walk.tokens)) % SHAPE.vocab)
    return largest


@pytest.mark.parametrize("prompt_length", [1, 2, 63, 64, 65, 150])
def test_draft_logits_equal_transformers_at_every_slot(runner: Runner, oracle: Oracle, prompt_length: int) -> None:
    assert worst(runner, MTPDrafter(runner.model, "x"), oracle, prompt_length) < TOLERANCE


def test_a_pre_norm_hidden_state_is_seen(runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, model = runner.model.model.norm, runner.model
    kept: dict[str, Tensor] = {}
    norm.register_forward_pre_hook(lambda _module, args: kept.update(pre=args[0]))
    drafter = MTPDrafter(model, "x")
    prefill, observe = drafter.prefill, drafter.observe
    first: list[Tensor] = []

    def pre_norm_prefill(state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        prefill(state, tokens, kept["pre"], start, valid)
        first[:] = [kept["pre"][:, valid - 1 : valid]]

    def pre_norm_observe(state: Any, tokens: list[int], hidden: Tensor) -> None:
        observe(state, tokens, first.pop() if first else kept["pre"][:, : len(tokens)])

    monkeypatch.setattr(drafter, "prefill", pre_norm_prefill)
    monkeypatch.setattr(drafter, "observe", pre_norm_observe)
    assert worst(runner, drafter, oracle, 20) > 100 * TOLERANCE


def test_a_position_off_by_one_between_prompt_and_draft_is_seen(
    runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AttentionForm.__init__

    def shifted(self: AttentionForm, caches: Any, start: int, rows: int, valid: int, first_key: int = 0) -> None:
        original(self, caches, start, rows, valid, first_key)
        if first_key and rows < GRID:
            self.positions = self.positions + 1

    monkeypatch.setattr(AttentionForm, "__init__", shifted)
    assert worst(runner, MTPDrafter(runner.model, "x"), oracle, 20) > 10 * TOLERANCE


def test_swapped_halves_of_the_projection_are_seen(runner: Runner, oracle: Oracle) -> None:
    fc = runner.model.mtp.fc  # type: ignore[union-attr]
    embedding, hidden = fc.weight.data.chunk(2, dim=1)
    fc.weight.data = torch.cat((hidden, embedding), dim=1)
    assert worst(runner, MTPDrafter(runner.model, "x"), oracle, 20) > 100 * TOLERANCE


def test_a_row_left_stale_after_verify_is_seen(runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of accepted drafts keep the provisional values the draft wrote: only the last committed row is rerun."""
    drafter = MTPDrafter(runner.model, "x")
    observe = drafter.observe

    def last_only(state: MTPState, tokens: list[int], hidden: Tensor) -> None:
        state.position += len(tokens) - 1
        observe(state, tokens[-1:], hidden[:, -1:])

    monkeypatch.setattr(drafter, "observe", last_only)
    assert worst(runner, drafter, oracle, 20) > 10 * TOLERANCE


def test_rows_of_many_undrafted_steps_are_caught_up(runner: Runner, oracle: Oracle) -> None:
    """K = 0 for longer than the drafter keeps rows waiting, then drafting again: nothing is missing."""
    drafter = MTPDrafter(runner.model, "x")
    with torch.inference_mode():
        walk = Walk(runner, drafter, [5, 6, 7])
        walk.commit(11)
        for step in range(80):
            walk.verify([], 0, then=(31 * step) % SHAPE.vocab)
        drafts = walk.propose(4)
        expected = oracle.slots(walk.tokens, drafts[:-1])
    assert (torch.stack(walk.seen) - expected).abs().max() < TOLERANCE
