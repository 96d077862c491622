"""lm_eval's local-completions on two small tasks of ours: likelihoods of choices, and greedy texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tests.servers import MODEL, ProcessServer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

QUESTIONS = [
    ("What does len() do in Python?", [" It returns the length.", " It prints the sky.", " Blue."]),
    ("Hello", ["!", " How can I help you?", " zebra quantum"]),
    ("def add(a, b):", ["\n    return a + b", "\n    return nothing at all"]),
]
UNTIL = "\n\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A directory of the tasks; JSON is YAML."""
    data = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": text, "choices": choices, "answer": 0}) for text, choices in QUESTIONS]
    data.write_text("\n".join(lines))
    both = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(data)},
        "test_split": "train",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    choose = {
        "task": "draftloop_choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    write = {
        "task": "draftloop_write",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [UNTIL], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    directory = tmp_path / "tasks"
    directory.mkdir()
    for task in (choose, write):
        (directory / f"{task['task']}.yaml").write_text(json.dumps({**both, **task}))
    return directory


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def likelihood(server: ProcessServer, question: str, choice: str) -> tuple[float, bool]:
    """Of the choice after the question, and whether the model would have said it: by our own arithmetic."""
    texts = (question, question + choice)
    begun, whole = (server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts)
    prompt = [*begun, *whole[len(begun) :]]  # the last of the question may have become another token: so does lm_eval
    answer = server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    pairs = list(zip(told.token_logprobs, told.top_logprobs, strict=True))[len(begun) :]
    return sum(one for one, _ in pairs), all(one == max(best.values()) for one, best in pairs)


@pytest.mark.parametrize("backend", ["remote", "huggingface"])
def test_likelihoods_and_texts_are_those_of_the_model(
    server: ProcessServer, run: Callable[..., str], tasks: Path, tmp_path: Path, backend: str
) -> None:
    where = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer_backend={backend},max_retries=1"
    tokenizer = f",tokenizer={tiny().directory}" if backend == "huggingface" else ""
    run(
        "lm_eval", "run", "--model", "local-completions", "--model_args", where + tokenizer,
        "--tasks", "draftloop_choose,draftloop_write", "--include_path", str(tasks),
        "--output_path", str(tmp_path / "out"), "--log_samples", "--batch_size", "2",
    )  # fmt: skip
    chosen, written = (samples(tmp_path / "out", task) for task in ("draftloop_choose", "draftloop_write"))
    assert len(chosen) == len(written) == len(QUESTIONS)
    for (question, choices), choosing, writing in zip(QUESTIONS, chosen, written, strict=True):
        for choice, ((told, greedy),) in zip(choices, choosing["resps"], strict=True):
            ours, would_say = likelihood(server, question, choice)
            assert float(told) == pytest.approx(ours, abs=1e-4)
            assert (str(greedy) == "True") is would_say
        text = server.openai.completions.create(
            model=MODEL, prompt=question, max_tokens=16, temperature=0, stop=[UNTIL, "<|im_end|>"]
        ).choices[0].text  # fmt: skip
        assert writing["resps"][0][0] == text
