"""How far a list of ids carries a drafter, and a list that takes in what it was wrong about."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from backend.drafters.hot_vocab import Coverage, HotVocab
from backend.interface import BackendError
from capture.records import Generation
from tests.exports import PLAIN, SPECIAL, TINY, VOCAB, exported, row
from training.cli import main
from training.coverage import SLOTS, Answer, by_kind, reach
from training.data import find_shards
from training.errors import TrainingError
from training.hot_vocab import Built, Grown, build, grow

LISTED = np.arange(10) < 5  # ids 0 … 4 are in the list


def answers(*given: list[int]) -> list[np.ndarray]:
    return [np.array(answer, dtype=np.int32) for answer in given]


def shares(runs: list[Coverage]) -> list[tuple[int, int]]:
    return [(run.covered, run.tokens) for run in runs]


# How far a list carries


def test_a_run_is_the_tokens_after_an_anchor_all_of_them_in_the_list() -> None:
    # Anchors are 1, 2, 9 and 3: after 1 come [2 9 3 4], after 2 [9 3 4], after 9 [3 4], after 3 [4].
    found = reach("all", answers([1, 2, 9, 3, 4]), LISTED)
    assert (found.own.covered, found.own.tokens) == (4, 5)
    assert shares(found.runs) == [(3, 4), (1, 3), (0, 2), (0, 1)]
    assert found.chain_cap == pytest.approx((3 / 4 + 1 / 3) / 4)


def test_an_answer_of_one_token_has_no_anchor() -> None:
    found = reach("all", answers([1]), LISTED)
    assert shares(found.runs) == [(0, 0)] * SLOTS
    assert found.chain_cap is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=4))
def test_runs_are_what_looking_ahead_from_every_anchor_gives(texts: list[list[int]]) -> None:
    found = reach("all", answers(*texts), LISTED)
    for j, run in enumerate(found.runs):
        ahead = [text[p + 1 : p + 2 + j] for text in texts for p in range(len(text)) if p + 1 + j < len(text)]
        assert (run.covered, run.tokens) == (sum(all(t < 5 for t in tokens) for tokens in ahead), len(ahead))


def test_kinds_are_the_tagged_classes_where_answers_have_them() -> None:
    own = np.array([1, 2], dtype=np.int32)
    tagged = [
        Answer(own, 9, {"class": "prose", "client": "x"}),
        Answer(own, 9, {"class": "code"}),
        Answer(own, 9, {"client": "x"}),
    ]
    found, told_apart = by_kind(tagged, LISTED)
    assert [(one.kind, one.documents) for one in found] == [("all", 3), ("(none)", 1), ("code", 1), ("prose", 1)]
    assert told_apart == "the request's tag `class`"


def test_kinds_are_clients_where_no_answer_is_tagged() -> None:
    own = np.array([1, 2], dtype=np.int32)
    found, told_apart = by_kind([Answer(own, 9, {"client": "b"}), Answer(own, 9, {"client": "a"})], LISTED)
    assert [one.kind for one in found] == ["all", "a", "b"]
    assert told_apart == "the client's name"


def test_kinds_are_lengths_where_nothing_else_is_known() -> None:
    own = np.array([1, 2], dtype=np.int32)
    lengths = (20_000, 4096, 256, 257, 4097)
    found, told_apart = by_kind([Answer(own, length, {}) for length in lengths], LISTED)
    assert [one.kind for one in found] == ["all", "to 256", "to 1024", "to 4096", "to 16384", "over 16384"]
    assert told_apart == "the document's length in tokens"


def test_kinds_come_with_the_exported_answers(tmp_path: Path) -> None:
    def tagged(number: int, name: str, answer: list[int]) -> Generation:
        request = {"messages": [], "metadata": {"class": name}}
        return row(answer, number, is_held_out=True, request=request)

    folder = exported(tmp_path, row([300]), tagged(0, "code", [300, 300]), tagged(1, "prose", [300, 900]))
    header = built(folder, len(SPECIAL) + 1).hot.header
    assert [(one.kind, one.own.covered) for one in header.reach] == [("all", 3), ("code", 2), ("prose", 1)]


# Spare ids


def built(folder: Path, size: int, spare: int = 0) -> Built:
    return build(find_shards([folder]), TINY, size, spare=spare)


def grown(hot: HotVocab, folder: Path, most: int | None = None) -> Grown:
    return grow(hot, find_shards([folder]), TINY, most=most)


def plain(hot: HotVocab) -> list[int]:
    """Its ids without the special ones."""
    return [token for token in hot.d2t.tolist() if token not in SPECIAL]


def test_the_least_used_ids_of_a_list_are_spare(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300, 300, 301, 301, 302]))
    hot = built(folder, len(SPECIAL) + 5, spare=3).hot
    assert plain(hot) == [0, 1, 300, 301, 302]
    assert hot.header.spare == [0, 1, 302]


def test_spare_ids_change_nothing_about_what_is_in_the_list(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300, 300, 301]))
    with_spare, without = (built(folder, len(SPECIAL) + 5, spare=spare).hot for spare in (2, 0))
    assert with_spare.fingerprint == without.fingerprint


def test_special_tokens_cannot_be_spare(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300]))
    assert built(folder, len(SPECIAL) + 1, spare=1).hot.header.spare == [300]
    with pytest.raises(TrainingError, match="cannot be spare"):
        built(folder, len(SPECIAL) + 1, spare=2)


# Growth


def test_what_the_list_lacked_takes_the_place_of_spare_ids(tmp_path: Path) -> None:
    old = built(exported(tmp_path, row([300] * 3), name="old"), len(SPECIAL) + 4, spare=3).hot
    assert plain(old) == [0, 1, 2, 300]
    made = grown(old, exported(tmp_path, row([300, 900, 900, 800, 800, 800, 700], 1), name="new"), most=2)
    assert plain(made.hot) == [0, 300, 800, 900]
    assert made.added == {800: 3, 900: 2}
    assert made.hot.header.spare == [0]
    assert made.hot.header.train == Coverage(covered=6, tokens=7)
    assert made.before == Coverage(covered=1, tokens=7)


def test_growth_names_the_list_it_came_from(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300, 301, 302, 303]))
    first = built(folder, len(SPECIAL) + 2, spare=1).hot
    second = grown(first, folder).hot
    third = grown(second, folder, most=1).hot
    assert (first.header.parent, first.header.generation) == (None, 0)
    assert (second.header.parent, second.header.generation) == (first.fingerprint, 1)
    assert (third.header.parent, third.header.generation) == (second.fingerprint, 2)


def test_a_spare_id_that_answers_use_stays_and_is_spare_no_longer(tmp_path: Path) -> None:
    old = built(exported(tmp_path, row([300] * 3), name="old"), len(SPECIAL) + 3, spare=2).hot
    assert old.header.spare == [0, 1]
    made = grown(old, exported(tmp_path, row([1, 1, 900, 800], 1), name="new"))
    assert plain(made.hot) == [1, 300, 800]
    assert (made.added, made.kept, made.hot.header.spare) == ({800: 1}, {1: 2}, [])


def test_a_list_without_spare_ids_gets_longer_where_it_is_allowed_to(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300, 300, 301, 302]))
    old = built(folder, len(SPECIAL) + 1).hot
    assert grown(old, folder).hot.fingerprint == old.fingerprint
    assert plain(grown(old, folder, most=2).hot) == [300, 301, 302]


def test_held_out_answers_make_nothing_grow_but_are_what_growth_is_judged_by(tmp_path: Path) -> None:
    old = built(exported(tmp_path, row([300]), name="old"), len(SPECIAL) + 3, spare=2).hot
    new = exported(tmp_path, row([300, 900], 1), row([700, 700, 900], is_held_out=True), name="new")
    made = grown(old, new)
    assert plain(made.hot) == [0, 300, 900]
    assert made.hot.header.held_out == Coverage(covered=1, tokens=3)
    assert made.hot.header.reach[0].own == Coverage(covered=1, tokens=3)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([*PLAIN[:8], *SPECIAL[:2], 2000, 2001]), min_size=1, max_size=12),
    st.lists(st.sampled_from([*PLAIN[:8], *SPECIAL[:2], 2000, 2001, 2002, 2003]), min_size=1, max_size=12),
    st.integers(0, 6),
    st.integers(0, 8),
)
def test_growth_keeps_the_firm_ids_and_takes_the_most_frequent_others(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], after: list[int], spare: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    old = built(exported(folder, row(before), name="old"), len(SPECIAL) + 6, spare=spare).hot
    made = grown(old, exported(folder, row(after, 1), name="new"), most=most)
    firm = set(old.d2t.tolist()) - set(old.header.spare)
    seen = Counter(token for token in after if token not in firm)
    wanted = sorted(seen, key=lambda token: (-seen[token], token))[:most]
    ids = made.hot.d2t.tolist()
    assert ids == sorted(set(ids))
    assert firm | set(wanted) | set(made.hot.header.spare) == set(ids)
    assert not set(wanted) & set(made.hot.header.spare)
    assert set(made.hot.header.spare) <= set(old.header.spare)
    assert len(ids) == max(old.size, len(firm) + len(wanted))
    assert made.hot.counts.tolist() == [Counter(after)[token] for token in ids]
    assert made.added.keys() | made.kept.keys() == set(wanted)


def test_the_command_writes_the_next_file_beside_the_old_one(tmp_path: Path) -> None:
    folder = exported(tmp_path, row([300, 301, 302, 303]))
    built(folder, len(SPECIAL) + 2, spare=1).hot.save(tmp_path / "hot.safetensors")
    for old, new in (("hot", "hot.1"), ("hot.1", "hot.2")):
        told = command("grow", tmp_path / f"{old}.safetensors", folder, "--add", "1")
        assert told.splitlines()[-1] == str(tmp_path / f"{new}.safetensors")
        assert HotVocab.load(tmp_path / f"{new}.safetensors", TINY.fingerprint, VOCAB).header.generation == int(new[-1])
    assert "1 ids, 1 own tokens" in told


def test_both_commands_explain_themselves() -> None:
    assert "training hot-vocab grow" in command("--help")
    assert "HOT" in command("grow", "--help")


def command(*arguments: object) -> str:
    """What `training hot-vocab` prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr("sys.argv", ["training", "hot-vocab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return out.getvalue()


# The file


def test_a_file_written_before_there_were_spare_ids_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "hot"
    built(exported(tmp_path, row([300])), len(SPECIAL) + 3).hot.save(path)
    as_of_old(path)
    hot = HotVocab.load(path, TINY.fingerprint, VOCAB)
    assert (hot.header.reach, hot.header.spare, hot.header.parent, hot.header.generation) == ([], [], None, 0)
    assert grown(hot, exported(tmp_path, row([900], 1), name="new"), most=1).added == {900: 1}


def as_of_old(path: Path) -> None:
    """The file without what its first format version's writers did not know."""
    with safe_open(path, framework="pt") as file:
        [(key, text)] = file.metadata().items()
        tensors = {"d2t": file.get_tensor("d2t"), "counts": file.get_tensor("counts")}
    known = ("format_version", "tokenizer", "train", "held_out", "sources")
    save_file(tensors, path, metadata={key: json.dumps({name: json.loads(text)[name] for name in known})})


@pytest.mark.parametrize("spare", [[4000], [1, 0], [0, 0]])
def test_spare_ids_that_are_not_of_the_list_in_order_are_refused(tmp_path: Path, spare: list[int]) -> None:
    hot = built(exported(tmp_path, row([300])), len(SPECIAL) + 3).hot
    wrong = HotVocab(hot.d2t, torch.zeros_like(hot.counts), hot.header.model_copy(update={"spare": spare}))
    wrong.save(tmp_path / "hot")
    with pytest.raises(BackendError, match="spare ids"):
        HotVocab.load(tmp_path / "hot", TINY.fingerprint, VOCAB)
