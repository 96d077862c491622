"""A step's device part as a graph capture needs it: nothing between draft and the one host read asks for a value.

On torch's meta device tensors have shapes and no values: whatever reads one, or branches on one, raises.
"""

from __future__ import annotations

import pytest
import torch

from backend.drafters.mtp import MTPDrafter
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from tests import factory
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
    drafter = MTPDrafter(runner.model, "x")
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
