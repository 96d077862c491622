"""The MTP drafter against transformers' MtpModel, slot by slot, through prefill, verify, rejection and recursion.

Every classic mistake (pre-norm hidden state, position off by one, swapped halves, a stale row) must be seen here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.drafters.mtp import mtp_drafter
from backend.drafters.protocol import Proposal
from backend.drafters.recursive import RecursiveDrafter, RecursiveState
from backend.engine.forms import GRID, PagedRows
from backend.engine.runner import Runner
from backend.models.weights import load_model
from tests import factory, reference
from tests.by_hand import ByHand
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
    """Sequences driven by hand: their committed tokens, and the logits that the drafter saw per slot."""

    def __init__(self, runner: Runner, drafter: RecursiveDrafter, prompts: list[list[int]]) -> None:
        self.drafter, self.tokens = drafter, [list(prompt) for prompt in prompts]
        self.hands = ByHand(runner, prompts, drafter)
        self.seen: list[Tensor] = []  # [B, V] of each slot

    def commit(self, token: int) -> None:
        """Every sequence's first generated token, paired with its prompt's last hidden state."""
        for tokens, state, last in zip(self.tokens, self.hands.states, self.hands.lasts, strict=True):
            tokens.append(token)
            self.drafter.observe(state, [token], last)

    def propose(self, counts: list[int]) -> list[list[int]]:
        self.seen = []

        def choose(logits: Tensor) -> Tensor:
            self.seen.append(logits.clone())
            return logits.argmax(-1)

        proposal: Proposal = self.drafter.propose(self.hands.states, counts, choose)
        assert list(proposal.counts) == counts
        return [row[:count] for row, count in zip(proposal.tokens.tolist(), counts, strict=True)]

    def verify(self, drafts: list[list[int]], accepted: list[int], then: int) -> None:
        """Accept the first drafts of each, then the target's own token `then`."""
        given = zip(self.tokens, drafts, strict=True)
        rows = self.hands.verify([[tokens[-1], *draft] for tokens, draft in given])
        self.hands.keep([count + 1 for count in accepted])
        for i, (draft, count) in enumerate(zip(drafts, accepted, strict=True)):
            new = [*draft[:count], then]
            self.tokens[i] += new
            self.drafter.observe(self.hands.states[i], new, rows[i][1][: len(new)])


SCHEDULE = ((3, 3), (8, 0), (1, 1), (5, 2), (2, 0), (8, 8), (4, 1))  # (K, accepted)


