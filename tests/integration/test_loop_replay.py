"""A row suffices to repeat its answer to the bit: the stored request, the seed, the parameters that were in effect."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture.export_jsonl import export_jsonl
from capture.records import Generation
from capture.store import Store
from tests.answers import bits, body, row_called, row_of, streamed, whole
from tests.capture_rows import write
from tests.checkpoints import tiny
from tests.servers import CHAT, ROOT, ProcessServer, clean_environment, eventually, running_process, serve_command

LIST = "What is a list?"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": LIST},
    {"role": "assistant", "content": "Things in a row."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "a tuple?"}]},
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "note", "strict": True, "parameters": SCHEMA}}
# None of them says its seed.
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (LIST, {}),
    "talk": (TALK, {"temperature": 1.2}),
    "thinking": (LIST, {"chat_template_kwargs": {"enable_thinking": True}}),
    "untruncated": (LIST, {"temperature": 1, "top_p": 1, "top_k": 0}),
    "penalties": (LIST, {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.2}),
    "bias": (LIST, {"logit_bias": {"11": -100, "220": 2.5}}),
    "bad words": (LIST, {"bad_words": ["list", "mutable"], "min_p": 0.02}),
    "ends": (LIST, {"min_tokens": 20, "ignore_eos": True, "stop_token_ids": [11], "stop": ["\x00"]}),
    "stop": (LIST, {"stop": ["mutable", "values"]}),
    "schema": (LIST, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    "regex": (LIST, {"structured_outputs": {"regex": "[a-z ]{20,40}"}, "temperature": 1.5}),
    "budget": (LIST, {"thinking_budget": 9, "chat_template_kwargs": {"enable_thinking": True}}),
    "call": (LIST, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}),
    "prediction": (LIST, {"prediction": {"type": "content", "content": "A list is an ordered bag."}}),
    "salt": ("Lists hold values. " * 20 + LIST, {"cache_salt": "mine", "user": "u", "metadata": {"a": "b"}}),
}
# Of a row's parameters, all that a request can ask for: bad words are kept as ids, stop strings in the request.
NOT_ASKED = {"bad_words", "stop"}


def replay(server: ProcessServer, row: Generation, **more: Any) -> Generation:
    """Send what the row holds; the row of that."""
    asked = {name: value for name, value in row.request.items() if name not in ("stream", "stream_options", "drafter")}
    response = server.http.post(CHAT, json={**asked, "seed": row.seed, **more})
    assert response.status_code == 200, response.text
    return row_called(server, response.json()["id"].removeprefix("chatcmpl-"))


@pytest.mark.parametrize("kind", ASKED)
def test_an_answer_nobody_gave_a_seed_is_repeated_from_its_row(
    drafting: ProcessServer, plain: ProcessServer, kind: str
) -> None:
    content, asked = ASKED[kind]
    answer = streamed(drafting.openai, content, **asked, max_completion_tokens=40)
    row = row_of(drafting, answer)
    assert "seed" not in row.request
    assert len(row.completion_tokens) > 1
    effective = {name: value for name, value in row.parameters.items() if name not in NOT_ASKED}
    for again in (replay(plain, row), replay(plain, row, **effective), replay(drafting, row, **effective)):
        assert bits(again) == bits(row)
        assert again.parameters == row.parameters
        assert (again.response_text, again.reasoning) == (answer.content, answer.reasoning)
        assert (again.finish_reason, again.seed) == (row.finish_reason, row.seed)


def test_another_seed_says_something_else(drafting: ProcessServer) -> None:
    asked = {"temperature": 1.5, "top_p": 1, "top_k": 0, "max_tokens": 40, "ignore_eos": True}
    row = row_of(drafting, whole(drafting.openai, LIST, **asked))
    assert bits(replay(drafting, row, seed=row.seed - 1)) != bits(row)


@pytest.mark.parametrize("seed", [0, -5, 2**63 - 1, -(2**63), 2**64 - 1])
def test_the_64_bits_of_a_clients_seed_are_kept(drafting: ProcessServer, plain: ProcessServer, seed: int) -> None:
    asked = {"temperature": 1.5, "top_p": 1, "top_k": 0, "max_tokens": 24, "ignore_eos": True}
    row = row_of(drafting, whole(drafting.openai, LIST, **asked, seed=seed))
    assert row.request["seed"] == seed
    assert row.seed == seed % 2**64
    assert bits(replay(plain, row)) == bits(row)


def test_the_answer_of_one_who_left_is_told_to_its_end(drafting: ProcessServer, plain: ProcessServer) -> None:
    asked = body(LIST, temperature=1, ignore_eos=True, max_tokens=1500)
    with drafting.openai.chat.completions.create(**asked, stream=True) as stream:
        chunks = [next(iter(stream)) for _ in range(6)]
    name = chunks[0].id.removeprefix("chatcmpl-")
    row = eventually(lambda: next((row for row in drafting.rows() if row.id == name), None))
    assert row.status == "cancelled"
    count = len(row.completion_tokens)
    again = replay(plain, row, max_tokens=count + 5)
    assert again.completion_tokens[:count].tobytes() == row.completion_tokens.tobytes()
    assert again.logprobs[:count].tobytes() == row.logprobs.tobytes()
    assert len(again.completion_tokens) == count + 5


def test_whatever_was_captured_so_far_is_repeated(drafting: ProcessServer, plain: ProcessServer) -> None:
    whole(drafting.openai, LIST)  # at least one
    # Other endpoints' rows, and further choices, are what `capture replay` is tried on below.
    chats = [row for row in drafting.rows() if "messages" in row.request and row.request.get("n") in (None, 1)]
    finished = [row for row in chats if row.status == "finished" and len(row.completion_tokens) <= 120]
    for row in finished[:: len(finished) // 12 + 1]:
        again = replay(plain, row)
        assert bits(again) == bits(row)
        assert again.response_text == row.response_text


# `capture replay`: the whole command, of rows that were captured among each other

QUESTIONS = (LIST, "What is a set?", "Count from 1 to 10.", "Lists hold values, sets hold each once. " * 30 + "Why?")
FUNCTION = {"type": "function", "name": "note", "parameters": SCHEMA}
TEXTS: list[dict[str, Any]] = [
    {"prompt": "A list is"},
    {"prompt": ["A list is", "A set is"], "n": 2, "temperature": 1, "echo": True, "logprobs": 1},
    {"prompt": [40, 41, 42, 43], "temperature": 0, "stop_token_ids": [11]},
    {
        "prompt": "Lists hold values. " * 30,
        "seed": -3,
        "n": 3,
        "best_of": 3,
        "structured_outputs": {"regex": "[a-z ]+"},
    },
]
RESPONSES: list[dict[str, Any]] = [
    {"input": LIST, "instructions": "Be brief.", "reasoning": {"effort": "high"}, "thinking_token_budget": 12},
    {"input": [*TALK[1:3], {"role": "user", "content": "Why?"}], "temperature": 1.5, "top_k": 0},
    {"input": LIST, "tools": [FUNCTION], "tool_choice": "required", "include": ["message.output_text.logprobs"]},
    {"input": LIST, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
]
CHOICES: list[dict[str, Any]] = [
    {"n": 3, "temperature": 1.2},
    {"tools": [TOOL], "temperature": 1.2, "n": 2},
    {"tools": [TOOL], "tool_choice": "none", "reasoning_effort": "high"},
    {"structured_outputs": {"choice": ["yes", "no", "lists"]}, "temperature": 2, "n": 2},
]


def requests(count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many bodies of every kind and endpoint, streamed and not."""
    order = random.Random(seed)
    for i in range(count):
        limit = order.choice((20, 28, 40))
        stream = {"stream": True} if order.random() < 0.5 else {}
        match i % 5:
            case 0:
                yield "/v1/completions", {**TEXTS[i // 5 % len(TEXTS)], "max_tokens": limit, **stream}
            case 1:
                yield "/v1/responses", {**RESPONSES[i // 5 % len(RESPONSES)], "max_output_tokens": limit, **stream}
            case 2:
                asked = CHOICES[i // 5 % len(CHOICES)]
                yield CHAT, {**asked, "messages": said(order.choice(QUESTIONS)), "max_tokens": limit, **stream}
            case _:
                content, asked = list(ASKED.values())[order.randrange(len(ASKED))]
                content = content if content is TALK else order.choice(QUESTIONS)
                yield CHAT, {"max_completion_tokens": limit, **asked, "messages": said(content), **stream}


def said(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"role": "user", "content": content}]


def capture_together(server: ProcessServer, count: int, at_once: int = 8, **more: Callable[[int], Any]) -> set[str]:
    """Have them answered among each other; the ids of the rows they left. `more`: further fields, by their number."""
    before = {row.id for row in server.rows()}

    def ask(item: tuple[int, tuple[str, dict[str, Any]]]) -> None:
        number, (path, asked) = item
        asked |= {name: value for name, make in more.items() if (value := make(number)) is not None}
        response = server.http.post(path, json=asked)
        assert response.status_code == 200, response.text

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, enumerate(requests(count))))
    return {row.id for row in server.rows()} - before


def command(path: Path, server: ProcessServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", "from capture.cli import main; main()", "replay", "--capture", str(path)]
    env = clean_environment() | {"PYTHONPATH": str(ROOT)}
    line = [*run, "--server", server.url, *arguments]
    return subprocess.run(line, cwd=path.parent, env=env, capture_output=True, text=True, timeout=280, check=False)


def copy(rows: set[str], server: ProcessServer, path: Path) -> Path:
    """A file with these rows of the server's, as it holds them."""
    return write(path, *(row for row in server.rows() if row.id in rows))


def test_all_that_was_captured_among_each_other_is_said_again_alone_and_in_company(
    drafting: ProcessServer, plain: ProcessServer, tmp_path: Path
) -> None:
    names = capture_together(drafting, 20)  # the least that has every kind of them all
    assert len(names) > 25
    path = copy(names, drafting, tmp_path / "capture.db")
    counts = [len(server.rows()) for server in (drafting, plain)]
    for server, flags in ((plain, ("--concurrency", "2")), (drafting, ("--concurrency", "8"))):
        done = command(path, server, "--sample", "1000", *flags)
        assert (done.returncode, done.stdout) == (0, f"{len(names)} same, 0 different, 0 not compared\n"), done
    assert [len(server.rows()) for server in (drafting, plain)] == counts, "what is replayed is not captured"


def test_a_row_that_was_changed_is_told_to_the_token(drafting: ProcessServer, tmp_path: Path) -> None:
    answer = whole(drafting.openai, LIST, temperature=1, max_tokens=12, ignore_eos=True)
    row = row_of(drafting, answer)
    tokens, logprobs = list(map(int, row.completion_tokens)), row.logprobs.copy()
    tokens[7] += 1
    logprobs.view("uint32")[5] ^= 1
    path = write(
        tmp_path / "capture.db",
        replace(row, id="token", completion_tokens=tokens),
        replace(row, id="bit", logprobs=logprobs),
        replace(row, id="weights", weights_fingerprint="e" * 64),
        replace(row, id="redacted", completion_tokens=None, prompt_tokens=None, logprobs=None, seed=None),
        row,
    )
    done = command(path, drafting, "--sample", "5", "--json")
    assert done.returncode == 1
    told = {one["id"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert {name: one["outcome"] for name, one in told.items()} == {
        "token": "different",
        "bit": "different",
        "weights": "not compared",
        "redacted": "not compared",
        row.id: "same",
    }
    assert (told["token"]["difference"]["what"], told["token"]["difference"]["position"]) == ("tokens", 7)
    assert (told["bit"]["difference"]["what"], told["bit"]["difference"]["position"]) == ("logprobs", 5)


def test_other_defaults_and_less_room_make_no_difference(drafting: ProcessServer, tmp_path: Path) -> None:
    rows = {row_of(drafting, whole(drafting.openai, LIST, n=1)).id for _ in range(3)}
    path = copy(rows, drafting, tmp_path / "capture.db")
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny().directory, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"temperature": 1.9, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    other = serve_command(replace(tiny(), directory=folder), "--max-model-len", "512", "--draft-tokens", "1")
    with running_process(other, tmp_path / "other.db") as server:
        assert server.http.get("/version").json()["fingerprints"]["weights"] == drafting_weights(drafting)
        done = command(path, server, "--sample", "3")
    assert done.stdout == "3 same, 0 different, 0 not compared\n", done


def drafting_weights(server: ProcessServer) -> Any:
    return server.http.get("/version").json()["fingerprints"]["weights"]


def test_whoever_left_is_compared_as_far_as_it_was_told(
    drafting: ProcessServer, plain: ProcessServer, tmp_path: Path
) -> None:
    asked = body(LIST, temperature=1, ignore_eos=True, max_tokens=1500)
    with drafting.openai.chat.completions.create(**asked, stream=True) as stream:
        name = next(iter(stream)).id.removeprefix("chatcmpl-")
    row = eventually(lambda: next((row for row in drafting.rows() if row.id == name), None))
    assert row.status == "cancelled"
    done = command(write(tmp_path / "capture.db", row), plain, f"chatcmpl-{row.id}")
    assert done.stdout == "1 same, 0 different, 0 not compared\n", done


def test_what_is_exported_as_conversations_makes_the_prompts_that_were_read(
    drafting: ProcessServer, tmp_path: Path
) -> None:
    names = capture_together(drafting, 15)
    path = copy(names, drafting, tmp_path / "capture.db")
    with Store.open(path) as store:
        result = export_jsonl(store, tmp_path / "out")
        rows = {row.id: row for row in store.iterate()}
    assert result.skipped.no_chat > 0
    assert result.documents + result.skipped.no_chat + result.skipped.broken_calls == len(names)
    for line in map(json.loads, (tmp_path / "out" / "shard-00000.jsonl").read_text().splitlines()):
        row, kwargs = rows[line["id"]], line.get("chat_template_kwargs") or {}
        prompt = tiny().tokenizer.encode_chat(line["messages"][:-1], kwargs, json.loads(line.get("tools", "[]")))
        assert list(prompt.ids) == row.prompt_tokens.tolist()
        said = line["messages"][-1]
        assert (said["content"], said.get("reasoning_content", "")) == (row.response_text, row.reasoning)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_rows_of_every_drafter_are_said_again_with_any_other(
    drafting: ProcessServer, plain: ProcessServer, tmp_path: Path
) -> None:
    flags = ["--further-drafters", "prediction,none", "--allow-drafter-choice", "--draft-tokens", "auto"]
    drafters = ("mtp", "prediction", "none", None)
    with running_process(serve_command(tiny(), *flags, "--max-num-seqs", "8"), tmp_path / "many.db") as many:
        names = capture_together(many, 220, 24, drafter=lambda number: drafters[number % 4])
        rows = [row for row in many.rows() if row.id in names]
        assert len(rows) > 300
        assert {row.drafter for row in rows} == {"mtp", "prediction", "none"}
        path = copy(names, many, tmp_path / "capture.db")
        for server in (plain, drafting, many):
            for concurrency in ("1", "12"):
                done = command(path, server, "--sample", "1000", "--concurrency", concurrency)
                told = f"{len(names)} same, 0 different, 0 not compared\n"
                assert (done.returncode, done.stdout) == (0, told), done
