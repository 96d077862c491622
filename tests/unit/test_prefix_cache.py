"""The prefix cache: with a hit as without one, bit for bit and draft for draft; who shares what, and who makes room.

Caches that are wrong in one way each must fail the same checks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import pytest
import torch

import backend.engine.prefix as prefix_module
from backend.drafters.protocol import Choose, Proposal
from backend.drafters.recursive import RecursiveDrafter, RecursiveState
from backend.engine.cache import COLUMN_RING, KeyValuePages, PromptState
from backend.engine.forms import GRID
from backend.engine.loop import Loop
from backend.engine.memory import Memory, Place
from backend.engine.prefix import PrefixCache
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.engine.sampling import SamplingParams
from backend.engine.sequence import Sequence
from backend.models.draft_block import NativeBlock
from backend.ops.delta_replay import CHUNK, MAX_ROWS
from tests import factory
from tests.decoding import Job, Outcome, Request, make_loop, run
from tests.factory import Shape

SHAPE = Shape(vocab=64, hidden=32, intermediate=48, layers=("linear", "full"), k_heads=1, v_heads=2, std=0.3, seed=5)
K = 3
REST = GRID + MAX_ROWS  # remainders past a boundary: 0 … GRID + Kmax + 1
GREEDY = SamplingParams(temperature=0)
# Noise that draft and target share decides most tokens, their logits the rest: drafts are taken often, not always.
WARM = SamplingParams(temperature=3.0, seed=11)


def stream(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(SHAPE.vocab), k=length))


BASE = stream(0, 2600)


@pytest.fixture(scope="module")
def runner() -> Runner:
    torch.set_num_threads(1)
    runner = Runner(factory.build(SHAPE))
    with torch.inference_mode():
        assert probe(runner).lawful
    return runner


class OpenDrafter(RecursiveDrafter):
    """Shows its drafts, by prompt: that few are taken hides many a wrong row."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.model, NativeBlock(runner.model), "mtp", "block", "block")
        self.drafts: defaultdict[tuple[int, ...], list[list[int]]] = defaultdict(list)

    def propose(self, states: Ids[RecursiveState], counts: Ids[int], choose: Choose) -> Proposal:
        proposal = super().propose(states, counts, choose)
        for state, row, count in zip(states, proposal.tokens.tolist(), counts, strict=True):
            self.drafts[tuple(state.prompt)].append(row[:count])
        return proposal


Answer = tuple[Outcome, list[list[int]]]  # with all drafts made for it


@dataclass
class House:
    """An engine with a prefix cache, and a drafter."""

    runner: Runner
    loop: Loop
    mtp: OpenDrafter

    @property
    def cache(self) -> PrefixCache:
        assert self.loop.scheduler.prefix is not None
        return self.loop.scheduler.prefix

    def ask(self, *requests: Request, mtp: bool = True, salt: str = "", turn: int = 0) -> list[Sequence]:
        """All at once; they have ended when this returns, each as it would have alone without a cache."""
        jobs = [Job(self.loop, request, self.mtp if mtp else None, salt, last_turn=turn) for request in requests]
        self.mtp.drafts.clear()
        self.finish(*jobs)
        return [job.sequence for job in jobs]

    def finish(self, *jobs: Job) -> None:
        with torch.inference_mode():
            for job in jobs:
                if job.sequence.place is None:
                    self.loop.add(job.sequence)
            self.loop.finish()
        for job in jobs:
            sequence = job.sequence
            request = Request(sequence.prompt, sequence.sampler.params, sequence.max_tokens)
            outcome, drafts = without_cache(self.runner, request, sequence.drafter is not None)
            assert job.outcome == outcome, f"prompt of {len(sequence.prompt)}"
            assert self.mtp.drafts[sequence.prompt] == drafts, f"prompt of {len(sequence.prompt)}"

    def cached(self, prompt: Ids[int], salt: str = "") -> int:
        """How much of a prompt is found, by asking."""
        (sequence,) = self.ask(Request(tuple(prompt), GREEDY, 2), salt=salt)
        return sequence.cached


ALONE: dict[tuple[Request, bool], Answer] = {}


