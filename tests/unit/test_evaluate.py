"""What an evaluation takes, what it sets apart and why, and what it refuses in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.engine.sampling import SamplingParams
from capture.export import held_out
from capture.records import Generation
from tests.decoding import Request, decode
from tests.exports import exported, prompt, row
from training.cli import main
from training.errors import TrainingError
from training.evaluate.evaluation import EvaluateOptions, Evaluation, evaluate
from training.evaluate.gathering import DIFFERS, LOOPS, SHORT, UNKNOWN
from training.evaluate.opening import Opened, open_all
from training.extract import ExtractOptions, extract

GREEDY = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def opened() -> Opened:
    return open_all("tiny", ("mtp", "prediction"), "cpu", "auto", 1)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answered(opened: Opened, text: str, number: int = 0, temperature: float = 0.0, **fields: Any) -> Generation:
    """A row of the model's own answer to a prompt that is held out."""
    model = opened.model
    asked = model.tokenizer.encode_chat(user(text), {}, ()).ids
    params = SamplingParams(temperature=temperature, seed=number)
    request = Request(asked, params, max_tokens=40, eos=frozenset(model.tokenizer.eos_ids))
    (outcome,) = decode(model.runner, None, 0, [request])
    given: dict[str, Any] = {
        "prompt_tokens": list(asked),
        "parameters": GREEDY | {"temperature": temperature},
        "seed": number,
        "weights_fingerprint": model.fingerprints.weights,
    }
    return row(list(outcome.tokens), **given | fields)


def instead(answer: Generation, name: str, tokens: list[int], **fields: Any) -> Generation:
    """The same prompt with another answer."""
    return replace(answer, id=name, completion_tokens=tokens, logprobs=[-0.5] * len(tokens), **fields)


def over(opened: Opened, folder: Path, **more: Any) -> Evaluation:
    options = EvaluateOptions(data=(folder,), held_out=False, rounds=50, **more)
    return evaluate(options, opened=opened)


def test_documents_are_set_apart_for_what_they_are(opened: Opened, tmp_path: Path) -> None:
    good = answered(opened, "What is a list?")
    tokens = list(map(int, good.completion_tokens or ()))
    always = GREEDY | {"logit_bias": {str(tokens[0]): 999}}
    others = [
        instead(good, "wrong", [*tokens[:5], 77, 78]),
        instead(good, "constrained", [*tokens[:5], 77], request={"tools": [{}], "messages": []}),
        instead(good, "short", tokens[:1]),
        instead(good, "loops", tokens[:1] * 30, parameters=always),
        answered(opened, "Count.", number=3, temperature=0.7),
    ]
    found = over(opened, exported(tmp_path, good, *others))
    assert found.set_apart == {SHORT: 1, DIFFERS: 1, UNKNOWN: 1, LOOPS: 1}
    assert found.documents == 2
    mtp = found.rows[0]
    assert set(mtp.by["temperature"]) == {"0", "0.7"}
    assert mtp.by["set apart"][LOOPS]["documents"] == 1
    assert mtp.walk is not None
    assert mtp.walk["steps"] == sum(group["walk"]["steps"] for group in mtp.by["temperature"].values())
    assert mtp.stride is None


def test_several_exports_are_classes_told_apart_and_a_document_of_two_counts_once(
    opened: Opened, tmp_path: Path
) -> None:
    first, second = answered(opened, "What is a list?"), answered(opened, "Count.", number=1)
    folders = (exported(tmp_path, first, name="chat"), exported(tmp_path, first, second, name="code"))
    found = evaluate(EvaluateOptions(data=folders, held_out=False, rounds=20, every=5), opened=opened)
    classes = found.rows[0].by["class"]
    assert {name: group["documents"] for name, group in classes.items()} == {"chat": 1, "code": 1}
    assert found.documents == 2
    assert found.rows[0].stride is not None
    assert sum(group["stride"]["anchors"] for group in classes.values()) == found.rows[0].stride["anchors"]
    some = evaluate(EvaluateOptions(data=folders, held_out=False, rounds=20, most=1), opened=opened)
    assert some.documents == 1


