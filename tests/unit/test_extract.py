"""Extraction: hidden states bitwise those of serving, held to the captured logprobs; resumed, capped, refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.drafters.mtp import mtp_drafter
from backend.drafters.protocol import Choose, Proposal
from backend.drafters.recursive import RecursiveDrafter
from backend.engine.memory import Memory
from backend.engine.parameters import SamplingParams
from backend.engine.probe import probe
from backend.engine.runner import Runner
from backend.interface import BackendError
from backend.loading import Loaded, LocalOptions, load
from capture.export_npz import export_npz
from capture.records import Generation
from capture.store import Store
from tests.capture_rows import generation, write
from tests.decoding import Outcome, Request, decode
from tests.factory import WIDTHS_08B, Shape
from tests.factory import build as random_model
from training.cli import main
from training.data import Document, Forced, Scalars, find_shards, read_documents
from training.errors import TrainingError
from training.extract import ExtractOptions, extract, plan, read_forced, read_manifest
from training.force import Readings, force_documents, force_each
from training.forced import digest, read_shard, shards_of, write_shard

SCALARS = ("log_z", "argmax", "chosen_logprob", "hot_mass")
LENGTHS = ((70, 26), (5, 40), (130, 1), (64, 12), (63, 30), (3, 9))  # of prompt and answer
HOT = list(range(0, 400, 2))
MANIFEST_READ = ("format", "format_version", "fingerprints", "dtype", "d2t_sha256", "counts", "shards")


def ids(count: int, vocab: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab, count).tolist())


def document(prompt: Sequence[int], answer: Sequence[int], name: str = "one") -> Document:
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    return Document(name, tokens, len(prompt), np.full(len(tokens), np.nan, dtype=np.float32), held_out=False)


def assert_equal_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# Forcing


class Watched:
    """The native drafter, and by sequence every hidden state it is given."""

    def __init__(self, drafter: RecursiveDrafter) -> None:
        self._drafter = drafter
        self.name, self.fingerprint, self.block = drafter.name, drafter.fingerprint, drafter.block
        self.given: dict[tuple[int, ...], list[Tensor]] = {}
        self.observed: dict[tuple[int, ...], bool] = {}

    def attach(self, memory: Memory) -> None:
        self._drafter.attach(memory)

    def new_state(self, prompt: Sequence[int], pages: list[int]) -> Any:
        self.given[tuple(prompt)] = []
        return self._drafter.new_state(prompt, pages)

    def resume(self, state: Any, boundary: int, known: bool) -> None:
        self._drafter.resume(state, boundary, known)

    def prefill(self, state: Any, tokens: Tensor, hidden: Tensor, start: int, valid: int) -> None:
        self.given[tuple(state.prompt)].append(hidden[0, :valid].clone())
        self._drafter.prefill(state, tokens, hidden, start, valid)

    def observe(self, state: Any, tokens: Sequence[int], hidden: Tensor) -> None:
        rows = self.given[tuple(state.prompt)]
        if not self.observed.get(tuple(state.prompt)):  # of the prompt's last row, told before
            rows[-1] = rows[-1][:-1]
        self.observed[tuple(state.prompt)] = True
        rows.append(hidden.clone())
        self._drafter.observe(state, tokens, hidden)

    def propose(self, states: Sequence[Any], counts: Sequence[int], choose: Choose) -> Proposal:
        return self._drafter.propose(states, counts, choose)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_hidden_states_are_bitwise_those_a_drafter_is_given_while_serving(dtype: torch.dtype) -> None:
    assert_as_served(Runner(random_model(Shape()).to(dtype)))


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_they_are_at_the_widths_of_the_08b_with_two_threads(dtype: torch.dtype) -> None:
    runner = Runner(random_model(replace(WIDTHS_08B, vocab=320)).to(dtype))
    with torch.inference_mode():
        probe(runner)
    assert_as_served(runner)


def assert_as_served(runner: Runner) -> None:
    drafter = Watched(mtp_drafter(runner.model, "native"))
    requests = [
        Request(ids(prompt, 320, seed), SamplingParams(temperature=0.7, seed=seed), max_tokens=answer)
        for seed, (prompt, answer) in enumerate(LENGTHS)
    ]
    outcomes = decode(runner, drafter, 3, requests, together=4)
    told = [document(request.prompt, out.tokens) for request, out in zip(requests, outcomes, strict=True)]
    for forced, request, out in zip(force_documents(runner, told), requests, outcomes, strict=True):
        given = torch.cat(drafter.given[request.prompt])
        assert len(given) >= len(request.prompt) + len(out.tokens) - 5  # all but those of the last step
        assert_equal_bits(forced.hidden[: len(given)], given)


def test_documents_forced_together_have_the_bits_of_each_alone() -> None:
    runner = Runner(random_model(Shape()))
    documents = [document(ids(n, 320, seed), ids(m, 320, seed + 100)) for seed, (n, m) in enumerate([*LENGTHS, (2, 0)])]
    readings = Readings(vocab=300, hot=torch.arange(0, 320, 3))
    alone = list(force_each(runner, documents, readings, together=1))
    for together in (2, 7):
        for one, other in zip(alone, force_each(runner, documents, readings, together), strict=True):
            assert_equal_bits(one.hidden, other.hidden)
            for name in SCALARS:
                assert_equal_bits(getattr(one.scalars, name), getattr(other.scalars, name))


def test_scalars_are_of_the_rows_that_predict_the_answer() -> None:
    model = random_model(Shape())
    runner = Runner(model)
    hot = torch.arange(0, 320, 3)
    [forced] = force_documents(runner, [document(ids(7, 320, 1), ids(30, 320, 2))], readings=Readings(300, hot))
    scalars = forced.scalars
    assert scalars is not None
    with torch.inference_mode():
        logits = model.logits(forced.hidden).double()
    rows = slice(6, 36)
    following = torch.from_numpy(forced.document.tokens[7:]).long()
    logprobs = logits.log_softmax(-1)[rows]
    torch.testing.assert_close(scalars.log_z[rows].double(), logits.logsumexp(-1)[rows])
    torch.testing.assert_close(scalars.chosen_logprob[rows].double(), logprobs.gather(-1, following[:, None])[:, 0])
    mass = logprobs.exp()[:, hot].sum(-1)
    torch.testing.assert_close(scalars.hot_mass[rows].double(), mass, rtol=1e-5, atol=0)
    assert torch.equal(scalars.argmax[rows], logits[rows, :300].argmax(-1))
    for outside in (slice(0, 6), slice(36, 37)):
        assert not scalars.argmax[outside].any()
        assert all(getattr(scalars, name)[outside].isnan().all() for name in ("log_z", "chosen_logprob", "hot_mass"))


def test_gradients_can_flow_through_what_reads_forced_states() -> None:
    runner = Runner(random_model(Shape()))
    [forced] = force_documents(runner, [document([1, 2, 3], [4, 5])])
    weight = torch.ones(64, requires_grad=True)
    (forced.hidden.float() * weight).sum().backward()
    assert weight.grad is not None


# From answers to a folder


@dataclass
class Served:
    """What the bundled model said, as rows, and what it was loaded as."""

    loaded: Loaded
    rows: list[Generation]


@pytest.fixture(scope="module")
def served() -> Served:
    loaded = load(LocalOptions(drafter="none", max_num_seqs=1, max_model_len=256, prefix_cache=False, threads=1))
    requests = [
        Request(
            ids(prompt, 2000, seed), SamplingParams(temperature=0.7 * (seed % 2), seed=seed), max_tokens=min(answer, 12)
        )
        for seed, (prompt, answer) in enumerate(LENGTHS)
    ]
    outcomes = decode(loaded.runner, None, 0, requests, together=3)
    return Served(loaded, [row_of(loaded, *pair) for pair in zip(requests, outcomes, strict=True)])


_load = cache(load)


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes longer than what most of these tests are about."""
    monkeypatch.setattr("training.extract.load", _load)