def without_cache(runner: Runner, request: Request, mtp: bool) -> Answer:
    """The same request alone without a prefix cache, drafted alike."""
    if (request, mtp) not in ALONE:
        drafter = OpenDrafter(runner) if mtp else None
        loop = make_loop(runner, K, [drafter] if drafter else [], positions=len(request.prompt) + 64)
        (outcome,) = run(loop, [(request, drafter)])
        ALONE[request, mtp] = outcome, drafter.drafts[request.prompt] if drafter else []
    return ALONE[request, mtp]


@pytest.fixture
def house(runner: Runner) -> Callable[..., House]:
    def build(pages: int = 12, sequences: int = 4, snapshots: int = 100) -> House:
        drafter = OpenDrafter(runner)
        loop = make_loop(runner, K, [drafter], sequences=sequences, pages=pages)
        memory = loop.scheduler.memory
        loop.scheduler.prefix = PrefixCache(memory, snapshots * memory.slots.new_prompt_state().bytes)
        return House(runner, loop, drafter)

    return build


def request(
    length: int, params: SamplingParams = WARM, branch: int = 1, shared: int = 10**9, count: int = 14
) -> Request:
    """A prompt of the common stream, its own from position `shared` on."""
    if shared >= length:
        return Request(BASE[:length], params, count)
    other = (BASE[shared] + 1 + branch % (SHAPE.vocab - 1)) % SHAPE.vocab
    return Request((*BASE[:shared], other, *stream(branch, length)[shared + 1 :]), params, count)


# The remainders


@pytest.mark.parametrize(
    ("boundary", "every"), [pytest.param(128, 1, marks=pytest.mark.slow), (128, 5), (512, 18), (576, 18)]
)
def test_an_answer_after_a_hit_is_the_same_for_every_remainder(
    house: Callable[..., House], boundary: int, every: int
) -> None:
    home = house(pages=60)
    home.ask(request(boundary + 1))
    accepted = 0
    for rest in sorted({*range(0, REST + 1, every), 1, CHUNK, CHUNK + 1, GRID, GRID + 1, REST}):
        asked = request(boundary + rest, (WARM, GREEDY)[rest % 2], branch=2 + rest, shared=boundary)
        (sequence,) = home.ask(asked)
        assert sequence.cached == (boundary if rest else 0)
        accepted += sum(step.accepted for step in sequence.steps)
    assert accepted > REST / every, "hardly a draft was ever right"


def test_an_answer_after_a_hit_is_the_same_in_company(house: Callable[..., House]) -> None:
    home = house(pages=12, sequences=6)
    home.ask(request(129))
    for first in range(0, REST, 12):
        group = [request(128 + rest, (WARM, GREEDY)[rest % 2], 2 + rest, 128) for rest in range(first + 1, first + 13)]
        assert {sequence.cached for sequence in home.ask(*group)} == {128}


def test_an_answer_after_a_hit_is_the_same_after_preemption(house: Callable[..., House]) -> None:
    home = house(pages=4, sequences=4)
    home.ask(request(449))
    group = [request(488 + i, WARM, 3 + i, 448, count=40) for i in range(4)]
    sequences = home.ask(*group)
    assert home.loop.scheduler.preemptions > 0
    assert any(sequence.cached for sequence in sequences)


def test_an_answer_is_the_same_when_its_beginning_has_been_evicted(house: Callable[..., House]) -> None:
    home = house(snapshots=1)
    home.ask(request(129))
    assert home.cached(request(140).prompt) == 128
    home.ask(request(200, branch=7, shared=0))
    (sequence,) = home.ask(request(150, branch=8, shared=128))
    assert sequence.cached == 0


def test_a_hit_that_has_no_room_for_its_copy_begins_anew(house: Callable[..., House]) -> None:
    home = house(pages=1, sequences=1)
    home.ask(request(129))
    (sequence,) = home.ask(request(140))
    assert sequence.cached == 0
    assert home.loop.scheduler.memory.table.total == 1


# Drafter rows


@pytest.mark.parametrize("boundary", [128, 512, 576])
def test_drafts_are_as_good_where_the_beginning_was_run_without_a_drafter(
    house: Callable[..., House], boundary: int
) -> None:
    home = house(pages=30)
    home.ask(request(boundary + 1), mtp=False)
    for rest in (1, 2, 30, 64):
        (sequence,) = home.ask(request(boundary + rest, WARM, 30 + rest, boundary))
        assert sequence.cached == boundary


