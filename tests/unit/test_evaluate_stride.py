"""Strided anchors against every figure worked out by hand, for a drafter whose logits are known."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.drafters.protocol import Choose, Proposal
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.memory import Memory
from backend.engine.noise import Stream, host_noise
from backend.models.draft_block import NativeBlock
from tests import factory
from training.data import Document, Forced
from training.evaluate.figures import Bootstrap, Strided, depths
from training.evaluate.stride import Judged, StrideOptions, judged, noisy, stride

VOCAB, K = 320, 3
OPTIONS = StrideOptions(slots=K, every=2, temperatures=(0.7, 1.0), seed=5)


@dataclass
class State:
    prompt: tuple[int, ...]
    done: int = 0


class KnownDrafter:
    """Slot j after n tokens has the logits `table[n + j]`, float32 [T + K, V], whatever the tokens were."""

    name = fingerprint = "known"
    block = None

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def attach(self, memory: Memory) -> None:
        pass

    def new_state(self, prompt: Ids[int], pages: list[int]) -> State:
        return State(tuple(prompt))

    def resume(self, state: Any, boundary: int, known: bool) -> None:
        pass

    def prefill(self, state: State, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        assert tuple(tokens[0, :valid].tolist()) == state.prompt[start : start + valid]
        state.done += valid

    def observe(self, state: State, tokens: Ids[int], hidden: Tensor) -> None:
        assert len(tokens) == len(hidden)
        state.done += len(tokens)

    def propose(self, states: Ids[State], counts: Ids[int], choose: Choose) -> Proposal:
        slots = [choose(self.table[[state.done + j for state in states]]) for j in range(max(counts))]
        return Proposal(torch.stack(slots, dim=1), counts)


@pytest.fixture(scope="module")
def model():
    return factory.build(factory.Shape(vocab=VOCAB))


def document(model, name: str, prompt: int, length: int) -> Forced:
    """Random hidden states; the answer is the target's argmax at each place, as a greedy one."""
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(length, model.config.hidden_size, generator=generator)
    own = model.logits(hidden[prompt - 1 : -1]).argmax(-1)
    tokens = np.concatenate((np.arange(prompt), own.numpy())).astype(np.int32)
    return Forced(Document(name, tokens, prompt, np.zeros(length, np.float32), held_out=True), hidden)


def table_like(model, forced: Forced, noise: float) -> Tensor:
    """The target's own logits, disturbed: a drafter that is right sometimes."""
    rows = model.logits(torch.cat((forced.hidden[:1], forced.hidden, forced.hidden[:K])))  # row n predicts x_n
    return rows + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def test_every_sum_is_what_the_definitions_give(model) -> None:
    forced = document(model, "one", prompt=70, length=103)
    table = table_like(model, forced, noise=0.1)
    with torch.inference_mode():
        target = model.logits(torch.cat((forced.hidden[:1], forced.hidden))).numpy()  # row n predicts x_n
        one = judged(model, forced, forced.document.answer, OPTIONS, VOCAB)
    (sums,) = stride(model, KnownDrafter(table), [one], OPTIONS, VOCAB)
    q, tokens = table.numpy(), forced.document.tokens.tolist()
    seed = noisy(forced, 1.0, OPTIONS).seed
    want = {name: np.zeros(K) for name in ("n", "hit", "surv", "reached", "full", "full_surv", "sampled")}
    for t in OPTIONS.temperatures:
        want |= {f"{kind}@{t}": np.zeros(K) for kind in ("beta", "beta_surv", "coupled", "coupled_surv")}
    for p in range(70, 103 - 1, 2):
        alive, run = 1.0, {}
        full = p + K <= 102
        for j in range(K):
            at = p + 1 + j
            if at > 102:
                break
            hit = q[at].argmax() == tokens[at]
            want["n"][j] += 1
            want["sampled"][j] += 1
            want["reached"][j] += alive
            want["hit"][j] += hit
            alive *= hit
            want["surv"][j] += alive
            want["full"][j] += full
            want["full_surv"][j] += full * alive
            for t in OPTIONS.temperatures:
                noise = host_noise(Stream(seed, at), np.arange(VOCAB))
                beta = np.minimum(softmax(q[at] / t), softmax(target[at] / t)).sum()
                same = (q[at] / np.float32(t) + noise).argmax() == (target[at] / np.float32(t) + noise).argmax()
                for kind, value in (("beta", beta), ("coupled", same)):
                    run[kind, t] = run.get((kind, t), 1.0) * value
                    want[f"{kind}@{t}"][j] += value
                    want[f"{kind}_surv@{t}"][j] += run[kind, t]
    assert sums.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(sums[name].sum(0), values, rtol=1e-5, err_msg=name)
    assert 0 < want["surv"][K - 1] < want["hit"][0] < want["n"][0], "a case in which there is something to tell"