def test_held_out_answers_that_training_has_parts_of_are_counted_and_told_apart(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = (f"What is {number}?" for number in range(200))
    held = (text for text in texts if held_out(opened.model.tokenizer.encode_chat(user(text), {}, ()).ids, 0))
    known, new = (answered(opened, next(held), number=number) for number in range(2))
    learned = instead(known, "learned", list(map(int, known.completion_tokens or ())))
    learned = replace(learned, prompt_tokens=prompt(0, is_held_out=False))
    folder = exported(tmp_path, known, new, learned)
    found = evaluate(EvaluateOptions(data=(folder,), rounds=20), opened=opened)
    assert (found.documents, found.known) == (2, 1)
    by = found.rows[0].by["training"]
    assert {name: group["documents"] for name, group in by.items()} == {"known": 1, "new": 1}
    assert found.rows[0].walk is not None
    assert found.rows[0].walk["steps"] == by["known"]["walk"]["steps"] + by["new"]["walk"]["steps"]
    everything = evaluate(EvaluateOptions(data=(folder,), held_out=False, rounds=20), opened=opened)
    assert (everything.known, "training" in everything.rows[0].by) == (0, False)  # training's own are no test
    monkeypatch.setattr("sys.argv", ["training", "evaluate", str(folder)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().out
    assert "2 documents, 1 of them with 13 tokens in a row of a training answer" in told
    assert "answers new to training" in told


def test_an_extraction_is_evaluated_as_the_export_that_it_is_of(opened: Opened, tmp_path: Path) -> None:
    rows = [answered(opened, text, number=i, temperature=i / 2) for i, text in enumerate(("What?", "Why a list?"))]
    folder = exported(tmp_path, *rows)
    extracted = extract(ExtractOptions(inputs=(folder,), model="tiny", out=tmp_path / "forced", device="cpu"))
    found, again = (over(opened, one, every=8, temperatures=(1.0,)).as_json() for one in (folder, extracted))
    assert found == again
    (extracted / "manifest.json").unlink()
    with pytest.raises(TrainingError, match="no complete export"):
        over(opened, extracted)


def test_strides_see_the_same_anchors_whoever_drafts(opened: Opened, tmp_path: Path) -> None:
    folder = exported(tmp_path, *(answered(opened, text, number=i) for i, text in enumerate(("What?", "Why a list?"))))
    found = over(opened, folder, every=1, temperatures=(1.0,))
    tokens = found.tokens
    for one in found.rows:
        assert one.stride is not None
        assert one.stride["anchors"] == tokens - 2  # N … T - 2 of two documents
        assert one.stride["surv"][0] == one.stride["hit"][0]
        assert set(one.by["depth"]) == {"0-512"}
    again = over(opened, folder, every=1, temperatures=(1.0,))
    assert again.as_json() == found.as_json()


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_answers_shorter_than_the_slots_are_judged_as_far_as_they_go(
    opened: Opened, tmp_path: Path, length: int
) -> None:
    whole = answered(opened, "What is a list?")
    tokens = list(map(int, whole.completion_tokens or ()))[:length]
    cut = instead(whole, "cut", tokens, parameters=GREEDY | {"max_tokens": length})
    for found in over(opened, exported(tmp_path, cut), every=1).rows:
        assert found.walk is not None
        assert found.stride is not None
        assert found.walk["proposed"][-1] == 0  # the last token of a budget is never drafted
        assert [figure.n for figure in found.stride["hit"]] == [max(length - 1 - slot, 0) for slot in range(4)]
        assert (found.stride["chain"].value is None) == (length < 5)  # no anchor has every slot


def test_fixed_texts_are_judged_by_the_targets_own_choices(opened: Opened, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x + 1\n\n" * 60)
    found = evaluate(EvaluateOptions(text=(text,), temperatures=(), rounds=20), opened=opened)
    assert not found.rows
    mtp, ngrams = found.texts
    assert mtp.stride is not None
    assert ngrams.stride is not None
    assert mtp.stride["anchors"] == ngrams.stride["anchors"] > 40
    assert list(mtp.by["depth"]) == ["0-512", "512-2048"]
    assert sum(part["stride"]["anchors"] for part in mtp.by["depth"].values()) == mtp.stride["anchors"]
    (name,) = mtp.by["text"]
    assert name.startswith("text.py ")


def test_answers_of_other_weights_are_refused(opened: Opened, tmp_path: Path) -> None:
    folder = exported(tmp_path, row([5, 6, 7]))
    with pytest.raises(TrainingError, match=r"other weights \(aaaaaaaaaaaa\) than the model's"):
        over(opened, folder)


def test_where_nothing_is_left_the_reasons_are_told(opened: Opened, tmp_path: Path) -> None:
    folder = exported(tmp_path, instead(answered(opened, "Hi"), "one", [5]))
    with pytest.raises(TrainingError, match="no document to evaluate on: 1 no step"):
        over(opened, folder)
    with pytest.raises(TrainingError, match="no document to evaluate on: there are none"):
        evaluate(EvaluateOptions(data=(exported(tmp_path, row([5, 6]), name="train"),)), opened=opened)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to evaluate on"),
        (["nowhere.npz"], "no shard at nowhere.npz"),
        (["--text", "short.txt", "--drafter", "eagle"], "no drafter 'eagle'"),
        (["--text", "nowhere.txt"], "cannot read nowhere.txt: No such file"),
        (["--text", "short.txt"], "short.txt has 1 tokens: a text needs 66"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("a")
    monkeypatch.setattr("sys.argv", ["training", "evaluate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert said in errors[0]


def test_the_json_is_written_where_it_was_asked_for_or_it_is_said_at_once(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(tmp_path, answered(opened, "What is a list?"))
    monkeypatch.setenv("DRAFTLOOP_LEDGER", str(tmp_path / "ledger.jsonl"))

    def told(out: Path) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["training", "evaluate", str(folder), "--all", "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    new = tmp_path / "new" / "folder" / "found.json"
    assert told(new)[0] == 0
    assert json.loads(new.read_text())["documents"] == 1
    code, error = told(tmp_path)
    assert (code, "is a directory" in error, "walking" in error) == (2, True, False)
    code, error = told(new / "below")
    assert (code, error.count("error:")) == (2, 1)
    assert f"cannot write {new / 'below'}: " in error.replace("\n", "")


def test_the_table_tells_every_row(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(tmp_path, answered(opened, "What is a list?"))
    drafters = ("--drafter", "mtp", "--drafter", "prediction", "--drafter", "mtp")
    monkeypatch.setattr("sys.argv", ["training", "evaluate", str(folder), "--all", *drafters, "--stride", "6"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "1 documents" in told
    assert "set apart: none" in told
    for word in ("mtp 2", "prediction", "τ", "Σ min(p, q)", "0-512"):
        assert word in told