def test_a_drafterless_answer_takes_up_a_beginning_with_drafter_rows(house: Callable[..., House]) -> None:
    home = house()
    home.ask(request(129))
    (sequence,) = home.ask(request(150, shared=128), mtp=False)
    assert sequence.cached == 128


# What is kept


def test_snapshots_stand_at_the_last_boundary_before_the_last_turn_and_every_1024(house: Callable[..., House]) -> None:
    home = house(pages=60)
    home.ask(request(2500), turn=1500)
    probes = {1023: 0, 1024: 1024, 1471: 1024, 1472: 1472, 2047: 1472, 2048: 2048, 2495: 2048, 2496: 2496}
    for shared, found in probes.items():
        home.cache.clear()
        home.ask(request(2500), turn=1500)
        (sequence,) = home.ask(request(shared + 30, GREEDY, branch=shared, shared=shared, count=2))
        assert sequence.cached == found, f"{shared} tokens in common"


def test_a_hit_ends_before_the_prompts_last_token(house: Callable[..., House]) -> None:
    home = house()
    home.ask(request(129))
    home.ask(request(65))
    assert home.cached(BASE[:128]) == 64
    assert home.cached(BASE[:129]) == 128
    assert home.cached(BASE[:64]) == 0


def test_a_beginning_is_known_only_after_the_same_tokens(house: Callable[..., House]) -> None:
    home = house()
    home.ask(request(129))
    assert home.cached((BASE[0] ^ 1, *BASE[1:140])) == 0
    assert home.cached((*BASE[:127], BASE[127] ^ 1, *BASE[128:140])) == 0
    assert home.cached(BASE[64:192]) == 0


def test_what_was_generated_is_run_again_as_a_prompt(house: Callable[..., House]) -> None:
    """The next turn's prompt holds this turn's answer, which decoding computed in another form."""
    home = house(pages=30)
    for rest in range(0, GRID, 14):  # among them one that puts two chunks of generated rows before a boundary
        first = request(128 + rest, WARM, branch=50 + rest, shared=0, count=70)
        (turn,) = home.ask(first)
        prompt = (*first.prompt, *turn.tokens, *stream(rest, 9))
        (sequence,) = home.ask(Request(prompt, GREEDY, 8))
        assert sequence.cached == (len(first.prompt) - 1) // GRID * GRID


def test_salts_part_the_cache(house: Callable[..., House]) -> None:
    home = house()
    home.ask(request(129), salt="one")
    assert home.cached(request(140).prompt, salt="another") == 0
    assert home.cached(request(140).prompt) == 0
    assert home.cached(request(140).prompt, salt="one") == 128


def test_tokens_looked_up_and_found_are_counted_once_a_request(house: Callable[..., House]) -> None:
    home = house(pages=4, sequences=4)
    home.ask(request(449))
    group = [request(488 + i, WARM, 3 + i, 448, count=40) for i in range(4)]
    sequences = home.ask(*group)
    assert home.loop.scheduler.preemptions > 0
    assert home.cache.queries == 449 + sum(len(sequence.prompt) for sequence in sequences)
    assert home.cache.hits == sum(sequence.cached for sequence in sequences)


# Who makes room


def test_the_least_recently_used_goes_first(house: Callable[..., House]) -> None:
    home = house(snapshots=2)
    one, two, three = (request(129, branch=branch, shared=0) for branch in (1, 2, 3))
    home.ask(one)
    home.ask(two)
    assert home.cached(one.prompt) == 128  # used: now `two` is the oldest
    home.ask(three)
    assert home.cached(two.prompt) == 0  # which makes it known again, and `one` the oldest
    assert home.cached(three.prompt) == 128
    assert home.cached(one.prompt) == 0


def test_states_stay_within_their_budget(house: Callable[..., House]) -> None:
    for snapshots in (0, 1, 2, 5):
        home = house(pages=40, snapshots=snapshots)
        size = home.loop.scheduler.memory.slots.new_prompt_state().bytes
        for branch in range(8):
            home.ask(request(129, branch=branch, shared=0, count=2))
            assert home.cache.bytes == len(home.cache) * size <= snapshots * size
        assert len(home.cache) == snapshots


