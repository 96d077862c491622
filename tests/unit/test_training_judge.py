"""The judge counts as DESIGN §6 does, and sees repetition that acceptance alone would reward."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

import backend.tiny
from backend.interface import Step
from backend.models.qwen3_5 import Qwen35
from training.cli import app, main
from training.pretraining.conversation import Conversation, Turn
from training.pretraining.export import export, model_config
from training.pretraining.judge import judge, survival
from training.repetition import distinct_ratio, loops

TINY = Path(backend.tiny.__file__).parent


def test_surv_divides_by_the_steps_that_proposed_the_slot() -> None:
    steps = [Step(4, 4), Step(4, 1), Step(2, 2), Step(0, 0)]
    surv, tau = survival(steps)
    assert surv == (3 / 3, 2 / 3, 1 / 2, 1 / 2)
    assert tau == 1 + 7 / 4


def test_no_steps_are_no_acceptance() -> None:
    assert survival([]) == ((0.0, 0.0, 0.0, 0.0), 1.0)


def test_an_answer_loops_when_eight_tokens_stand_three_times() -> None:
    phrase = list(range(8))
    assert loops(phrase * 3)
    assert loops([*phrase, 99, *phrase, 98, *phrase])
    assert not loops(phrase * 2)
    assert not loops(list(range(200)))


def test_distinct_counts_each_answer_by_itself() -> None:
    assert distinct_ratio([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 1.0
    assert distinct_ratio([[7] * 11]) == 1 / 8
    assert distinct_ratio([[1]]) == 1.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = Qwen35(model_config(tokenizer))
    model.initialise(std=0.1, seed=4)
    export(model, tokenizer, folder)
    return folder


def test_a_random_model_is_judged_unfinished_and_undraftable(checkpoint: Path) -> None:
    asked = [Conversation((Turn("Hi", ""),)), Conversation((Turn("What is a list?", ""),))]
    greedy, sampled = judge(str(checkpoint), asked, (0.0, 0.7), max_tokens=24)
    assert (greedy.answers, greedy.tokens, greedy.unfinished) == (2, 48, 2)
    assert greedy.tau < 1.5
    assert [sample.question for sample in greedy.samples] == ["Hi", "What is a list?"]
    assert sampled.temperature == 0.7
    json.dumps(greedy.as_json())


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["training", "judge", "--model", "/nowhere/at/all", "--prompts", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: no model at")


@pytest.mark.parametrize("command", [[], ["tiny"], ["judge"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_stage_b_without_stage_a_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TINY, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    monkeypatch.setattr("training.pretraining.sources.collect", list)
    monkeypatch.setattr("sys.argv", ["training", "tiny", "--out", str(tmp_path), "--stage", "b"])
    with pytest.raises(SystemExit):
        main()
    assert "run stage a first" in capsys.readouterr().err


def test_the_bundled_model_ends_its_answers_and_foresees_them() -> None:
    asked = [
        Conversation((Turn(question, ""),))
        for question in ("Who are you?", "What is a list?", "Write a function that reverses a string.")
    ]
    (greedy,) = judge("tiny", asked, (0.0,))
    assert (greedy.unfinished, greedy.looping) == (0, 0)
    assert greedy.surv[0] > 0.6
    assert greedy.surv[1] > 0.4
    assert "draftloop" in greedy.samples[0].answer
    assert "return text[::-1]" in greedy.samples[2].answer