def row_of(loaded: Loaded, request: Request, outcome: Outcome) -> Generation:
    prints, params = loaded.fingerprints, request.params
    return generation(
        weights_fingerprint=prints.weights,
        tokenizer_fingerprint=prints.tokenizer,
        template_fingerprint=prints.chat_template,
        build=prints.build,
        prompt_tokens=list(request.prompt),
        completion_tokens=list(outcome.tokens),
        logprobs=list(outcome.logprobs),
        seed=params.seed,
        parameters={"temperature": params.temperature},
        request={"messages": [], "metadata": {"class": f"kind {params.seed % 2}"}},
    )


def exported(tmp_path: Path, rows: Sequence[Generation], name: str = "export") -> Path:
    with Store.open(write(tmp_path / f"{name}.db", *rows)) as store:
        return export_npz(store, tmp_path / name).folder


def options(tmp_path: Path, export: Path, **changed: Any) -> ExtractOptions:
    given: dict[str, Any] = {"inputs": (export,), "model": "tiny", "out": tmp_path / "forced", "threads": 1}
    return ExtractOptions(**given | changed)


def hot_vocab(tmp_path: Path, served: Served, listed: Sequence[int] = HOT) -> Path:
    none = Coverage(covered=0, tokens=0)
    header = Header(tokenizer=served.loaded.tokenizer.fingerprint, train=none, held_out=none, sources=[])
    path = tmp_path / f"hot-{len(listed)}.safetensors"
    HotVocab(torch.tensor(listed, dtype=torch.int32), torch.ones(len(listed), dtype=torch.int64), header).save(path)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_answers_come_out_with_their_states_and_every_logprob_agrees(tmp_path: Path, served: Served) -> None:
    export = exported(tmp_path, served.rows)
    hot = hot_vocab(tmp_path, served)
    told: list[tuple[str, int, int]] = []
    asked = options(tmp_path, export, hot_vocab=hot)
    folder = extract(asked, lambda *progress: told.append(progress))
    manifest = read_manifest(folder)
    answers = sum(len(row.completion_tokens or ()) for row in served.rows)
    assert manifest["counts"]["documents"] == len(served.rows)
    assert manifest["counts"]["answer_tokens"] == answers
    assert manifest["counts"]["bytes"] <= plan(asked).bytes
    same = manifest["gate"]["same_build"]
    assert (same["documents"], same["tokens"], same["differing"], same["largest"]) == (len(LENGTHS), answers, 0, 0)
    assert same["greedy_tokens"] == same["greedy_agreeing"] > 0
    assert manifest["fingerprints"]["weights"] == served.loaded.fingerprints.weights
    assert (manifest["norm"], manifest["dtype"]) == ("post", "bfloat16")
    assert manifest["d2t_sha256"] == HotVocab.load(hot, served.loaded.tokenizer.fingerprint, 10**6).fingerprint
    assert told[-1][1] == told[-1][2] == manifest["counts"]["tokens"]
    assert "MB to write" in told[0][0]

    captured = read_documents(find_shards([export]), served.loaded.tokenizer.fingerprint, 10**6)
    fresh = force_documents(served.loaded.runner, captured, readings=Readings(served.loaded.vocab, torch.tensor(HOT)))
    for one, source, anew in zip(read_forced(folder), captured, fresh, strict=True):
        found = one.document
        assert (found.id, found.prompt_length, found.held_out) == (source.id, source.prompt_length, source.held_out)
        assert (found.seed, found.sampling, found.tags) == (source.seed, source.sampling, source.tags)
        assert found.sampling is not None
        assert found.tags["class"].startswith("kind")
        np.testing.assert_array_equal(found.tokens, source.tokens)
        np.testing.assert_array_equal(found.logprobs, source.logprobs)
        assert_equal_bits(one.hidden, anew.hidden)
        assert one.scalars is not None
        assert anew.scalars is not None
        assert_equal_bits(one.scalars.log_z, anew.scalars.log_z)
        assert torch.equal(one.scalars.argmax, anew.scalars.argmax)
        expected = anew.scalars.hot_mass.half().float()
        torch.testing.assert_close(one.scalars.hot_mass, expected, equal_nan=True, rtol=0, atol=0)