def test_snapshots_make_room_for_sequences(house: Callable[..., House]) -> None:
    home = house(pages=3, sequences=1)
    for branch in range(5):
        home.ask(request(129, branch=branch, shared=0, count=2))
    assert len(home.cache) <= 3
    home.ask(request(1100, branch=9, shared=0, count=2))
    assert home.loop.scheduler.memory.table.free <= 3


def test_a_prompt_that_waits_for_room_empties_no_cache(house: Callable[..., House]) -> None:
    home = house(pages=5, sequences=2)
    home.ask(request(129))
    before = len(home.cache)
    long = [Job(home.loop, request(1100, branch=b, shared=0, count=30), None) for b in (3, 4)]
    with torch.inference_mode():
        for job in long:
            home.loop.add(job.sequence)
        for _ in range(10):
            home.loop.turn()
        assert long[0].sequence.place is not None
        assert long[1].sequence.place is None
        assert len(home.cache) >= before
        home.loop.finish()


def test_snapshots_whose_pages_are_in_use_anyhow_do_not_make_room(house: Callable[..., House]) -> None:
    home = house(pages=5, sequences=2)
    home.ask(request(1025, count=2))  # two whole pages
    home.ask(request(129, branch=3, shared=0, count=2))  # and one of another beginning
    holder = Job(home.loop, request(1030, branch=4, shared=1024, count=40), None)
    with torch.inference_mode():
        home.loop.add(holder.sequence)
        home.loop.turn()
        assert holder.sequence.cached == 1024
        home.loop.add((newcomer := Job(home.loop, request(700, branch=5, shared=0, count=2), None)).sequence)
        home.loop.turn()
        assert newcomer.sequence.place is not None
        home.loop.finish()
    assert home.cached(request(1030, branch=6, shared=1024).prompt) == 1024
    assert home.cached(request(129, branch=3, shared=0).prompt) == 0


def test_pages_are_shared_whole_and_copied_in_part(house: Callable[..., House]) -> None:
    home = house(pages=12)
    home.ask(request(577))
    pair = [Job(home.loop, request(600 + b, branch=b, shared=576, count=30), home.mtp) for b in (3, 4)]
    with torch.inference_mode():
        for job in pair:
            home.loop.add(job.sequence)
        while pair[1].sequence.place is None:
            home.loop.turn()
        places = [job.sequence.place for job in pair]
        assert places[0] is not None
        assert places[1] is not None
        assert places[0].pages[0] == places[1].pages[0]
        assert set(places[0].pages[1:]).isdisjoint(places[1].pages[1:])
    home.finish(*pair)


