"""The reader: counts made by hand, ids found by their start, files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.filters import Filters
from capture.records import CaptureError
from capture.store import Store, UnknownGenerationError
from tests.capture_rows import generation, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "capture.db"


def test_acceptance_is_counted_per_drafter_and_slot(path: Path) -> None:
    rows = [
        generation(drafter="mtp", steps=[(3, 3), (3, 1), (2, 0)]),
        generation(drafter="mtp", steps=[(0, 0), (1, 1)]),
        generation(drafter="none", steps=[(0, 0)] * 4),
        generation(drafter="silent", steps=[]),
    ]
    with Store.open(write(path, *rows)) as store:
        mtp, none, silent = store.stats().acceptance
    # By hand: slot 0 stood in 4 steps and held in 3, slot 1 in 3 and 1, slot 2 in 2 and 1.
    assert (mtp.drafter, mtp.steps, mtp.proposed, mtp.accepted) == ("mtp", 5, (4, 3, 2), (3, 1, 1))
    assert mtp.surv == (3 / 4, 1 / 3, 1 / 2)
    assert mtp.draft_acceptance == 5 / 9
    assert mtp.acceptance_length == 1 + 5 / 5
    assert (none.steps, none.proposed, none.acceptance_length, none.draft_acceptance) == (4, (), 1.0, None)
    assert (silent.steps, silent.acceptance_length) == (0, None)


def test_a_slot_nothing_was_accepted_in_is_still_a_slot(path: Path) -> None:
    with Store.open(write(path, generation(steps=[(255, 0)]))) as store:
        [found] = store.stats().acceptance
    assert found.proposed == (1,) * 255
    assert found.accepted == (0,) * 255


def test_rows_and_tokens_are_counted(path: Path) -> None:
    rows = [
        generation(created_at="2025-01-02T00:00:00.000000Z"),
        generation(created_at="2025-01-01T00:00:00.000000Z", finish_reason="length", drafter="none"),
        generation(status="cancelled", finish_reason=None, prompt_tokens=None, completion_tokens=None, logprobs=None),
    ]
    with Store.open(write(path, *rows)) as store:
        found = store.stats()
        assert store.count() == 3
    assert found.by_status == {"finished": 2, "cancelled": 1}
    assert found.by_finish_reason == {"stop": 1, "length": 1, "none": 1}
    assert found.by_drafter == {"mtp": 2, "none": 1}
    assert (found.rows, found.prompt_tokens, found.completion_tokens) == (3, 6, 4)
    assert found.first == "2025-01-01T00:00:00.000000Z"
    assert found.file_bytes >= path.stat().st_size


def test_a_file_without_rows_has_figures_too(path: Path) -> None:
    with Store.open(write(path)) as store:
        found = store.stats()
    assert (found.rows, found.prompt_tokens, found.acceptance, found.first) == (0, 0, (), None)


def test_the_list_is_newest_first_and_stops_at_its_limit(path: Path) -> None:
    days = [generation(created_at=f"2025-01-0{day}T00:00:00.000000Z", response_text=str(day)) for day in (2, 3, 1)]
    failed = generation(created_at="2024-01-01T00:00:00.000000Z", status="failed", completion_tokens=[], logprobs=[])
    with Store.open(write(path, *days, failed)) as store:
        assert [row.preview for row in store.list(2)] == ["3", "2"]
        [only] = store.list(chosen=Filters(status=["failed"]))
    assert (only.id, only.prompt_tokens, only.completion_tokens) == (failed.id, 3, 0)


def test_iterating_goes_from_the_oldest_to_the_newest(path: Path) -> None:
    days = [generation(created_at=f"2025-01-0{day}T00:00:00.000000Z", response_text=str(day)) for day in (2, 3, 1)]
    with Store.open(write(path, *days)) as store:
        assert [row.response_text for row in store.iterate()] == ["1", "2", "3"]


def test_a_row_is_found_by_its_id_or_a_start_only_it_has(path: Path) -> None:
    with Store.open(write(path, *(generation(id=name) for name in ("abc1", "abc2", "abd", "ab")))) as store:
        assert store.get("abc1").id == "abc1"
        assert store.get("abd").id == "abd"
        assert store.get("ab").id == "ab"  # whole, though others start so
        with pytest.raises(UnknownGenerationError, match="more than one"):
            store.get("abc")


@pytest.mark.parametrize("unknown", ["zz", "%", "ab_", "ab*", "a' OR 1", "\udcff", "abc12"])
def test_an_unknown_id_is_one_clear_line(path: Path, unknown: str) -> None:
    with Store.open(write(path, generation(id="abc1"))) as store, pytest.raises(UnknownGenerationError) as caught:
        store.get(unknown)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_and_not_made(path: Path) -> None:
    with pytest.raises(CaptureError, match="no capture file at"):
        Store.open(path)
    assert not path.exists()


def test_what_is_no_capture_file_is_refused(path: Path) -> None:
    path.write_bytes(b"x" * 4096)
    with pytest.raises(CaptureError, match="not an SQLite file"):
        Store.open(path)
    path.write_bytes(b"")
    with pytest.raises(CaptureError, match="is empty"):
        Store.open(path)
    with pytest.raises(CaptureError, match="not a file"):
        Store.open(path.parent)


def test_a_place_where_nothing_can_be_written_is_named_and_what_helps(path: Path) -> None:
    write(path, generation())
    path.with_name(path.name + "-shm").symlink_to("nowhere")  # fails as in a folder that is read-only, for root too
    with pytest.raises(CaptureError, match="copy it"):
        Store.open(path)


def test_a_reader_can_write_nothing(path: Path) -> None:
    with Store.open(write(path, generation())) as store, pytest.raises(Exception, match="readonly"):
        store._db.execute("DELETE FROM generations")


def test_odd_characters_in_the_path_are_no_trouble(tmp_path: Path) -> None:
    path = write(tmp_path / "what? 100% #1" / "käse &.db", generation())
    with Store.open(path) as store:
        assert store.count() == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]
