"""Drafters chosen request by request on one server: another drafter gives the same answer, and its own figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.answers import Answer, bits, row_of, streamed, whole
from tests.checkpoints import tiny
from tests.servers import ROOT, ProcessServer, clean_environment, running_process, serve_command

DRAFTERS = ("mtp", "hot_vocab", "prediction", "none")
SOURCES = ("mtp", "hot_vocab", "prediction", "grammar")
HOT_IDS = 600
TOKENS: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
LIST = "What is a list?"
CODE = "Write a function that reverses a string."
ASKED: list[tuple[str, dict[str, Any]]] = [
    (LIST, {"temperature": 0}),
    (CODE, {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 1}),
    ("Count from 1 to 10.", {"temperature": 1, "top_p": 1, "top_k": 0, "seed": 2, "frequency_penalty": 0.3}),
    ("Lists, sets and tuples hold values. " * 20 + LIST, {"temperature": 1, "seed": 3, "ignore_eos": True}),
    (LIST, {"temperature": 0.7, "seed": 4, "structured_outputs": {"regex": "[a-z ]{40,80}"}}),
]


def run(module: str, *arguments: Any, cwd: Path) -> str:
    """A command of ours, from this source tree; the last line it prints."""
    command = [sys.executable, "-c", f"from {module} import main; main()", *map(str, arguments)]
    env = clean_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def hot_vocab(drafting: ProcessServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of what the server has captured, while it runs: `capture export`, then `training hot-vocab`."""
    for seed in range(6):
        for question in (LIST, CODE, "What does `len` do?"):
            whole(drafting.openai, question, seed=seed, temperature=1, max_tokens=60)
    folder = tmp_path_factory.mktemp("hot")
    exported = run("capture.cli", "export", "--to", "npz", "--capture", drafting.capture, cwd=folder)
    run("training.cli", "hot-vocab", exported, "--size", HOT_IDS, "--out", "hot.safetensors", cwd=folder)
    return folder / "hot.safetensors"


