"""The corpus: facts read from source text, seeded conversations, exact rendering, whole documents in rows."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backend.tiny
from backend.text.tokenizer import ChatTokenizer
from training.pretraining.conversation import Conversation, Turn, render
from training.pretraining.corpus import PROMPT_WEIGHT, conversations, encode_document, pack
from training.pretraining.lessons import arithmetic, evaluation, program
from training.pretraining.own_answers import prompt_ids
from training.pretraining.questions import KINDS, ask
from training.pretraining.sources import Fact, Parameter, facts_of, is_held_out

SOURCE = '''"""Tools for text. More words."""
def dedent(text, width=70, *rest, strict: bool = False, **options) -> str:
    """Remove leading
    whitespace from every line. And more.
    """
    lines = text.split()
    return lines[width]

def _hidden():
    """Not for anyone to see."""
    return 1

class Wrapper:
    """Wraps a paragraph of text."""
    def __init__(self, width):
        self.width = width
    def wrap(self, text):
        """Return a list of wrapped lines."""
        return [text]
'''


@pytest.fixture(scope="module")
def facts() -> list[Fact]:
    """Facts of 60 made-up modules, some of which are held out."""
    return [fact for i in range(60) for fact in facts_of(SOURCE, f"module{i}")]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(Path(backend.tiny.__file__).parent)


def rendered(conversation: Conversation) -> str:
    return "".join(text for text, _ in render(conversation))


def test_a_function_is_read_with_its_arguments_and_without_its_docstring() -> None:
    fact = next(f for f in facts_of(SOURCE, "text") if f.name == "dedent")
    assert fact.summary == "Remove leading whitespace from every line."
    assert fact.parameters == (
        Parameter("text"),
        Parameter("width", "70"),
        Parameter("*rest"),
        Parameter("strict", "False", "bool"),
        Parameter("**options"),
    )
    assert fact.returns == "str"
    assert "whitespace" not in fact.code
    assert fact.code.endswith("lines = text.split()\n    return lines[width]")


def test_modules_classes_and_methods_are_facts_and_private_names_are_not() -> None:
    found = {fact.path: fact.kind for fact in facts_of(SOURCE, "text")}
    assert found == {
        "text": "module",
        "text.dedent": "function",
        "text.Wrapper": "class",
        "text.Wrapper.wrap": "method",
    }


def test_self_is_no_argument_and_a_class_takes_those_of_its_init() -> None:
    by_path = {fact.path: fact for fact in facts_of(SOURCE, "text")}
    assert by_path["text.Wrapper.wrap"].parameters == (Parameter("text"),)
    assert by_path["text.Wrapper"].parameters == (Parameter("width"),)
    assert by_path["text.Wrapper"].members == ("wrap",)


def test_a_file_that_does_not_parse_has_no_facts() -> None:
    assert list(facts_of("def broken(:\n", "broken")) == []


def test_about_one_module_in_twelve_is_held_out_whatever_the_others_are() -> None:
    names = [f"package.module_{i}" for i in range(4000)]
    held_out = [name for name in names if is_held_out(name)]
    assert 0.06 < len(held_out) / len(names) < 0.10
    assert is_held_out("textwrap") == is_held_out("textwrap")
    assert [name for name in reversed(names) if is_held_out(name)] == held_out[::-1]


def test_a_held_out_module_is_never_spoken_of_in_training(facts: list[Fact]) -> None:
    hidden = {fact.module for fact in facts if is_held_out(fact.module)}
    assert hidden
    named = re.compile(r"\bmodule\d+\b")
    training = [rendered(c) for c in itertools.islice(conversations(facts, 3), 3000)]
    spoken = {name for text in training for name in named.findall(text)}
    assert spoken
    assert not spoken & hidden
    held_out = [rendered(c) for c in itertools.islice(conversations(facts, 3, held_out=True), 300)]
    assert {name for text in held_out for name in named.findall(text)} <= hidden


def test_the_same_seed_gives_the_same_conversations(facts: list[Fact]) -> None:
    first, again, other = (list(itertools.islice(conversations(facts, seed), 200)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_every_kind_of_question_is_asked(facts: list[Fact]) -> None:
    rng = random.Random(0)
    for kind in KINDS:
        assert any(kind(fact, rng) for fact in facts), kind.__name__


def test_an_answer_lists_exactly_the_arguments_of_the_signature(facts: list[Fact]) -> None:
    fact = next(f for f in facts if f.name == "dedent")
    turns = [c.turns[0] for seed in range(300) if (c := ask(fact, random.Random(seed)))]
    listing = next(turn for turn in turns if "takes 5 arguments:" in turn.answer)
    assert "- `width`, default `70`\n- `*rest`\n- `strict` (`bool`), default `False`" in listing.answer


@pytest.mark.parametrize("seed", range(40))
def test_an_expression_is_answered_with_its_value(seed: int) -> None:
    answer = evaluation(random.Random(seed)).turns[-1].answer
    match = re.fullmatch(r"`(.*)` returns `(.*)`\.", answer)
    assert match
    assert repr(eval(match[1])) == match[2]


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_is_right(seed: int) -> None:
    for turn in arithmetic(random.Random(seed)).turns:
        left, right = turn.answer.split(" = ")
        assert eval(left) == int(right)


@pytest.mark.parametrize("seed", range(60))
def test_a_program_is_valid_python(seed: int) -> None:
    answer = program(random.Random(seed)).turns[-1].answer
    code = answer.split("```python\n")[1].removesuffix("\n```")
    compile(code, "answer", "exec")


CASES = [
    Conversation((Turn("Hi", "Hello!"),)),
    Conversation((Turn("  padded \n", "Yes. "),), system="Be brief."),
    Conversation((Turn("2+2?", "4"), Turn("And 3+3?", "6"))),
    Conversation((Turn("2+2?", "4"), Turn("And 3+3?", "6")), reasoning="This is a sum."),
]


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_is_what_the_bundled_template_renders(case: Conversation, tokenizer: ChatTokenizer) -> None:
    kwargs = {"enable_thinking": True} if case.reasoning else {}
    prompt = tokenizer.encode_chat(case.messages(), kwargs)
    assert rendered(case).startswith(prompt.text)
    encode = tokenizer_encode()
    assert tuple(prompt_ids(case, encode)) == prompt.ids


def tokenizer_encode():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(Path(backend.tiny.__file__).parent)
    return lambda text: loaded.encode(text, add_special_tokens=False)


def test_encoding_piece_by_piece_equals_encoding_the_whole_text(facts: list[Fact]) -> None:
    encode = tokenizer_encode()
    for conversation in itertools.islice(conversations(facts, 1), 200):
        assert encode_document(conversation, encode)[0] == encode(rendered(conversation))


def test_only_the_models_own_words_weigh_fully() -> None:
    ids, weights = encode_document(CASES[2], lambda text: list(text.encode()))
    own = bytes(i for i, w in zip(ids, weights, strict=True) if w == 1.0).decode()
    assert own == "6<|im_end|>"
    assert weights[0] == 0.0
    assert set(weights[1:]) == {1.0, PROMPT_WEIGHT}


documents = st.lists(
    st.integers(1, 20).flatmap(lambda n: st.lists(st.integers(1, 999), min_size=n, max_size=n)), min_size=1, max_size=60
)


@given(documents)
@settings(deadline=None)
def test_packing_keeps_documents_whole_and_in_one_row_each(found: list[list[int]]) -> None:
    endless = itertools.cycle([([1000 + i, *ids], [0.0] + [1.0] * len(ids)) for i, ids in enumerate(found)])
    rows = pack(endless, length=32, rows=6, pad=0, open_rows=3)
    for tokens, weights in zip(rows.tokens.tolist(), rows.weights.tolist(), strict=True):
        text = " ".join(map(str, tokens)).split(" 0")[0] + " "
        for part in re.findall(r"1\d\d\d (?:\d{1,3} )*", text):
            head, *rest = map(int, part.split())
            assert rest == found[head - 1000]
        assert all((w == 0.0) == (t == 0 or t >= 1000) for t, w in zip(tokens, weights, strict=True))


def test_documents_longer_than_a_row_are_left_out() -> None:
    short, long = ([7] * 4, [1.0] * 4), ([8] * 40, [1.0] * 40)
    rows = pack(itertools.cycle([short, long]), length=16, rows=3, pad=0)
    assert 8 not in rows.tokens


def test_too_few_documents_are_an_error() -> None:
    with pytest.raises(ValueError, match="fill only"):
        pack([([1, 2], [0.0, 1.0])], length=16, rows=3, pad=0)
