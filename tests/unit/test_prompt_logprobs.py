"""How likely a prompt's own tokens are: as transformers says, and bitwise the same however the prompt was run."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from backend.drafters.mtp import mtp_drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.engine import speculation
from backend.engine.loop import Loop
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.engine.sequence import Emission, EmittedToken
from backend.models.weights import load_model
from tests import factory, reference
from tests.decoding import Job, Request, make_loop
from tests.factory import Shape

SHAPE = Shape(seed=6)
WIDE = Shape(hidden=384, layers=("linear", "full"), seed=7, std=0.03)  # where a product's rows can depend on each other
LENGTHS = (1, 2, 63, 64, 65, 150, 300)
GREEDY = SamplingParams(temperature=0)


def stream(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, SHAPE.vocab, (length,), generator=generator).tolist())


BASE = stream(0, max(LENGTHS))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.save(factory.build(SHAPE), SHAPE, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def runner(directory: Path) -> Runner:
    torch.set_num_threads(1)
    runner = Runner(load_model(directory, torch.device("cpu"), torch.float32, with_mtp=True).model)
    with torch.inference_mode():
        assert probe(runner).lawful
    return runner


@dataclass
class Asked:
    """A sequence whose prompt is to be told of, and all that its owner hears."""

    job: Job
    heard: list[Emission] = field(default_factory=list)

    def __post_init__(self) -> None:
        tell = self.job.sequence.on_emission

        def hear(emission: Emission) -> None:
            self.heard.append(emission)
            tell(emission)

        self.job.sequence.on_emission = hear

    @property
    def prompt(self) -> tuple[EmittedToken, ...]:
        return tuple(token for emission in self.heard for token in emission.prompt)

    @property
    def bits(self) -> tuple[tuple[object, ...], ...]:
        """All of it but the first token, whose NaN equals nothing."""
        return tuple((token.token_id, token.logprob, token.rank, token.alternatives) for token in self.prompt[1:])


def ask(
    loop: Loop, prompt: Ids[int], count: int = 2, told: int | None = 3, drafter: RecursiveDrafter | None = None
) -> Asked:
    asked = Asked(Job(loop, Request(tuple(prompt), GREEDY, count), drafter))
    asked.job.sequence.prompt_alternatives = told
    loop.add(asked.job.sequence)
    return asked


@torch.inference_mode()
def alone(runner: Runner, prompt: Ids[int], count: int = 2) -> Asked:
    loop = make_loop(runner, 0, positions=len(prompt) + count)
    asked = ask(loop, prompt, count)
    loop.finish()
    return asked


@pytest.mark.parametrize("length", LENGTHS)
def test_they_are_those_of_transformers(runner: Runner, directory: Path, length: int) -> None:
    prompt = BASE[:length]
    told = alone(runner, prompt).prompt
    assert [token.token_id for token in told] == list(prompt)
    assert math.isnan(told[0].logprob)
    assert (told[0].alternatives, told[0].rank) == ((), None)
    expected = torch.log_softmax(reference.logits(reference.trunk(directory), list(prompt)), -1)
    for at, token in enumerate(told[1:]):
        row = expected[at]
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        best = row.topk(3)
        assert [logprob for _, logprob in token.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
        near = (row - row[token.token_id]).abs() < 2e-4
        ahead = int((row > row[token.token_id] + 2e-4).sum())
        assert token.rank is not None
        assert 0 <= token.rank - 1 - ahead < int(near.sum()), "the rank, but for what is as good as equal"


def test_the_best_token_ranks_first_and_of_equals_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [0.0, 2.0, 2.0, 1.0]])
    told = speculation._scored(logits, torch.tensor([2, 3]), alternatives=2)
    assert [token.rank for token in told] == [2, 3]
    assert [[token for token, _ in one.alternatives] for one in told] == [[1, 2], [1, 2]]


@torch.inference_mode()
def test_they_are_told_before_the_answer_each_once_and_chunk_by_chunk(runner: Runner) -> None:
    loop = make_loop(runner, 0, positions=302)
    asked = ask(loop, BASE)
    loop.finish()
    sizes = [len(emission.prompt) for emission in asked.heard if emission.prompt]
    assert sizes == [65, 64, 64, 64, 43]
    assert [bool(emission.tokens) for emission in asked.heard] == [*[False] * 5, True, True]
    assert asked.job.outcome.seen == _unasked(runner, BASE)


def _unasked(runner: Runner, prompt: Ids[int]) -> tuple[object, ...]:
    loop = make_loop(runner, 0, positions=302)
    asked = ask(loop, prompt, told=None)
    loop.finish()
    assert not asked.prompt
    return asked.job.outcome.seen


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_they_are_bitwise_the_same_in_any_company(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    runner = Runner(factory.build(SHAPE).to(dtype))
    probe(runner)
    expected = {length: alone(runner, BASE[:length]).bits for length in LENGTHS}
    mtp = mtp_drafter(runner.model, "x")
    loop = make_loop(runner, 3, [mtp], positions=400, sequences=6, prefix=True)
    others = [ask(loop, stream(9 + i, 40 + 30 * i), count=60, told=None, drafter=mtp) for i in range(2)]
    asked = [ask(loop, BASE[:length], count=5, drafter=mtp) for length in (*LENGTHS, *LENGTHS)]
    loop.finish()
    assert all(other.job.outcome.finish == "length" for other in others)
    assert [one.bits for one in asked] == [expected[length] for length in (*LENGTHS, *LENGTHS)]


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_beginning_is_told_of_alike_whatever_follows_it(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    runner = Runner(factory.build(WIDE).to(dtype))
    probe(runner)
    whole = alone(runner, BASE[:129]).bits
    for length in (2, 4, 64, 66, 67, 69, 100):  # other rows are computed along with it, or none
        assert alone(runner, BASE[:length]).bits == whole[: length - 1]
    torch.set_num_threads(1)


@torch.inference_mode()
def test_a_known_beginning_is_run_again_for_them_and_known_to_others_after(runner: Runner) -> None:
    loop = make_loop(runner, 0, pages=4, prefix=True)
    prefix = loop.scheduler.prefix
    assert prefix is not None
    first = ask(loop, BASE)
    loop.finish()
    assert (len(first.prompt), first.job.sequence.cached, prefix.queries) == (300, 0, 0)
    plain = ask(loop, BASE, told=None)
    loop.finish()
    assert plain.job.sequence.cached == 256, "it left what others may use"
    again = ask(loop, BASE)
    loop.finish()
    assert again.job.sequence.cached == 0
    assert again.bits == first.bits
    assert (prefix.queries, prefix.hits) == (300, 256), "only looked up where it was of use"


@torch.inference_mode()
def test_who_is_preempted_hears_nothing_twice(runner: Runner) -> None:
    loop = make_loop(runner, 0, sequences=4, pages=4, prefix=True)
    prompts = [(*BASE[:200], *stream(30 + i, 290)) for i in range(4)]
    asked = [ask(loop, prompt, count=40) for prompt in prompts]
    loop.finish()
    assert loop.scheduler.preemptions > 0
    assert [one.bits for one in asked] == [alone(runner, prompt, 40).bits for prompt in prompts]


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 64, 65])
def test_without_a_token_to_say_it_ends_after_its_prompt(runner: Runner, length: int) -> None:
    loop = make_loop(runner, 3, positions=100)
    asked, other = ask(loop, BASE[:length], count=0), ask(loop, BASE[:20], count=4)
    loop.finish()
    assert asked.job.outcome.seen == ((), (), "", "length")
    assert asked.heard[-1] == Emission("", (), "length")
    assert asked.bits == alone(runner, BASE[:length]).bits
    assert len(other.job.outcome.tokens) == 4, "its place was free at once"
    assert loop.scheduler.memory.table.free == loop.scheduler.memory.table.total


@torch.inference_mode()
def test_a_model_without_sense_is_a_failure_and_no_likelihood(directory: Path) -> None:
    shape = replace(SHAPE, tied=False)
    model = factory.build(shape)
    runner = Runner(model)
    probe(runner)
    model.lm_head.weight[7] = float("nan")
    loop = make_loop(runner, 0, positions=100)
    asked = ask(loop, BASE[:20])
    loop.finish()
    assert asked.job.sequence.finish == "error"
    assert not asked.prompt
    assert "not finite" in str(asked.heard[-1].error)
