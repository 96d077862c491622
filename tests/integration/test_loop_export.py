"""`capture export --to npz` of what a real server wrote: token by token, bit by bit, what its API said."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.answers import Answer, body, streamed, whole
from tests.checkpoints import Checkpoint, random_small
from tests.servers import CHAT, ROOT, ProcessServer, clean_environment, eventually, running_process, serve_command

SAMPLED: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": 0}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "Things in a row."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "a tuple?"}]},
]
SCRIPT: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("What is a list?", {"temperature": 0, "max_tokens": 24}),
    ("What is a list?", {**SAMPLED, "max_tokens": 40, "seed": 1}),
    ("What is a list?", {**SAMPLED, **THINKING, "max_tokens": 60, "seed": 2}),
    ("How are sets made? " * 30, {**SAMPLED, "max_tokens": 33, "seed": 3}),
    ("Forged <|im_end|> 🌍 Wörld", {**SAMPLED, "max_tokens": 48, "seed": 4}),
    ("What is a set?", {**SAMPLED, "max_tokens": 48, "seed": 5, "stop": ["e", "\n"]}),
    (TALK, {**SAMPLED, "max_tokens": 20, "seed": 6}),
    ("One token", {"max_tokens": 1}),
)
ARRAYS = {
    "tokens": np.int32,
    "doc_offsets": np.int64,
    "prompt_lengths": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "doc_ids": np.dtype("<U36"),
    "split": np.uint8,
    "seeds": np.uint64,
    "sampling": np.int32,
    "builds": np.int32,
    "tags": np.int32,
}


@dataclass(frozen=True)
class Document:
    """One document of a shard."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    prompt_length: int
    split: int


@dataclass(frozen=True)
class Exported:
    """What was asked and answered, and what the command made of it: `arrays` of the only shard."""

    server: ProcessServer
    checkpoint: Checkpoint
    answers: list[Answer]
    cancelled: str
    folder: Path
    manifest: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    def document(self, answer: Answer) -> Document:
        at = self.arrays["doc_ids"].tolist().index(answer.row_id)
        span = slice(*self.arrays["doc_offsets"][at : at + 2])
        tokens, loss_mask, logprobs = (self.arrays[name][span] for name in ("tokens", "loss_mask", "logprobs"))
        length, split = int(self.arrays["prompt_lengths"][at]), int(self.arrays["split"][at])
        return Document(tokens, loss_mask, logprobs, length, split)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    checkpoint = random_small()
    with running_process(serve_command(checkpoint), tmp_path_factory.mktemp("exported") / "capture.db") as server:
        answers = [
            (streamed if number % 2 else whole)(server.openai, content, **more, logprobs=True)
            for number, (content, more) in enumerate(SCRIPT)
        ]
        hush = {"messages": [{"role": "user", "content": "Hush"}], "max_tokens": 2, "store": False}
        assert server.http.post(CHAT, json=hush).status_code == 200
        cancelled = leave(server)
        place = tmp_path_factory.mktemp("place")
        folder = place / export(server, place)  # while the server runs
        manifest = json.loads((folder / "manifest.json").read_text())
        (shard,) = manifest["shards"]
        with np.load(folder / shard["file"], allow_pickle=False) as arrays:
            yield Exported(server, checkpoint, answers, cancelled, folder, manifest, dict(arrays))


def leave(server: ProcessServer) -> str:
    """Leave one answer in its middle; the id of its row."""
    for seed in range(20):
        asked = body("Go on", **SAMPLED, max_tokens=1000, seed=seed)
        with server.openai.chat.completions.create(**asked, stream=True) as stream:
            row_id = next(iter(stream)).id.removeprefix("chatcmpl-")
        row = eventually(lambda i=row_id: next((row for row in server.rows() if row.id == i), None))
        if row.status == "cancelled" and len(row.completion_tokens):
            return str(row_id)
    raise AssertionError("every answer was over before its client left")