def worst(runner: Runner, drafter: RecursiveDrafter, oracle: Oracle, *prompt_lengths: int) -> float:
    """The largest logit difference over a schedule of drafts, rejections and acceptances.

    Each sequence of several is one entry of the schedule ahead of the one before it.
    """
    prompts = [
        torch.randint(0, SHAPE.vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in prompt_lengths
    ]
    largest = 0.0
    with torch.inference_mode():
        walk = Walk(runner, drafter, prompts)
        walk.commit(11)
        for turn in range(len(SCHEDULE)):
            now = [SCHEDULE[(turn + i) % len(SCHEDULE)] for i in range(len(prompts))]
            drafts = walk.propose([count for count, _ in now])
            for i, draft in enumerate(drafts):
                seen = torch.stack([logits[i] for logits in walk.seen[: len(draft)]])
                expected = oracle.slots(walk.tokens[i], draft[:-1])
                largest = max(largest, float((seen - expected).abs().max()))
            walk.verify(drafts, [accepted for _, accepted in now], then=(17 * len(walk.tokens[0])) % SHAPE.vocab)
    return largest


@pytest.mark.parametrize("prompt_length", [1, 2, 63, 64, 65, 150])
def test_draft_logits_equal_transformers_at_every_slot(runner: Runner, oracle: Oracle, prompt_length: int) -> None:
    assert worst(runner, mtp_drafter(runner.model, "x"), oracle, prompt_length) < TOLERANCE


def test_draft_logits_equal_transformers_for_sequences_drafted_together(runner: Runner, oracle: Oracle) -> None:
    assert worst(runner, mtp_drafter(runner.model, "x"), oracle, 2, 65, 10, 505) < TOLERANCE


def test_a_pre_norm_hidden_state_is_seen(runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, model = runner.model.model.norm, runner.model
    kept: dict[str, Tensor] = {}
    norm.register_forward_pre_hook(lambda _module, args: kept.update(pre=args[0]))
    drafter = mtp_drafter(model, "x")
    prefill, observe = drafter.prefill, drafter.observe
    first: list[Tensor] = []

    def pre_norm_prefill(state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        prefill(state, tokens, kept["pre"], start, valid)
        first[:] = [kept["pre"][0, valid - 1 : valid]]

    def pre_norm_observe(state: Any, tokens: list[int], hidden: Tensor) -> None:
        observe(state, tokens, first.pop() if first else kept["pre"][0, : len(tokens)])

    monkeypatch.setattr(drafter, "prefill", pre_norm_prefill)
    monkeypatch.setattr(drafter, "observe", pre_norm_observe)
    assert worst(runner, drafter, oracle, 20) > 100 * TOLERANCE


def test_a_position_off_by_one_between_prompt_and_draft_is_seen(
    runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PagedRows.__init__

    def shifted(self: PagedRows, *given: Any, first_key: int = 0) -> None:
        original(self, *given, first_key=first_key)
        if first_key and self.positions.shape[1] < GRID:
            self.positions = self.positions + 1

    monkeypatch.setattr(PagedRows, "__init__", shifted)
    assert worst(runner, mtp_drafter(runner.model, "x"), oracle, 20) > 10 * TOLERANCE


def test_swapped_halves_of_the_projection_are_seen(runner: Runner, oracle: Oracle) -> None:
    fc = runner.model.mtp.fc  # type: ignore[union-attr]
    embedding, hidden = fc.weight.data.chunk(2, dim=1)
    fc.weight.data = torch.cat((hidden, embedding), dim=1)
    assert worst(runner, mtp_drafter(runner.model, "x"), oracle, 20) > 100 * TOLERANCE


def test_a_row_left_stale_after_verify_is_seen(runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of accepted drafts keep the provisional values the draft wrote: only the last committed row is rerun."""
    drafter = mtp_drafter(runner.model, "x")
    observe = drafter.observe

    def last_only(state: RecursiveState, tokens: list[int], hidden: Tensor) -> None:
        state.position += len(tokens) - 1
        observe(state, tokens[-1:], hidden[-1:])

    monkeypatch.setattr(drafter, "observe", last_only)
    assert worst(runner, drafter, oracle, 20) > 10 * TOLERANCE


def test_a_chunk_that_forgets_the_hidden_state_before_it_is_seen(
    runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = mtp_drafter(runner.model, "x")
    monkeypatch.setattr(drafter, "_before", lambda state, start, count: torch.zeros(1, count, SHAPE.hidden))
    assert worst(runner, drafter, oracle, 65) > 10 * TOLERANCE


def test_a_sequence_drafted_on_anothers_pages_is_seen(
    runner: Runner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = mtp_drafter(runner.model, "x")
    propose = drafter.propose

    def crossed(states: list[RecursiveState], *rest: Any) -> Proposal:
        pages = [state.pages for state in states]
        for state, other in zip(states, [*pages[1:], pages[0]], strict=True):
            state.pages = other
        return propose(states, *rest)

    monkeypatch.setattr(drafter, "propose", crossed)
    assert worst(runner, drafter, oracle, 20, 30) > 10 * TOLERANCE


def test_rows_found_in_the_prefix_cache_are_rebuilt_as_they_were(runner: Runner) -> None:
    """From the prompt's hidden states alone, bit for bit."""
    drafter = mtp_drafter(runner.model, "x")
    prompt = torch.randint(0, SHAPE.vocab, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        hands = ByHand(runner, [prompt], drafter)
        cache = hands.memory.block("x", SHAPE.kv_heads, SHAPE.head_dim)
        places = hands.memory.places(hands.places[0].pages, 1, 127)
        before = cache.k[:, :, places].clone(), cache.v[:, :, places].clone()
        cache.k.zero_()
        cache.v.zero_()
        drafter.resume(drafter.new_state(prompt, hands.places[0].pages), 128, known=False)
    assert torch.equal(cache.k[:, :, places], before[0])
    assert torch.equal(cache.v[:, :, places], before[1])
    assert before[0].any()


def test_rows_of_many_undrafted_steps_are_caught_up(runner: Runner, oracle: Oracle) -> None:
    """K = 0 for longer than the drafter keeps rows waiting, then drafting again: nothing is missing."""
    drafter = mtp_drafter(runner.model, "x")
    with torch.inference_mode():
        walk = Walk(runner, drafter, [[5, 6, 7]])
        walk.commit(11)
        for step in range(80):
            walk.verify([[]], [0], then=(31 * step) % SHAPE.vocab)
        (drafts,) = walk.propose([4])
        expected = oracle.slots(walk.tokens[0], drafts[:-1])
    assert (torch.cat(walk.seen) - expected).abs().max() < TOLERANCE
