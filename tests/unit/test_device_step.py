"""A step's device part as a graph capture needs it: nothing between draft and the one host read asks for a value.

On torch's meta device tensors have shapes and no values: whatever reads one, or branches on one, raises.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from backend.drafters.mtp import mtp_drafter
from backend.engine.forms import VerifyForm
from backend.engine.runner import Runner
from backend.engine.sampling import Sampler, SamplerBatch, SamplingParams
from tests import factory
from tests.by_hand import ByHand
from tests.decoding import Job, Request, make_loop
from tests.factory import Shape

SHAPE = Shape(layers=("linear", "full"))


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2),
        SamplingParams(temperature=0.7, top_k=20, presence_penalty=1.5, seed=3),
    ],
    ids=["greedy", "untruncated", "truncated", "penalised"],
)
def test_nothing_is_read_back_before_the_step_is_done(params: SamplingParams, drafts: int) -> None:
    runner = Runner(factory.build(SHAPE).to("meta"))
    drafter = mtp_drafter(runner.model, "x")
    loop = make_loop(runner, drafts, [drafter], sequences=3)
    with torch.inference_mode():
        for length in (5, 40, 70):  # each joins before the next is let in
            job = Job(loop, Request(tuple(range(length)), params), drafter)
            loop.add(job.sequence)
            loop.scheduler.admit()
            sequence = job.sequence
            # As after its prompt, whose last row chose token 1.
            sequence.prefilled = length
            sequence.place.state = loop.scheduler.memory.slots.new_prompt_state()  # type: ignore[union-attr]
            sequence.draft_state.position = length
            sequence.tokens.append(1)
            sequence.sampler.accept(1)
            loop.scheduler.after_chunk(sequence)
            drafter.observe(sequence.draft_state, [1], torch.zeros(1, SHAPE.hidden, device="meta"))
        batch = list(loop.scheduler.decoding)
        blocks = loop.speculation._blocks(batch, drafts)
        logits, hidden, chosen, logprobs = loop.speculation._verify(batch, blocks)
    assert blocks.tokens.shape == chosen.shape == logprobs.shape == (3, drafts + 1)
    assert logits.shape == (3, drafts + 1, SHAPE.vocab)
    assert hidden.shape == (3, drafts + 1, SHAPE.hidden)
    assert chosen.device.type == "meta"


def form_of(hand: ByHand, rows: int) -> VerifyForm:
    memory, places = hand.memory, hand.places
    return VerifyForm(
        hand.runner.model.config,
        memory.cache,
        memory.slots,
        [place.pages for place in places],
        [place.prompt for place in places],
        hand.starts,
        [rows] * len(places),
        rows,
    )


def buffers(form: VerifyForm) -> list[Tensor]:
    """Everything a form made on the host for one step: what a captured graph would be given anew each time."""
    rows, window = form._rows, form._window
    [reach] = rows.reaches
    assert isinstance(reach.pages, Tensor)
    kept = [rows.positions, rows.places, reach.mask, reach.pages, form._taps, form._columns]
    return [*kept, window.rows, window.previous, window.reach, window.counted, window.base, *window.row]


def with_buffers(form: VerifyForm, given: Sequence[Tensor]) -> VerifyForm:
    form = copy.copy(form)
    positions, places, mask, pages, taps, columns, written, previous, reach, counted, base, *row = given
    form._rows = copy.copy(form._rows)
    form._rows.positions = form.positions = positions
    form._rows.places = places
    form._rows.reaches = [replace(form._rows.reaches[0], mask=mask, pages=pages)]
    form._taps, form._columns = taps, columns
    form._window = replace(
        form._window, rows=written, row=tuple(row), previous=previous, reach=reach, counted=counted, base=base
    )
    return form


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_step_traces_whole_and_its_graph_serves_the_steps_after_it(rows: int) -> None:
    """What is traced at one step, given the next step's buffers, is bitwise the next step: nothing was baked in."""
    runner = Runner(factory.build(SHAPE))
    hand = ByHand(runner, [list(range(1, 6)), list(range(7, 77))])
    greedy = SamplerBatch([Sampler(SamplingParams(temperature=0), SHAPE.vocab)] * 2, [0, 0])
    tensors = [t for pool in (hand.memory.cache, hand.memory.slots) for t in vars(pool).values() if torch.is_tensor(t)]

    def device(form: VerifyForm, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = runner.model.logits(runner.model(tokens, form))
        return greedy.choose_on_device(logits, tokens[:, 1:]), torch.log_softmax(logits, dim=-1)

    form = form_of(hand, rows)
    tokens = torch.arange(2 * rows).view(2, rows)
    before = [tensor.clone() for tensor in tensors]
    graph = make_fx(lambda tokens, *given: device(with_buffers(form, given), tokens))(tokens, *buffers(form))
    for step in range(4):
        for tensor, was in zip(tensors, before, strict=True):
            tensor.copy_(was)
        form, tokens = form_of(hand, rows), tokens + step
        assert not form._ahead
        wanted = device(form, tokens)
        after = [tensor.clone() for tensor in tensors]
        for tensor, was in zip(tensors, before, strict=True):
            tensor.copy_(was)
        got = graph(tokens, *buffers(form))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(tensors, after, strict=True))
        before = after
        hand.keep([rows, 1])
