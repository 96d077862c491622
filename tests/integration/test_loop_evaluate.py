"""What a walk counts is what the server counted: per drafter and slot, to the token, whoever was in the batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.drafters.student import StudentHeader, Target, save_student
from backend.models.student import StudentBlock, StudentConfig
from backend.models.weights import load_model
from capture.export_npz import export_npz
from capture.store import Store
from tests.checkpoints import tiny
from tests.servers import CHAT, ProcessServer, running_process, serve_command
from training.cli import main
from training.data import find_shards, read_documents
from training.evaluate.choices import first_difference
from training.evaluate.opening import open_all
from training.evaluate.walk import walk
from training.force import force_documents
from training.student import initialise

SLOTS = 4
QUESTIONS = (
    "What is a list?",
    "Write a function that reverses a string.",
    "Lists and tuples. " * 30 + "Why?",
    "Count.",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1, "top_p": 1, "top_k": 0, "frequency_penalty": 0.4, "seed": 2},
)
MORE_WAYS: tuple[dict[str, Any], ...] = (
    *WAYS,
    {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {"11": -3}},
    {"temperature": 1.3, "min_p": 0.05, "bad_words": ["list"], "min_tokens": 30, "stop_token_ids": [11]},
    {"temperature": 0.7, "stop": ["the", "."], "n": 2},
    {"temperature": 0, "ignore_eos": True},
)


@dataclass(frozen=True)
class Drafters:
    """Files of drafters for the bundled model, and their names as a server tells them."""

    given: dict[str, str]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    folder = tmp_path_factory.mktemp("drafters")
    checkpoint = tiny()
    loaded = load_model(checkpoint.directory, torch.device("cpu"), torch.float32, with_mtp=True)
    ids = torch.arange(loaded.config.vocab_size, dtype=torch.int32)
    ids = ids[(ids % 5 != 0) | (ids < 300)]
    nothing = Coverage(covered=0, tokens=0)
    header = Header(tokenizer=checkpoint.tokenizer.fingerprint, train=nothing, held_out=nothing, sources=[])
    HotVocab(ids, torch.zeros(len(ids), dtype=torch.int64), header).save(folder / "hot.safetensors")
    block = StudentBlock(StudentConfig.preset("sv", loaded.config, len(ids)), loaded.config, ids)
    initialise(block, loaded.model)
    target = Target(
        weights=loaded.weights,
        tokenizer=checkpoint.tokenizer.fingerprint,
        chat_template=checkpoint.tokenizer.template_fingerprint,
    )
    save_student(folder / "sv", block, StudentHeader.of(block, target))
    return Drafters(
        {
            "mtp": "mtp",
            "hot_vocab": f"hot_vocab:{folder / 'hot.safetensors'}",
            "prediction": "prediction",
            "sv": str(folder / "sv"),
        }
    )


@pytest.fixture(scope="module")
def server(drafters: Drafters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    default, *further = drafters.given.values()
    flags = ["--drafter", default, "--further-drafters", ",".join(further), "--allow-drafter-choice"]
    command = serve_command(tiny(), *flags, "--draft-tokens", str(SLOTS), "--max-num-seqs", "4")
    with running_process(command, tmp_path_factory.mktemp("evaluate") / "capture.db") as server:
        yield server


def ask(server: ProcessServer, names: Sequence[str], ways: Sequence[dict[str, Any]], max_tokens: int) -> None:
    """Every question in every way of every drafter, four at a time."""

    def one(body: dict[str, Any]) -> None:
        response = server.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text

    with ThreadPoolExecutor(4) as pool:
        bodies = [
            {"messages": [{"role": "user", "content": text}], "drafter": name, "max_tokens": max_tokens, **way}
            for way in ways
            for text in QUESTIONS
            for name in names
        ]
        list(pool.map(one, bodies))


def counted(server: ProcessServer, name: str) -> tuple[list[int], list[int]]:
    """P_s and A_s of a drafter since the server's start."""
    proposed, accepted = (
        [
            int(server.metric(f"spec_decode_num_{what}_tokens_per_pos_total", drafter=name, position=str(slot)))
            for slot in range(SLOTS)
        ]
        for what in ("draft", "accepted")
    )
    return proposed, accepted