def test_a_split_is_read_alone(tmp_path: Path, served: Served) -> None:
    folder = extract(options(tmp_path, exported(tmp_path, served.rows)))
    whole, held_out, train = ([one.document.id for one in read_forced(folder, split)] for split in (None, True, False))
    assert sorted(held_out + train) == sorted(whole)
    assert all(one.document.held_out for one in read_forced(folder, True))


class Killed(BaseException):
    """The process ends here."""


def test_a_run_killed_at_any_shard_goes_on_to_the_same_files(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = exported(tmp_path, served.rows[3:])
    small = {"shard_bytes": 1}
    straight = files(extract(options(tmp_path, export, out=tmp_path / "straight", **small)))
    shards = sum(name.endswith(".npz") for name in straight)
    assert shards == 3
    written: list[int] = []

    def write_or_die(*arguments: Any) -> None:
        write_shard(*arguments)
        written.append(len(written))
        if len(written) == at:
            raise Killed  # before the file has its name

    monkeypatch.setattr("training.extract.write_shard", write_or_die)
    for at in range(1, shards + 1):
        asked = options(tmp_path, export, out=tmp_path / f"killed-{at}", **small)
        written.clear()
        with pytest.raises(Killed):
            extract(asked)
        with pytest.raises(TrainingError, match="no complete extraction"):
            list(read_forced(asked.out))
        extract(asked)
        assert len(written) == shards + 1  # the one it died at was made twice
        assert files(asked.out) == straight


def test_a_complete_folder_is_kept_and_a_damaged_shard_made_anew(tmp_path: Path, served: Served) -> None:
    asked = options(tmp_path, exported(tmp_path, served.rows), shard_bytes=60_000)
    before = files(extract(asked))
    times = {path.name: path.stat().st_mtime_ns for path in asked.out.glob("*.npz")}
    (asked.out / "forced-00001.npz").write_bytes(b"damaged")
    with pytest.raises(TrainingError, match="is not the file that its manifest names"):
        list(read_forced(asked.out))
    assert files(extract(asked)) == before
    kept = {path.name for path in asked.out.glob("*.npz") if path.stat().st_mtime_ns == times[path.name]}
    assert kept == times.keys() - {"forced-00001.npz"}


def test_a_folder_of_another_extraction_is_refused(tmp_path: Path, served: Served) -> None:
    asked = options(tmp_path, exported(tmp_path, served.rows[:2]))
    extract(asked)
    other = exported(tmp_path, served.rows[1:3], "other")
    for changed, said in (
        ({"inputs": (other,)}, "another sources"),
        ({"hot_vocab": hot_vocab(tmp_path, served)}, "another d2t_sha256"),
        ({"dtype": "float32"}, "another fingerprints, dtype"),
    ):
        with pytest.raises(TrainingError, match=said):
            extract(replace(asked, **changed))


def test_a_folder_of_something_else_is_refused(tmp_path: Path, served: Served) -> None:
    asked = options(tmp_path, exported(tmp_path, served.rows[:1]))
    asked.out.mkdir()
    (asked.out / "letters.txt").write_text("mine")
    with pytest.raises(TrainingError, match="is not empty"):
        extract(asked)
    with pytest.raises(TrainingError, match="no complete extraction"):
        read_manifest(asked.out)
    assert [path.name for path in asked.out.iterdir()] == ["letters.txt"]


def test_more_than_may_be_written_is_refused_before_anything_is(tmp_path: Path, served: Served) -> None:
    asked = options(tmp_path, exported(tmp_path, served.rows))
    size = plan(asked).bytes / 1e9
    with pytest.raises(TrainingError, match=r"6 documents of \d+ tokens take 0\.\d\d MB, --max-gb allows 1e-05 GB"):
        extract(replace(asked, max_gb=1e-5))
    assert not asked.out.exists()
    assert read_manifest(extract(replace(asked, max_gb=size)))["counts"]["bytes"] <= size * 1e9


def test_a_disk_without_room_is_refused(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = options(tmp_path, exported(tmp_path, served.rows))
    full = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda place: full)
    with pytest.raises(TrainingError, match=r"has 0\.\d\d MB free"):
        extract(asked)


def command(*arguments: object) -> tuple[int, str, str]:
    """`training …` in this process, as its entry point runs it: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        patch.setattr("sys.argv", ["training", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_the_command_tells_what_it_would_write_and_what_it_wrote(tmp_path: Path, served: Served) -> None:
    export, out = exported(tmp_path, served.rows), tmp_path / "forced"
    asked = ("extract", export, "--out", out, "--threads", 1)
    tokens = sum(len(row.prompt_tokens or ()) + len(row.completion_tokens or ()) for row in served.rows)
    code, told, _ = command(*asked, "--dry-run")
    assert (code, out.exists()) == (0, False)
    assert re.search(rf"6 documents, {tokens} tokens: 0\.\d\d MB at most, in 1 shards", told)
    code, _, complaint = command(*asked, "--max-gb", "1e-9")
    assert code == 2
    assert complaint.splitlines()[-1].startswith("error: 6 documents of")
    code, told, _ = command(*asked)
    assert code == 0
    assert told.splitlines()[-1] == str(out)
    assert re.search(r"this build +│ 6 +│ \d+ +│ 0 ", told)
    [*_, line] = (tmp_path / "ledger.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["command"], entry["outcome"]) == ("extract", "ok")
    assert entry["figures"]["counts"]["tokens"] == tokens
    code, told, _ = command("targets", out, "--hot-vocab", hot_vocab(tmp_path, served), "--top", 8, "--threads", 1)
    rows = sum(len(row.completion_tokens or ()) - 1 for row in served.rows)
    assert code == 0
    assert re.search(rf"6 documents, {rows} base rows of 4 slots", told)
    assert told.splitlines()[-1] == str(out / "targets.json")


# The gate


def flipped(logprobs: Any, at: int) -> list[float]:
    bits = np.array(logprobs, dtype=np.float32)
    bits.view(np.uint32)[at] ^= 1
    return [float(value) for value in bits]


def test_one_flipped_bit_of_a_logprob_is_found(tmp_path: Path, served: Served) -> None:
    wrong = replace(served.rows[1], logprobs=flipped(served.rows[1].logprobs, 7))
    asked = options(tmp_path, exported(tmp_path, [served.rows[0], wrong]))
    with pytest.raises(TrainingError, match=f"{wrong.id} cannot be .* its token 7 of 12 .* and 1 differ in all"):
        extract(asked)


def test_one_changed_token_is_found(tmp_path: Path, served: Served) -> None:
    tokens = list(served.rows[1].completion_tokens or ())
    tokens[3] = (tokens[3] + 1) % 2000
    wrong = replace(served.rows[1], completion_tokens=tokens)
    with pytest.raises(TrainingError, match=f"{wrong.id} cannot be .* its token 3 of 12"):
        extract(options(tmp_path, exported(tmp_path, [wrong])))


def test_differences_from_another_build_are_counted_and_named(tmp_path: Path, served: Served) -> None:
    [logprob] = np.asarray(served.rows[2].logprobs)
    elsewhere = replace(served.rows[2], build="another machine", logprobs=[logprob - 0.5])
    unknown = replace(served.rows[4], logprobs=None)
    gate = read_manifest(extract(options(tmp_path, exported(tmp_path, [served.rows[1], elsewhere, unknown]))))["gate"]
    other = gate["other_build"]
    assert (other["documents"], other["tokens"], other["differing"]) == (1, 1, 1)
    assert other["largest"] == other["mean"] == pytest.approx(0.5, abs=1e-6)
    assert (other["greedy_tokens"], other["greedy_agreeing"]) == (1, 1)
    assert gate["same_build"]["documents"] == gate["no_logprobs"]["documents"] == 1


def test_answers_of_other_weights_are_refused(tmp_path: Path, served: Served) -> None:
    other = replace(served.rows[0], weights_fingerprint="e" * 64)
    with pytest.raises(TrainingError, match=f"{other.id} was generated by other weights \\(eeeeeeeeeeee\\)"):
        extract(options(tmp_path, exported(tmp_path, [other])))


def test_answers_of_another_tokenizer_are_refused(tmp_path: Path, served: Served) -> None:
    other = replace(served.rows[0], tokenizer_fingerprint="e" * 64)
    with pytest.raises(TrainingError, match="of another tokenizer"):
        extract(options(tmp_path, exported(tmp_path, [other])))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, served: Served) -> None:
    with pytest.raises(BackendError):
        extract(options(tmp_path, exported(tmp_path, served.rows[:1]), model=str(tmp_path / "nowhere")))


# Exports that are older than seeds


def without_each(told: Any) -> Iterator[Any]:
    """The same less one of its entries, or with one that is nothing of the kind, at any depth."""
    if isinstance(told, dict):
        for name, value in told.items():
            yield {other: one for other, one in told.items() if other != name}
            yield from ({**told, name: changed} for changed in without_each(value))
    elif isinstance(told, list):
        yield from ([changed, *told[1:]] for one in told[:1] for changed in without_each(one))
    yield from (value for value in (17, [], {"a": 1}, "x") if type(value) is not type(told))


def test_a_manifest_is_read_or_refused_whatever_it_says(tmp_path: Path, served: Served) -> None:
    export = exported(tmp_path, served.rows[:1])
    folder = extract(options(tmp_path, export, hot_vocab=hot_vocab(tmp_path, served)))
    path = folder / "manifest.json"
    whole = {name: value for name, value in read_manifest(folder).items() if name in MANIFEST_READ}
    refused: list[str] = []
    for changed in without_each(whole):
        path.write_text(json.dumps(changed))
        try:
            found = read_manifest(folder)
            list(read_forced(folder))
        except TrainingError as error:
            refused.append(str(error))
        else:  # what is in a manifest's place is of the kind that its readers take for granted
            assert {name: type(found[name]) for name in MANIFEST_READ} == {n: type(v) for n, v in whole.items()}
            assert all(isinstance(one, str) for one in found["fingerprints"].values())
    assert len(refused) > 40
    assert not any("\n" in line for line in refused)


def without(folder: Path, names: Sequence[str]) -> Path:
    """The export's one shard as a file of its own, members taken out."""
    with np.load(folder / "shard-00000.npz") as archive:
        arrays = {name: archive[name] for name in archive.files if name not in names}
    path = folder.with_suffix(".npz")
    np.savez(path, **arrays)
    return path


def test_an_older_export_is_read_without_seeds_and_held_to_its_one_build(tmp_path: Path, served: Served) -> None:
    old = without(exported(tmp_path, served.rows), ("seeds", "sampling", "builds", "tags"))
    documents = read_documents(find_shards([old]), served.loaded.tokenizer.fingerprint, 10**6)
    assert [(one.seed, one.sampling, one.tags) for one in documents] == [(None, None, {})] * len(LENGTHS)
    folder = extract(options(tmp_path, old))
    assert read_manifest(folder)["gate"]["same_build"]["documents"] == len(LENGTHS)
    assert all(one.document.sampling is None for one in read_forced(folder))


def test_an_older_export_of_several_builds_cannot_be_held_to_one(tmp_path: Path, served: Served) -> None:
    rows = [served.rows[0], replace(served.rows[2], build="another machine", logprobs=[-3.0])]
    old = without(exported(tmp_path, rows), ("seeds", "sampling", "builds", "tags"))
    gate = read_manifest(extract(options(tmp_path, old)))["gate"]
    assert gate["unknown_build"]["documents"] == 2
    assert gate["unknown_build"]["differing"] == 1


# The format


@st.composite
def forced_documents(draw: st.DrawFn) -> list[Forced]:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(draw(st.integers(1, 5))):
        prompt, answer = draw(st.integers(1, 6)), draw(st.integers(0, 6))
        length = prompt + answer
        scalars = Scalars(
            torch.randn(length, generator=generator),
            torch.randint(0, 2**31, (length,), generator=generator),
            torch.randn(length, generator=generator),
            torch.rand(length, generator=generator).half().float(),
        )
        logprobs = np.full(length, np.nan, dtype=np.float32)
        logprobs[prompt:] = scalars.chosen_logprob[prompt - 1 : -1].numpy()
        sampling = draw(st.none() | st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 0.7])}))
        one = Document(
            id=f"{seed}-{index}",
            tokens=torch.randint(0, 2**31, (length,), generator=generator).numpy().astype(np.int32),
            prompt_length=prompt,
            logprobs=logprobs,
            held_out=draw(st.booleans()),
            seed=None if sampling is None else draw(st.integers(0, 2**64 - 1)),
            sampling=sampling,
            tags=draw(st.dictionaries(st.sampled_from(["class", "client"]), st.text(max_size=3))),
        )
        found.append(Forced(one, torch.randn(length, 8, generator=generator).to(dtype), scalars))
    return found