def test_a_cut_head_is_told_how_far_its_list_carries() -> None:
    model = factory.build(factory.Shape(vocab=VOCAB))
    forced = document(model, "one", prompt=70, length=90)
    tokens = forced.document.tokens.tolist()
    ids = sorted({*range(0, VOCAB, 2), *tokens[70:82]})
    drafter = RecursiveDrafter(model, NativeBlock(model, torch.tensor(ids)), "cut", "cut", "rows")
    with torch.inference_mode():
        target = model.logits(torch.cat((forced.hidden[:1], forced.hidden))).numpy()
        one = judged(model, forced, forced.document.answer, OPTIONS, VOCAB)
    (sums,) = stride(model, drafter, [one], OPTIONS, VOCAB)
    covered, run, mass = np.zeros(K), np.zeros(K), np.zeros(K)
    for p in range(70, 89, 2):
        ahead = tokens[p + 1 : p + 1 + K]
        inside = [token in ids for token in ahead]
        covered[: len(ahead)] += inside
        run[: len(ahead)] += np.cumprod(inside)
        mass[: len(ahead)] += [softmax(target[p + 1 + j])[ids].sum() for j in range(len(ahead))]
    np.testing.assert_array_equal(sums["covered"].sum(0), covered)
    np.testing.assert_array_equal(sums["run"].sum(0), run)
    np.testing.assert_allclose(sums["mass"].sum(0), mass, rtol=1e-5)
    assert 0 < run[K - 1] < covered[0] < sums["n"].sum(0)[0]
    for slot in range(K):
        assert sums["hit"].sum(0)[slot] <= covered[slot], "what is not in the list is never right"
        assert sums["beta@1.0"].sum(0)[slot] <= mass[slot] + 1e-6


def test_depths_part_the_anchors_by_their_position(model) -> None:
    forced = document(model, "long", prompt=508, length=522)
    one = Judged(forced, forced.document.answer, {})
    options = StrideOptions(slots=K, every=1, temperatures=())
    (sums,) = stride(model, KnownDrafter(table_like(model, forced, 0.0)), [one], options, VOCAB)
    assert sums["n"][:, 0].tolist() == [5, 8, 0, 0, 0]  # 508 … 512, then 513 … 520
    assert len(depths()) == 5


def test_company_and_order_change_no_sum(model) -> None:
    lengths = (75, 90, 71, 120, 73)
    forced = [document(model, str(n), prompt=70, length=n) for n in lengths]
    documents = [judged(model, one, one.document.answer, OPTIONS, VOCAB) for one in forced]
    drafter = KnownDrafter(table_like(model, forced[3], 0.5))
    alone = stride(model, drafter, documents, OPTIONS, VOCAB, together=1)
    for found, again in zip(alone, stride(model, drafter, documents, OPTIONS, VOCAB, together=3), strict=True):
        assert found.keys() == again.keys()
        for name, values in found.items():
            np.testing.assert_allclose(values, again[name], rtol=1e-6, err_msg=name)
    assert [found["n"].sum() for found in alone][2] == 0, "a document of one generated token has no anchor"


def test_chain_is_the_mean_of_surv_and_tau_one_more_than_k_chains(model) -> None:
    forced = [document(model, str(n), prompt=70, length=n) for n in (95, 103, 120)]
    documents = [judged(model, one, one.document.answer, OPTIONS, VOCAB) for one in forced]
    drafter = KnownDrafter(table_like(model, forced[2], 0.1))
    found = Strided.of(stride(model, drafter, documents, OPTIONS, VOCAB)).figures(Bootstrap(3, 50, seed=0))
    assert found["tau"].value == pytest.approx(1 + K * found["chain"].value)
    assert found["surv"][0] == found["hit"][0] == found["cond"][0]
    assert found["beta"]["1.0"][0].n == found["anchors"]
