"""Which rows of many are taken: the same sample every time, no loops, no near-duplicates, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from capture import selection
from capture.cli import app
from capture.export import Export, Wanted
from capture.export_npz import export_npz
from capture.filters import Filters
from capture.selection import NearDuplicates, Sample, loops, sample_key
from capture.store import Store
from tests.capture_rows import generation, write
from training import repetition


def ids(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def drawn(seed: int, count: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 100_000, count).astype(np.uint32)


@given(st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 2**31 - 1), max_size=60))
def test_what_loops_here_loops_where_models_are_judged(tokens: list[int]) -> None:
    assert loops(ids(*tokens)) == repetition.loops(tokens)


def test_eight_tokens_that_stand_three_times_are_a_loop_and_twice_are_none() -> None:
    gram = list(range(8))
    assert not loops(ids(*gram, 90, *gram))
    assert loops(ids(*gram, 90, *gram, 91, *gram))
    assert loops(ids(*[7] * 10))
    assert not loops(ids(*[7] * 9))


@pytest.mark.parametrize(
    ("text", "sample"),
    [("500", Sample(rows=500)), ("0.1", Sample(share=0.1)), ("25%", Sample(share=0.25)), ("1", Sample(rows=1))],
)
def test_a_sample_is_a_number_of_rows_or_a_share(text: str, sample: Sample) -> None:
    assert Sample.parse(text) == sample


@pytest.mark.parametrize("text", ["", "0", "0.0", "1.5", "-3", "100%", "10%%", "many", "nan", "1e400"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Sample.parse(text)


def exported(path: Path, out: Path, **wanted: Any) -> tuple[Export, set[str]]:
    with Store.open(path) as store:
        result = export_npz(store, out, Wanted(**wanted))
    names: set[str] = set()
    for shard in result.shards:
        with np.load(out / shard.file) as arrays:
            names |= set(arrays["doc_ids"].tolist())
    return result, names


def test_a_sample_is_the_same_whenever_it_is_taken_and_grows_by_rows(tmp_path: Path) -> None:
    rows = [generation() for _ in range(400)]
    path = write(tmp_path / "capture.db", *rows)
    taken = {
        name: exported(path, tmp_path / str(name), sample=Sample.parse(name, seed))
        for name, seed in (("50", 0), ("120", 0), ("0.3", 0), ("121", 1))
    }
    again = exported(path, tmp_path / "again", sample=Sample.parse("50"))[1]
    assert again == taken["50"][1] < taken["120"][1]
    assert [len(names) for _, names in taken.values()][:2] == [50, 120]
    assert 80 < len(taken["0.3"][1]) < 160
    assert len(taken["121"][1] & taken["120"][1]) < 80
    assert taken["50"][0].skipped.not_sampled == 350
    whole = exported(path, tmp_path / "whole", sample=Sample(rows=1000))
    assert (len(whole[1]), whole[0].skipped.not_sampled) == (400, 0)


def test_a_sample_is_of_the_rows_that_were_chosen(tmp_path: Path) -> None:
    rows = [generation(model="a" if i % 4 else "b", status="failed" if i % 3 == 0 else "finished") for i in range(60)]
    path = write(tmp_path / "capture.db", *rows)
    result, names = exported(path, tmp_path / "out", rows=Filters(models=["b"]), sample=Sample(rows=7))
    assert names <= {row.id for row in rows if row.model == "b" and row.status == "finished"}
    assert (result.documents, result.skipped.unfinished, result.skipped.not_sampled) == (7, 5, 3)


def test_keys_are_spread_evenly_and_depend_on_the_seed() -> None:
    keys = [sample_key(str(i), 0) / 2**63 for i in range(4000)]
    assert all(360 < count < 440 for count in np.histogram(keys, bins=10, range=(0, 1))[0])
    assert sample_key("a", 0) != sample_key("a", 1)


def test_the_same_answer_to_the_same_question_is_seen_once() -> None:
    known = NearDuplicates()
    assert not known.seen(ids(1, 2, 3), ids(4, 5))
    assert known.seen(ids(1, 2, 3), ids(4, 5))
    assert not known.seen(ids(1, 2, 3), ids(4, 6))


def test_an_answer_with_a_few_other_words_is_nearly_the_same() -> None:
    known = NearDuplicates()
    found = 0
    for seed in range(100):
        prompt, answer = drawn(seed, 40), drawn(seed + 1000, 200)
        assert not known.seen(prompt, answer)
        changed = answer.copy()
        changed[[50, 150]] += 1  # of 196 shingles 10 are others: 0.9 are in common
        found += known.seen(prompt, changed)
    assert found >= 98


def test_half_of_an_answer_in_common_is_not_nearly_the_same() -> None:
    known = NearDuplicates()
    for seed in range(100):
        first, second, third = (drawn(3 * seed + i, 100) for i in range(3))
        assert not known.seen(first[:20], np.concatenate([first, second]))
        assert not known.seen(third[:20], np.concatenate([first, third]))


def test_another_word_for_an_answer_to_the_same_question_is_another_answer() -> None:
    known, question = NearDuplicates(), drawn(1, 2000)
    assert not any(known.seen(question, ids(word)) for word in range(20))


def test_a_short_answer_to_many_questions_is_no_duplicate() -> None:
    known, yes = NearDuplicates(), ids(42, 43)
    system = drawn(1, 2000)
    assert not any(known.seen(np.concatenate([system, drawn(seed, 30)]), yes) for seed in range(100))


def test_the_longest_rows_take_no_memory_to_speak_of() -> None:
    known = NearDuplicates()
    answer = drawn(5, 200_000)
    tracemalloc.start()
    try:
        assert not known.seen(answer[:10], answer)
        assert known.seen(answer[:10], answer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000


def test_what_was_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "REMEMBERED", 8)
    known = NearDuplicates()
    answers = [drawn(seed, 50) for seed in range(20)]
    assert not any(known.seen(answer[:5], answer) for answer in answers)
    assert known.seen(answers[-1][:5], answers[-1])
    assert not known.seen(answers[0][:5], answers[0])


def test_what_is_dropped_is_counted_and_the_first_of_its_kind_stays(tmp_path: Path) -> None:
    def said(tokens: NDArray[np.uint32]) -> Any:
        return generation(completion_tokens=tokens, logprobs=[])

    kept = [said(drawn(seed, 60)) for seed in range(5)]
    rows = [*kept, said(drawn(0, 60)), said(drawn(1, 60)), said(ids(*[1, 2, 3, 4, 5, 6, 7, 8] * 3))]
    path = write(tmp_path / "capture.db", *rows)
    result, names = exported(path, tmp_path / "out", near_duplicates=False, loops=False)
    assert names == {row.id for row in kept}
    assert (result.skipped.near_duplicates, result.skipped.loops) == (2, 1)
    everything, _ = exported(path, tmp_path / "all")
    assert everything.documents == 8


def test_other_weights_may_say_the_same(tmp_path: Path) -> None:
    rows = [generation(weights_fingerprint=name * 64) for name in "ab"]
    result, _ = exported(write(tmp_path / "capture.db", *rows), tmp_path / "out", near_duplicates=False)
    assert result.documents == 2


# The command


def command(path: Path, *arguments: str) -> Any:
    out = path.parent / f"out-{len(list(path.parent.iterdir()))}"
    return CliRunner().invoke(app, ["export", "--capture", str(path), "--out", str(out), *arguments])


@pytest.mark.parametrize("to", ["npz", "jsonl", "parquet"])
def test_the_command_says_what_it_dropped_and_why(tmp_path: Path, to: str) -> None:
    rows = [generation(completion_tokens=drawn(seed % 9, 20), logprobs=[]) for seed in range(10)]
    looping = generation(completion_tokens=[1] * 12, logprobs=[])
    path = write(tmp_path / "capture.db", *rows, looping, generation(status="failed"))
    done = command(path, "--to", to, "--drop-near-duplicates", "--drop-loops")
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        "9 documents; not exported: 1 row failed or cancelled (--include-unfinished exports them), 1 row that loop, "
        "1 row nearly the same as another\n"
    )
    manifest = json.loads((Path(done.stdout.strip()) / "manifest.json").read_text())
    skipped = {name: count for name, count in manifest["counts"]["skipped_rows"].items() if count}
    assert skipped == {"unfinished": 1, "near_duplicates": 1, "loops": 1}
    assert (manifest["wanted"]["near_duplicates"], manifest["wanted"]["sample"]) == (False, None)


def test_the_command_takes_filters_a_sample_and_a_style(tmp_path: Path) -> None:
    rows = [generation(model="a" if i % 2 else "b", client="c") for i in range(20)]
    path = write(tmp_path / "capture.db", *rows)
    done = command(path, "--to", "jsonl", "--style", "conversations", "--model", "b", "--sample", "3", "--seed", "8")
    assert done.exit_code == 0, done.output
    assert done.stderr == "3 documents; not exported: 7 rows not in the sample\n"
    text = (Path(done.stdout.strip()) / "shard-00000.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["id"] for line in lines} <= {row.id for row in rows if row.model == "b"}
    assert all(line["conversations"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "npz", "--style", "messages"], "only jsonl has styles"),
        (["--to", "jsonl", "--sample", "lots"], "--sample takes a number of rows or a share"),
        (["--to", "xml"], "xml"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = command(write(tmp_path / "capture.db", generation()), *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not list(tmp_path.glob("out*"))