@settings(max_examples=30, deadline=None)
@given(forced_documents())
def test_a_shard_reads_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, told: list[Forced]) -> None:
    path = tmp_path_factory.mktemp("round") / "shard.npz"
    dtype = str(told[0].hidden.dtype).removeprefix("torch.")
    with path.open("wb") as file:
        write_shard(file, told, {"dtype": dtype, "fingerprints": {"weights": "w", "build": "b"}})
    [(_, reckoned)] = shards_of([one.document for one in told], 8, dtype)
    assert path.stat().st_size <= reckoned
    for one, other in zip(told, read_shard(path, digest(path)), strict=True):
        kept = ("id", "prompt_length", "held_out", "seed", "sampling", "tags")
        assert [getattr(one.document, name) for name in kept] == [getattr(other.document, name) for name in kept]
        np.testing.assert_array_equal(one.document.tokens, other.document.tokens)
        np.testing.assert_array_equal(one.document.logprobs, other.document.logprobs)
        assert (other.document.weights, other.document.build) == ("w", "b")
        assert_equal_bits(one.hidden, other.hidden)
        for name in SCALARS:
            assert_equal_bits(getattr(one.scalars, name), getattr(other.scalars, name))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 60_000), st.sampled_from([8, 4096]))
def test_shards_hold_whole_documents_in_order_and_only_one_alone_may_be_too_large(
    lengths: list[int], limit: int, hidden: int
) -> None:
    documents = [document([1], [2] * (length - 1), str(index)) for index, length in enumerate(lengths)]
    shards = shards_of(documents, hidden, "bfloat16", limit)
    assert [one.id for members, _ in shards for one in members] == [one.id for one in documents]
    assert all(size <= limit or len(members) == 1 for members, size in shards)
    alone = sum(size for one in documents for _, size in shards_of([one], hidden, "bfloat16", limit))
    assert sum(size for _, size in shards) <= alone