def test_all_pages_are_free_once_the_cache_is_cleared(house: Callable[..., House]) -> None:
    home = house(pages=20)
    for rest in range(0, 600, 37):
        home.ask(request(1 + rest, branch=rest, shared=rest // 2, count=2))
    table = home.loop.scheduler.memory.table
    assert table.free < table.total
    assert home.loop.scheduler.usage == 0
    home.cache.clear()
    assert (table.free, home.cache.bytes, len(home.cache)) == (table.total, 0, 0)


# Mutants


def keeping_after_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also remembers what decoding left at a boundary: the state after two folded chunks of generated rows."""
    step = Loop._step

    def step_and_keep(loop: Loop, batch: list[Sequence], alone: bool) -> None:
        step(loop, batch, alone)
        cache, slots = loop.scheduler.prefix, loop.scheduler.memory.slots
        for sequence in batch:
            if cache is None or sequence.place is None or sequence.replayed < 3 * CHUNK:
                continue
            start, slot = len(sequence.prompt) + 2 * CHUNK, sequence.place.slot
            if start % GRID or slots.bases[slot] != 2 * CHUNK:
                continue
            columns = slots.columns[:, slot, [(2 * CHUNK - i) % COLUMN_RING for i in (3, 2, 1)]]
            place = Place(start, sequence.place.pages, PromptState(slots.S[:, slot].clone(), columns))
            cache.keep((*sequence.prompt, *sequence.tokens), sequence.salt, start, place, set())

    monkeypatch.setattr(Loop, "_step", step_and_keep)


def without_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = prefix_module._keys
    monkeypatch.setattr(prefix_module, "_keys", lambda prompt, salt: keys(prompt, ""))


def by_single_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(prompt: Ids[int], salt: str) -> list[bytes]:
        return [b"", *(bytes(prompt[i : i + GRID]) for i in range(0, len(prompt) - len(prompt) % GRID, GRID))]

    monkeypatch.setattr(prefix_module, "_keys", keys)


def up_to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_module, "_last_boundary", lambda prompt: prompt // GRID * GRID)


def with_one_state_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptState, "copy", lambda state: state)


def without_copies_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "copy", lambda *_: None)


def without_copies_of_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(memory: Memory, source: int, target: int, rows: int) -> None:
        for pool in (memory.cache, *memory._blocks.values()):
            pool.copy(source, target, rows)

    monkeypatch.setattr(Memory, "copy", copy)


def without_copies_of_drafter_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = KeyValuePages.copy

    def copy_trunk(pool: KeyValuePages, source: int, target: int, rows: int) -> None:
        if 0 not in pool.index:  # the drafter's only layer; the trunk's attention is layer 1
            copy(pool, source, target, rows)

    monkeypatch.setattr(KeyValuePages, "copy", copy_trunk)


def taking_drafter_rows_for_known(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = RecursiveDrafter.resume

    def resume_known(drafter: RecursiveDrafter, state: RecursiveState, boundary: int, known: bool) -> None:
        resume(drafter, state, boundary, True)

    monkeypatch.setattr(RecursiveDrafter, "resume", resume_known)


def with_the_state_a_chunk_early(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = PrefixCache.keep

    def keep_early(
        cache: PrefixCache, prompt: Ids[int], salt: str, boundary: int, place: Place, blocks: set[str]
    ) -> None:
        keep(cache, prompt, salt, boundary - GRID or boundary, place, blocks)

    monkeypatch.setattr(PrefixCache, "keep", keep_early)


def counting_every_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    count = PrefixCache.count
    begin = PrefixCache.begin

    def begin_and_count(cache: PrefixCache, prompt: Ids[int], salt: str, pages: int, look_up: bool = True) -> object:
        count(cache, len(prompt), 0)
        return begin(cache, prompt, salt, pages, look_up)

    monkeypatch.setattr(PrefixCache, "begin", begin_and_count)


def first_in_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue(prefix_module.OrderedDict):  # type: ignore[name-defined, misc]
        def move_to_end(self, key: bytes, last: bool = True) -> None:
            pass

    monkeypatch.setattr(prefix_module, "OrderedDict", Queue)


def every_remainder(house: Callable[..., House]) -> None:
    test_an_answer_after_a_hit_is_the_same_for_every_remainder(house, 128, 9)


def rows_made_anew(house: Callable[..., House]) -> None:
    test_drafts_are_as_good_where_the_beginning_was_run_without_a_drafter(house, 128)


MUTANTS = [
    (keeping_after_decoding, test_what_was_generated_is_run_again_as_a_prompt),
    (without_salt, test_salts_part_the_cache),
    (by_single_chunks, test_a_beginning_is_known_only_after_the_same_tokens),
    (up_to_the_last_token, test_a_hit_ends_before_the_prompts_last_token),
    (with_one_state_for_all, test_an_answer_after_a_hit_is_the_same_in_company),
    (without_copies_of_pages, every_remainder),
    (with_the_state_a_chunk_early, every_remainder),
    (without_copies_of_hidden_states, every_remainder),
    (without_copies_of_drafter_rows, every_remainder),
    (taking_drafter_rows_for_known, rows_made_anew),
    (counting_every_admission, test_tokens_looked_up_and_found_are_counted_once_a_request),
    (first_in_first_out, test_the_least_recently_used_goes_first),
]


@pytest.mark.parametrize(("breaks", "check"), MUTANTS, ids=[breaks.__name__ for breaks, _ in MUTANTS])
def test_a_broken_cache_is_seen(
    breaks: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Callable[..., House]], None],
    house: Callable[..., House],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(house)
    breaks(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check(house)