@pytest.fixture(scope="module")
def choosing(hot_vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """A server with every drafter, mtp where none is named."""
    further = f"hot_vocab:{hot_vocab},prediction,none"
    flags = ["--draft-tokens", "3", "--further-drafters", further, "--allow-drafter-choice"]
    with running_process(serve_command(tiny(), *flags), tmp_path_factory.mktemp("choosing") / "capture.db") as server:
        yield server


@pytest.fixture(scope="module")
def alone(plain: ProcessServer) -> list[Answer]:
    """What a server says that has no drafter at all."""
    return [whole(plain.openai, content, **asked, **TOKENS, max_tokens=48) for content, asked in ASKED]


def figures(server: ProcessServer) -> dict[str, tuple[float, float, float]]:
    """Steps that drafted, tokens drafted and accepted of each source of drafts."""
    told = server.metrics("spec_decode_num_")
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return {
        source: tuple(told[f"spec_decode_{name}_total", frozenset({("drafter", source)})] for name in names)  # type: ignore[misc]
        for source in SOURCES
    }


def grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Of the sources whose figures have moved, by how much."""
    moved = {name: tuple(new - old for new, old in zip(after[name], before[name], strict=True)) for name in before}
    return {name: by for name, by in moved.items() if any(by)}


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_every_drafter_gives_the_same_answers(
    choosing: ProcessServer, plain: ProcessServer, alone: list[Answer], drafter: str | None
) -> None:
    fingerprints = {"none": "none", **choosing.http.get("/v1/engine").json()["drafters"]}
    assert tuple(fingerprints) == ("none", *DRAFTERS[:-1])
    for (content, asked), expected in zip(ASKED, alone, strict=True):
        chosen = {} if drafter is None else {"drafter": drafter}
        answer = streamed(choosing.openai, content, **asked, **chosen, **TOKENS, max_tokens=48)
        assert answer.said == expected.said
        row = row_of(choosing, answer)
        assert bits(row) == bits(row_of(plain, expected))
        assert row.drafter == answer.timings["drafter"] == (drafter or "mtp")
        assert row.drafter_fingerprint == fingerprints[row.drafter]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_only_the_figures_of_the_drafter_used_move(choosing: ProcessServer, drafter: str) -> None:
    before = figures(choosing)
    steps: list[tuple[int, int]] = []
    for content, asked in ASKED[:4]:
        answer = whole(choosing.openai, content, **asked, drafter=drafter, max_tokens=40)
        steps += [(drafted, accepted) for drafted, accepted in row_of(choosing, answer).steps if drafted]
        assert answer.timings["draft_n"] <= 3 * answer.timings["predicted_n"]
    moved = grown(before, figures(choosing))
    if drafter == "none":
        assert (moved, steps) == ({}, [])
    else:
        assert moved == {drafter: (len(steps), *map(sum, zip(*steps, strict=True)))}
        assert moved[drafter][2] > 0
    for source, (_, *total) in figures(choosing).items():
        for at, name in enumerate(("draft", "accepted")):
            slots = f"spec_decode_num_{name}_tokens_per_pos_total"
            per_slot = [choosing.metric(slots, drafter=source, position=str(slot)) for slot in range(3)]
            assert sum(per_slot) == total[at]


def test_what_a_grammar_forces_is_nobodys_draft(choosing: ProcessServer) -> None:
    before = figures(choosing)
    answer = whole(choosing.openai, LIST, temperature=0, structured_outputs={"regex": "(never ever say it){2}"})
    assert answer.content == "never ever say it" * 2
    moved = grown(before, figures(choosing))
    assert moved["grammar"][2] > 0
    assert sum(by[1] for by in moved.values()) == answer.timings["draft_n"]
    assert sum(by[2] for by in moved.values()) == answer.timings["draft_n_accepted"]


def test_drafts_are_as_good_behind_another_drafters_prefix(choosing: ProcessServer) -> None:
    # So unsure that every draft depends on the last bits of what it was made from.
    asked: dict[str, Any] = {"temperature": 1.5, "top_p": 1, "top_k": 0, "seed": 6, "ignore_eos": True}
    content = "A set holds each value once. " * 30 + LIST

    def ask(drafter: str, salt: str) -> Answer:
        return whole(choosing.openai, content, **asked, drafter=drafter, cache_salt=salt, max_tokens=40)

    for second in ("mtp", "hot_vocab"):
        cold = ask(second, f"{second} cold")
        assert cold.cached == 0 < cold.timings["draft_n_accepted"] < cold.timings["draft_n"]
        for first in DRAFTERS:
            salt = f"{first} then {second}"
            ask(first, salt)
            warm = ask(second, salt)
            assert warm.cached > 0
            assert warm.said == cold.said
            assert row_of(choosing, warm).steps == row_of(choosing, cold).steps


def test_a_hot_vocabulary_drafts_nothing_else(choosing: ProcessServer, hot_vocab: Path) -> None:
    from safetensors.numpy import load_file

    ids = set(load_file(hot_vocab)["d2t"].tolist())
    assert len(ids) == HOT_IDS
    answer = whole(choosing.openai, LIST, temperature=0, drafter="hot_vocab", max_tokens=40)
    row = row_of(choosing, answer)
    at = 1  # the first token is the prompt's
    for _, accepted in row.steps:
        assert set(row.completion_tokens[at : at + accepted].tolist()) <= ids
        at += accepted + 1
    assert at - len(row.completion_tokens) in (0, 1)  # an end that was drafted has no token of the target behind it
    assert sum(accepted for _, accepted in row.steps) > 0
    rare = next(token for token in range(tiny().tokenizer.vocab_size) if token not in ids)
    forced = whole(choosing.openai, LIST, temperature=0, drafter="hot_vocab", logit_bias={str(rare): 100}, max_tokens=9)
    assert forced.timings["draft_n"] > forced.timings["draft_n_accepted"] == 0


def test_an_unknown_drafter_is_refused_with_the_known_ones(choosing: ProcessServer, drafting: ProcessServer) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        whole(choosing.openai, LIST, drafter="eagle")
    assert refused.value.param == "drafter"
    assert all(name in str(refused.value) for name in ("eagle", *DRAFTERS))
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        whole(drafting.openai, LIST, drafter="mtp")
    assert (forbidden.value.param, forbidden.value.code) == ("drafter", "drafter_choice_not_allowed")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("manner", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_good_prediction_is_accepted_and_a_bad_one_changes_nothing(
    choosing: ProcessServer, manner: dict[str, Any], drafter: str
) -> None:
    asked = {**manner, **TOKENS, "drafter": drafter, "max_tokens": 60}
    without = whole(choosing.openai, CODE, **asked)
    exact = without.content
    half = exact[: len(exact) // 2] + "\nand something else altogether follows here"
    accepted = {}
    for name, content in {
        "exact": exact,
        "half": half,
        "bad": "Bananas are yellow, and so is the sun at noon.",
    }.items():
        before = figures(choosing)
        prediction = {"type": "content", "content": content}
        answer = streamed(choosing.openai, CODE, **asked, prediction=prediction)
        details = answer.usage["completion_tokens_details"]
        told = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert sum(told) == len(tiny().tokenizer.plain(content))
        assert answer.tokens == without.tokens
        assert answer.usage["completion_tokens"] == without.usage["completion_tokens"]
        assert bits(row_of(choosing, answer)) == bits(row_of(choosing, without))
        assert row_of(choosing, answer).request["prediction"] == prediction
        moved = grown(before, figures(choosing))
        assert ("prediction" in moved) or name == "bad"
        if drafter in ("prediction", "none"):
            assert set(moved) <= {"prediction"}
        accepted[name] = told[0]
    assert accepted["exact"] > accepted["half"] > accepted["bad"]
    assert accepted["exact"] == len(tiny().tokenizer.plain(exact))
    details = without.usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


def test_a_good_prediction_saves_steps(choosing: ProcessServer) -> None:
    asked: dict[str, Any] = {"temperature": 0, "drafter": "none", "max_tokens": 60}
    without = whole(choosing.openai, CODE, **asked)
    answer = whole(choosing.openai, CODE, **asked, prediction={"type": "content", "content": without.content})
    assert len(row_of(choosing, answer).steps) < len(row_of(choosing, without).steps) / 2


def test_the_operator_sees_the_drafters_and_what_runs(choosing: ProcessServer) -> None:
    asked = {"model": "under-test", "messages": [{"role": "user", "content": LIST}], "max_tokens": 3000}
    ours = {"drafter": "prediction", "ignore_eos": True}
    with choosing.openai.chat.completions.create(**asked, extra_body=ours, stream=True) as stream:
        chunks = iter(stream)
        name = next(chunks).id.removeprefix("chatcmpl-")
        next(chunks)
        told = choosing.http.get("/v1/engine").json()
    (running,) = told["running"]
    assert (running["id"], running["drafter"], running["max_tokens"]) == (name, "prediction", 3000)
    assert running["decoding"] is True
    assert running["prompt_tokens"] == running["prefilled"]
    assert 0 < running["completion_tokens"] < 3000
    assert told["state"] == "ready"
    assert told["draft_tokens"] == {"asked": 3, "now": 3}
    assert told["pages"]["total"] >= told["pages"]["free"] > 0
    assert 0 < told["pages"]["held_by_running"] <= 1
    assert told["waiting"] == 0


def test_an_automatic_draft_length_gives_the_same_answers(
    plain: ProcessServer, alone: list[Answer], tmp_path: Path
) -> None:
    flags = ["--draft-tokens", "auto", "--further-drafters", "prediction", "--allow-drafter-choice"]
    with running_process(serve_command(tiny(), *flags), tmp_path / "capture.db") as server:
        for drafter in ("mtp", "mtp", "prediction"):
            for (content, asked), expected in zip(ASKED, alone, strict=True):
                answer = whole(server.openai, content, **asked, **TOKENS, drafter=drafter, max_tokens=48)
                assert answer.said == expected.said
                assert bits(row_of(server, answer)) == bits(row_of(plain, expected))
        told = server.http.get("/v1/engine").json()["draft_tokens"]
        assert told["asked"] == "auto"
        assert told["now"] == server.metric("spec_decode_draft_length")
        lengths = {drafted for row in server.rows() for drafted, _ in row.steps}
        assert len(lengths) > 1, "it has tried nothing"
        assert server.http.get("/version").json()["draft_tokens"] == "auto"