def exported(server: ProcessServer, folder: Path) -> Path:
    assert server.capture is not None
    with Store.open(server.capture) as store:
        return export_npz(store, folder).folder


def assert_walks_are_the_servers_counts(server: ProcessServer, drafters: Drafters, folder: Path) -> None:
    opened = open_all("tiny", tuple(drafters.given.values()), "cpu", "auto", 1)
    loaded = opened.model
    documents = read_documents(
        find_shards([exported(server, folder)]), loaded.tokenizer.fingerprint, loaded.config.vocab_size
    )
    rows = {row.id: row for row in server.rows()}
    assert len(documents) == len(rows)
    forced = force_documents(loaded.runner, documents)
    model = loaded.runner.model
    assert [first_difference(model, one, loaded.vocab) for one in forced] == [None] * len(forced)
    for one in opened.contestants:
        its = [each for each in forced if rows[each.document.id].drafter == one.name]
        counts = walk(model, one.drafter, its, SLOTS, vocab=loaded.vocab)
        found = [[sum(slot) for slot in zip(*(getattr(c, what) for c in counts), strict=True)] for what in PER_SLOT]
        assert tuple(found) == counted(server, one.name), one.name
        assert [c.steps for c in counts] == [len(rows[each.document.id].steps) for each in its]


PER_SLOT = ("proposed", "accepted")


def test_walks_of_what_was_served_in_company_are_the_servers_counts(
    server: ProcessServer, drafters: Drafters, tmp_path: Path
) -> None:
    ask(server, list(drafters.given), WAYS, max_tokens=20)
    assert counted(server, "mtp")[1][0] > 20, "there was something to count"
    assert_walks_are_the_servers_counts(server, drafters, tmp_path / "export")


def test_the_command_compares_drafters_over_an_export(
    server: ProcessServer,
    drafters: Drafters,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask(server, ["mtp"], WAYS[:1], max_tokens=24)
    folder = exported(server, tmp_path / "export")
    asked = [word for given in drafters.given.values() for word in ("--drafter", given)]
    line = ["training", "evaluate", str(folder), *asked, "--all", "--stride", "9", "--json", "--most", "12"]
    monkeypatch.setattr("sys.argv", [*line, "--out", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["documents"] + sum(found["set_apart"].values()) == 12
    assert [row["name"] for row in found["rows"]] == ["mtp", "hot_vocab", "prediction", "sv"]
    reads = [row["parameters_read"] for row in found["rows"]]
    assert reads[0] > reads[1] > reads[3] > reads[2] == 0
    native, cut = found["rows"][0], found["rows"][1]
    assert cut["walk"]["tau"]["value"] <= native["walk"]["tau"]["value"] + 0.5
    assert {row["stride"]["anchors"] for row in found["rows"]} == {native["stride"]["anchors"]}
    assert native["difference"] is None
    assert cut["difference"]["tau"]["n"] == cut["walk"]["steps"]
    assert "run" in cut["stride"]
    assert "run" not in native["stride"]
    (run,) = [json.loads(one) for one in (tmp_path / "ledger.jsonl").read_text().splitlines()][1:]
    assert (run["command"], run["outcome"], run["figures"]["documents"]) == ("evaluate", "ok", found["documents"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_walks_of_every_way_of_asking_are_the_servers_counts(
    server: ProcessServer, drafters: Drafters, tmp_path: Path
) -> None:
    ask(server, list(drafters.given), MORE_WAYS, max_tokens=150)
    assert_walks_are_the_servers_counts(server, drafters, tmp_path / "export")