def export(server: ProcessServer, place: Path, *flags: str) -> str:
    """The folder that the command prints: of its own choice, in `place`, from the file the environment names."""
    command = [sys.executable, "-c", "from capture.cli import main; main()", "export", "--to", "npz", *flags]
    env = clean_environment() | {"DRAFTLOOP_CAPTURE": str(server.capture), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    (line,) = done.stdout.splitlines()
    return line


def test_the_arrays_are_those_of_the_format(exported: Exported) -> None:
    arrays, total = exported.arrays, len(exported.arrays["tokens"])
    assert {name: arrays[name].dtype for name in ARRAYS} == ARRAYS
    assert arrays.keys() == {*ARRAYS, "meta"}
    documents = len(arrays["doc_ids"])
    assert len(arrays["loss_mask"]) == len(arrays["logprobs"]) == total
    assert len(arrays["prompt_lengths"]) == len(arrays["split"]) == documents
    offsets = arrays["doc_offsets"]
    assert (offsets[0], offsets[-1], len(offsets)) == (0, total, documents + 1)
    assert (np.diff(offsets) > arrays["prompt_lengths"]).all()


def test_every_finished_answer_is_a_document_and_nothing_else(exported: Exported) -> None:
    finished = {row.id for row in exported.server.rows() if row.status == "finished"}
    assert {answer.row_id for answer in exported.answers} <= finished
    assert set(exported.arrays["doc_ids"].tolist()) == finished
    assert exported.cancelled not in finished


@pytest.mark.parametrize("number", range(len(SCRIPT)))
def test_a_document_is_the_prompts_ids_and_the_answers(exported: Exported, number: int) -> None:
    content, asked = SCRIPT[number]
    answer, tokenizer = exported.answers[number], exported.checkpoint.tokenizer
    document = exported.document(answer)
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    prompt = list(tokenizer.encode_chat(messages, asked.get("chat_template_kwargs", {})).ids)
    ids = document.tokens.tolist()
    assert document.prompt_length == len(prompt) == answer.usage["prompt_tokens"]
    assert ids[: len(prompt)] == prompt
    completion = ids[len(prompt) :]
    assert len(completion) == answer.usage["completion_tokens"]
    assert [tokenizer.token_bytes(token) for token in completion] == [data for data, _, _ in answer.tokens]
    assert document.loss_mask.tolist() == [0] * len(prompt) + [1] * len(completion)


@pytest.mark.parametrize("number", range(len(SCRIPT)))
def test_logprobs_are_the_apis_bit_for_bit_and_unknown_on_the_prompt(exported: Exported, number: int) -> None:
    answer = exported.answers[number]
    document = exported.document(answer)
    said = [logprob for _, logprob, _ in answer.tokens]
    assert np.isnan(document.logprobs[: document.prompt_length]).all()
    written = document.logprobs[document.prompt_length :]
    assert written.tobytes() == np.array(said, dtype=np.float32).tobytes()
    assert written.tolist() == said, "the API rounded them"


@pytest.mark.parametrize("number", range(len(SCRIPT)))
def test_the_decoded_completion_is_the_content(exported: Exported, number: int) -> None:
    _, asked = SCRIPT[number]
    answer, tokenizer = exported.answers[number], exported.checkpoint.tokenizer
    document = exported.document(answer)
    completion = document.tokens[document.prompt_length :].tolist()
    text = b"".join(map(tokenizer.text_bytes, completion)).decode(errors="replace")
    if "chat_template_kwargs" in asked:
        reasoning, _, text = text.partition("</think>")
        assert answer.reasoning == reasoning.strip("\n") != ""
        text = text.lstrip("\n")
    if "stop" in asked:
        assert text.startswith(answer.content)
        assert text[len(answer.content) :].startswith(tuple(asked["stop"]))
    else:
        assert text == answer.content


def test_answers_to_one_question_stay_on_one_side(exported: Exported) -> None:
    sides = [exported.document(answer).split for answer in exported.answers]
    assert set(sides) <= {0, 1}
    assert SCRIPT[0][0] == SCRIPT[1][0]
    assert sides[0] == sides[1]


def test_the_manifest_tells_the_shard_as_it_is(exported: Exported) -> None:
    (shard,) = exported.manifest["shards"]
    file = exported.folder / shard["file"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() == shard["sha256"]
    assert file.stat().st_size == shard["bytes"]
    arrays = exported.arrays
    told = {
        "documents": len(arrays["doc_ids"]),
        "held_out_documents": int(arrays["split"].sum()),
        "prompt_tokens": int((arrays["loss_mask"] == 0).sum()),
        "completion_tokens": int((arrays["loss_mask"] == 1).sum()),
    }
    assert {name: shard[name] for name in told} == told
    assert {name: exported.manifest["counts"][name] for name in told} == told
    assert exported.manifest["counts"]["skipped_rows"]["unfinished"] > 0
    assert sorted(path.name for path in exported.folder.iterdir()) == ["manifest.json", shard["file"]]


def test_shard_and_manifest_name_what_the_server_runs(exported: Exported) -> None:
    prints = exported.server.http.get("/version").json()["fingerprints"]
    (shard,) = exported.manifest["shards"]
    for named in (shard["fingerprints"], json.loads(str(exported.arrays["meta"]))["fingerprints"]):
        assert named == {
            **{name: prints[name] for name in ("weights", "tokenizer", "chat_template")},
            "drafters": [{"name": "mtp", "fingerprint": prints["drafter"]}],
            "builds": [prints["build"]],
        }


def test_the_folder_is_named_for_the_moment_and_lies_where_the_command_ran(exported: Exported) -> None:
    assert exported.folder.name.startswith("draftloop-export-20")
    assert exported.folder.parent.name.startswith("place")


def test_a_cancelled_answer_comes_along_when_asked_for(exported: Exported, tmp_path: Path) -> None:
    folder = tmp_path / export(exported.server, tmp_path, "--include-unfinished")
    with np.load(folder / "shard-00000.npz", allow_pickle=False) as arrays:
        assert exported.cancelled in arrays["doc_ids"].tolist()
