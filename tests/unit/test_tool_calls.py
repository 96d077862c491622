"""Tool calls are told apart from content the same way however an answer arrives, and their arguments are JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from backend.interface import ToolCallDelta
from backend.text.reasoning import ReasoningSplitter
from backend.text.tool_calls import ToolCallParser
from backend.text.tool_schemas import parameter_types
from tests.checkpoints import tiny

TOKENIZER = tiny().tokenizer
JSON_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "metric": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"enum": ["C", "F", 1]},
            "zone": {"$ref": "#/$defs/Zone"},
            "any": {"description": "anything"},
        },
        **{"$defs": {"Zone": {"type": ["integer", "null"]}}},
    ),
    tool("now"),
]


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(name: str, **values: str) -> str:
    written = "".join(parameter(key, value) for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


@dataclass(frozen=True)
class Told:
    """What an answer was told as; calls without their ids, which are random."""

    content: str
    calls: tuple[tuple[str, str], ...]
    reasoning: str = ""

    @property
    def arguments(self) -> list[Any]:
        return [json.loads(arguments) for _, arguments in self.calls]


def joined(deltas: Iterable[ToolCallDelta]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call, as a client puts them together."""
    calls: list[tuple[str, str, str]] = []
    for delta in deltas:
        if delta.index == len(calls):
            assert delta.id is not None
            assert delta.name is not None
            calls.append((delta.id, delta.name, delta.arguments))
        else:
            assert delta.id is delta.name is None
            number, name, arguments = calls[delta.index]
            calls[delta.index] = (number, name, arguments + delta.arguments)
    return calls


def told(
    pieces: Sequence[str],
    *,
    cut: bool = False,
    parallel: bool = True,
    thinking: bool = False,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> Told:
    splitter, parser = ReasoningSplitter(thinking, calls=True), ToolCallParser(tools, parallel=parallel)
    splits = [*map(splitter.push, pieces), splitter.finish()]
    parsed = [*(parser.push(split.content) for split in splits), parser.finish(cut=cut)]
    calls = joined(delta for each in parsed for delta in each.calls)
    assert calls == [(each.id, each.name, each.arguments) for each in parser.calls]
    assert all(re.fullmatch("call_[0-9a-f]{24}", number) for number, _, _ in calls)
    assert len({number for number, _, _ in calls}) == len(calls)
    return Told(
        "".join(each.content for each in parsed),
        tuple((name, arguments) for _, name, arguments in calls),
        "".join(split.reasoning for split in splits),
    )


ROME = call("weather", city="Rome", days="2")
ROME_CALL = ("weather", '{"city": "Rome", "days": 2}')
NOW = call("now")
NOW_CALL = ("now", "{}")

TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    (" Hello <b> you\n", " Hello <b> you\n", []),
    (ROME, "", [ROME_CALL]),
    (f"\n{ROME}\n", "", [ROME_CALL]),
    (f"Let me look.\n\n{ROME}\n{NOW}\n", "Let me look.", [ROME_CALL, NOW_CALL]),
    (f"One.\n{ROME}\nTwo.\n{NOW} Three. ", "One.\nTwo.\nThree.", [ROME_CALL, NOW_CALL]),
    (f"{ROME}\nDone.", "Done.", [ROME_CALL]),
    # Closing tags left out where what follows makes up for them.
    (ROME.replace("</parameter>\n", ""), "", [ROME_CALL]),
    (ROME.replace("</function>\n", ""), "", [ROME_CALL]),
    (ROME.replace("\n</tool_call>", ""), "", [ROME_CALL]),
    (ROME.replace("\n</tool_call>", NOW), "", [ROME_CALL, NOW_CALL]),
    (ROME.replace("</function>\n</tool_call>", NOW), "", [ROME_CALL, NOW_CALL]),
    (ROME.replace("</function>", "<function=now>\n</function>"), "", [ROME_CALL, NOW_CALL]),
    (ROME.replace("</parameter>\n</function>\n", ""), "", [ROME_CALL]),
    (f"{ROME[: ROME.index('</parameter>')]}</tool_call>\n{NOW}", "", [("weather", '{"city": "Rome"}'), NOW_CALL]),
    # The first tag left out, of a function that is a tool.
    (f"Well.\n{ROME.removeprefix('<tool_call>')}", "Well.", [ROME_CALL]),
    ("Write <function=sleep> so.", "Write <function=sleep> so.", []),
    # White space is the model's.
    (f"<tool_call>{ROME.removeprefix('<tool_call>').replace(chr(10), '')}", "", [ROME_CALL]),
    ("<tool_call>\n\n <function= weather >\n\n\n</function>  \n</tool_call>", "", [("weather", "{}")]),
    # Junk between parameters, and parameters that are none.
    (ROME.replace("<parameter=city", "so <b>: </parameter> <parameter=>5 <parameter=city"), "", [ROME_CALL]),
    # A function that is no tool is the client's to refuse.
    (call("sleep", hours="8"), "", [("sleep", '{"hours": "8"}')]),
    # As Hermes and the older Qwen spell it.
    (
        '<tool_call>\n{"name": "now", "arguments": {"a": ["</b>", "\u4f60"]}}\n</tool_call>',
        "",
        [("now", '{"a": ["</b>", "\u4f60"]}')],
    ),
    (f'<tool_call>{{"name": "now"}}</tool_call>{ROME}', "", [NOW_CALL, ROME_CALL]),
    ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', "", [("now", '{"a": 1}')]),
    (f'<tool_call>{{"name": "now"}}{ROME}', "", [NOW_CALL, ROME_CALL]),
    # No call at all.
    ('<tool_call>{"name": "a\\nb"}</tool_call>', '{"name": "a\\nb"}', []),
    ('<tool_call>{"name": "now", "arguments": {"a": 1e400}}', '{"name": "now", "arguments": {"a": 1e400}}', []),
    ('<tool_call>\n{"name": 1}\n</tool_call>', '{"name": 1}\n', []),
    ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', '{"name": "now", "arguments": [1]}', []),
    (
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>',
        '{"name": "now", "arguments": {"a": "\\ud800"}}',
        [],
    ),
    ("<tool_call>\nnow()\n</tool_call> Right?", "now()\n Right?", []),
    (f"<tool_call><tool_call>{ROME}</tool_call>", "", [ROME_CALL]),
    ("<tool_call><function=we<b>", "<function=we<b>", []),
    ("<tool_call><function=>x", "<function=>x", []),
    (f"<tool_call><function={'a' * 1024}>", "", [("a" * 1024, "{}")]),
    (f"<tool_call><function={'a' * 1025}>", f"<function={'a' * 1025}>", []),
    ("<tool_call>\n<function=weat", "", []),
    ("<tool_call>\n<func", "", []),
    ("see <tool_ca", "see <tool_ca", []),
    (f"{ROME}\n</tool_ca", "", [ROME_CALL]),
    (f"{ROME}\n</think>\n\nDone.", "Done.", [ROME_CALL]),
]


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS, ids=lambda value: repr(value)[:40])
def test_an_answer_is_told_as_content_and_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told([text]) == Told(content, tuple(calls))


@pytest.mark.parametrize("text", [text for text, _, _ in TEXTS], ids=lambda value: repr(value)[:40])
def test_every_split_in_two_and_into_characters_tells_the_same(text: str) -> None:
    for cut in (False, True):
        whole = told([text], cut=cut)
        assert told(list(text), cut=cut) == whole
        for at in range(len(text)):
            assert told([text[:at], text[at:]], cut=cut) == whole


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "\n<tool_call>\n<function=weather>\n", "<function=now>", "<function=sleep>"),
    *("</function>", "\n</function>\n</tool_call>", "<parameter=city>", "\n<parameter=days>\n", "<parameter=where>\n"),
    *("</parameter>", "\n</parameter>\n", "</think>", "\n", "\n\n", " ", "42", "null", '{"a": 1}', '"', "\\", "é🤖"),
    *('{"name": "now", "arguments": {"a": 1}}', "<parameter=x>", "<b>", "</", "<", ">", "Rome"),
]
MARKUP = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=14)
LOOKALIKES = st.lists(
    st.sampled_from([*FRAGMENTS, "<tool", "_call>", "<fun", "ction=", "/param", "eter>"]), max_size=14
)


def cut_up(text: str, marks: Sequence[float]) -> list[str]:
    places = sorted({0, len(text), *(int(mark * len(text)) for mark in marks)})
    return [text[begin:end] for begin, end in pairwise(places)]


MARKS = st.lists(st.floats(0, 1), max_size=12)


@given(st.one_of(MARKUP, LOOKALIKES).map("".join), MARKS, st.booleans(), st.booleans(), st.booleans())
@example("why</think><tool_call>\n<function=now>", [], True, False, True)
@example("why\n<tool_call>\n", [0.5], True, False, True)
@settings(deadline=None, max_examples=400)
def test_any_split_of_any_text_tells_the_same(
    text: str, marks: list[float], thinking: bool, cut: bool, parallel: bool
) -> None:
    whole = told([text], thinking=thinking, cut=cut, parallel=parallel)
    assert told(cut_up(text, marks), thinking=thinking, cut=cut, parallel=parallel) == whole
    assert told(list(text), thinking=thinking, cut=cut, parallel=parallel) == whole


@given(MARKUP.map("".join))
@settings(deadline=None, max_examples=400)
def test_arguments_are_json_objects_and_markup_never_is_content(text: str) -> None:
    whole = told([text])
    assert all(isinstance(arguments, dict) for arguments in whole.arguments)
    assert not re.search("</?tool_call>|<function=(weather|now)>", whole.content)
    # Cut off there, all calls but the last are the same, and that one begins as it would have gone on.
    unfinished = told([text], cut=True)
    assert unfinished.calls[:-1] == whole.calls[: len(unfinished.calls[:-1])]
    for (name, begun), (same, finished) in zip(unfinished.calls[-1:], whole.calls[-1:], strict=False):
        assert (name, finished[: len(begun)]) == (same, begun)


@given(MARKUP.map("".join), MARKUP.map("".join))
@settings(deadline=None, max_examples=200)
def test_what_was_told_stays_told_whatever_follows(text: str, more: str) -> None:
    so_far, at_last = told([text], cut=True), told([text + more], cut=True)
    assert len(at_last.calls) >= len(so_far.calls) - ("{" in text)  # JSON may turn out not to be a call
    for (name, begun), (same, later) in zip(so_far.calls[:-1], at_last.calls, strict=False):
        assert (name, begun) == (same, later)


VALUES: list[tuple[str, str, Any]] = [
    ("city", "", ""),
    ("city", "\nRome\n", "\nRome\n"),
    ("city", "  Rome ", "  Rome "),
    ("city", "42", "42"),
    ("city", "null", "null"),
    ("city", 'a "b" \\ \t\x00\x7f\u2028 <b> é🤖', 'a "b" \\ \t\x00\x7f\u2028 <b> é🤖'),
    ("city", "<parameter name='a'>1</parameter>", "<parameter name='a'>1</parameter>"),
    ("city", "a </function> b </tool_call> c", "a </function> b </tool_call> c"),
    ("city", "so:\n<parameter=key>\nvalue\n</parameter>\nend", "so:\n<parameter=key>\nvalue\n</parameter>\nend"),
    ("city", "so:\n<parameter=city>\nx", "so:\n<parameter=city>\nx"),
    ("days", "3", 3),
    ("days", " -3 ", -3),
    ("days", "3.0", 3.0),
    ("days", "3.5", "3.5"),
    ("days", "three", "three"),
    ("days", "True", "True"),
    ("days", '"3"', '"3"'),
    ("days", "", ""),
    ("days", "None", None),
    ("share", "1.50", 1.5),
    ("share", "1e400", float("inf")),
    ("share", "NaN", "NaN"),
    ("share", "Infinity", "Infinity"),
    ("share", "9" * 5000, "9" * 5000),
    ("metric", "true", True),
    ("metric", "False", False),
    ("metric", "maybe", "maybe"),
    ("where", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
    ("where", '{"a": True, "b": "True None", "c": None}', {"a": True, "b": "True None", "c": None}),
    ("where", "{'a': 1}", "{'a': 1}"),
    ("where", "[1]", "[1]"),
    ("where", "[" * 5000, "[" * 5000),
    ("tags", '["a",\n "b"]', ["a", "b"]),
    ("note", "null", None),
    ("note", "None", None),
    ("note", "hello", "hello"),
    ("note", "5", "5"),
    ("note", '"hello"', '"hello"'),
    ("unit", "C", "C"),
    ("unit", "1", 1),
    ("zone", "7", 7),
    ("zone", "null", None),
    ("any", '{"a": 1}', '{"a": 1}'),
    ("unknown", "42", "42"),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES, ids=lambda value: repr(value)[:30])
def test_a_value_is_of_the_type_its_schema_says(key: str, text: str, value: Any) -> None:
    whole = told([call("weather", **{key: text})])
    assert whole.arguments == [{key: value}]
    assert type(whole.arguments[0][key]) is type(value)
    assert told(list(call("weather", **{key: text}))) == whole


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "int", "nullable": True}, {"integer", "null"}),
        ({"enum": ["a", 1, None, True, 1.5]}, {"string", "integer", "null", "boolean", "number"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a~1b"}]}, {"integer", "object"}),
        ({"oneOf": [{"type": "integer"}, {}]}, {"string"}),
        (
            {"allOf": [{"type": ["integer", "null"]}, {"description": "x"}, {"type": ["integer", "string"]}]},
            {"integer"},
        ),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"minimum": 3}, {"number"}),
        ({"maxLength": 3}, {"string"}),
        ({"$ref": "#/$defs/loop"}, {"string"}),
        ({"$ref": "#/$defs/nowhere"}, {"string"}),
        ({"$ref": "https://example.com/schema"}, {"string"}),
        ({"$ref": "#/$defs/deep"}, {"string"}),
        # Were each reference followed for itself, these would take for ever.
        ({"$ref": "#/$defs/wide"}, {"string"}),
        ({"$ref": "#/$defs/wide0"}, {"integer"}),
        (True, {"string"}),
        ({}, {"string"}),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict | bool) else " ".join(sorted(value)),  # sets have no order
)
def test_types_are_read_from_every_way_a_schema_names_them(schema: Any, types: set[str]) -> None:
    definitions: dict[str, Any] = {
        "a/b": {"properties": {}},
        "loop": {"$ref": "#/$defs/loop"},
        "deep": {"anyOf": [{"$ref": "#/$defs/deep"}, {"type": "integer"}]},
        "wide": {"anyOf": [{"$ref": "#/$defs/wide"}] * 20},
        **{f"wide{at}": {"oneOf": [{"$ref": f"#/$defs/wide{at + 1}"}] * 20} for at in range(12)},
        "wide12": {"type": "integer"},
    }
    assert parameter_types([tool("f", {"p": schema}, **{"$defs": definitions})]) == {"f": {"p": types}}


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.sampled_from(JSON_TYPES)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "properties", "anyOf", "allOf", "enum", "const", "$ref", "items", "nullable"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@given(JSON, st.text(max_size=8))
@settings(deadline=None)
def test_no_schema_is_too_odd_to_be_called_by(schema: Any, value: str) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    assume("</" not in value)
    whole = told([call("odd", type=value)], tools=[odd, tool("f", {"type": schema})])
    assert list(whole.arguments[0]) == ["type"]


ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "city": st.text(max_size=12),
    "days": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "metric": st.booleans(),
    "where": st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    "tags": st.lists(st.one_of(st.booleans(), st.text(max_size=3)), max_size=3),
    "zone": st.one_of(st.none(), st.integers()),
}
CALLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({}, optional=ARGUMENTS).map(lambda given: ("weather", given)),
        st.just(("now", {})),
    ),
    min_size=1,
    max_size=3,
)


@given(CALLS, st.sampled_from(["", "Let me look."]), MARKS)
@settings(deadline=None, max_examples=60)
def test_calls_as_the_chat_template_writes_them_come_back(
    calls: list[tuple[str, dict[str, Any]]], prose: str, marks: list[float]
) -> None:
    message = {
        "role": "assistant",
        "content": prose,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    prompt = TOKENIZER.render([{"role": "user", "content": "?"}, message], {"add_generation_prompt": False})
    text = prompt.rpartition("</think>\n\n")[2].removesuffix("<|im_end|>\n")
    whole = told(cut_up(text, marks))
    assert whole.content == prose
    assert [name for name, _ in whole.calls] == [name for name, _ in calls]
    assert whole.arguments == [arguments for _, arguments in calls]


def test_the_first_of_two_values_of_one_parameter_counts() -> None:
    text = call("weather", city="Rome", days="2").replace("</function>", parameter("city", "Oslo") + "</function>")
    for pieces in ([text], list(text)):
        assert told(pieces).calls == (ROME_CALL,)


def test_text_is_told_while_it_arrives() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.push("Well, <tool_call>\n<function=weather>\n<parameter=city>\n").content == "Well,"
    assert parser.calls[0].arguments == '{"city": "'
    assert parser.push("Rö").calls == (ToolCallDelta(0, "Rö"),)
    assert parser.push('"me <').calls == (ToolCallDelta(0, '\\"me '),)
    assert parser.push("b>").calls == (ToolCallDelta(0, "<b>"),)
    assert parser.push("\n</parameter>").calls == ()
    assert parser.push("\n</fun").calls == ()
    assert parser.push("ction>\n</tool_call>").calls == (ToolCallDelta(0, '"}'),)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>\n<function=weather", None),
        ("<tool_call>\n<function=weather>\n", ""),
        (ROME[: ROME.index("me\n")], '{"city": "Ro'),
        (ROME[: ROME.index("\n</parameter>")], '{"city": "Rome'),
        (ROME[: ROME.index("2")], '{"city": "Rome"'),
        (ROME[: ROME.index("</function>")], '{"city": "Rome"'),
        (ROME[: ROME.index("</tool_call>")], '{"city": "Rome", "days": 2}'),
        ('<tool_call>{"name": "now", "argum', None),
    ],
    ids=str,
)
def test_a_call_cut_off_is_told_as_far_as_it_got(text: str, arguments: str | None) -> None:
    expected = () if arguments is None else (("weather", arguments),)
    assert told([text], cut=True) == Told("", expected) == told(list(text), cut=True)
    if arguments is not None:  # had the model ended there, its call would be closed
        assert isinstance(told([text]).arguments[0], dict)


def test_calls_after_the_first_are_left_out_where_only_one_is_wanted() -> None:
    json_call = '<tool_call>{"name": "now"}</tool_call>'
    assert told([f"So. {ROME}\n{NOW}{json_call} Done."], parallel=False) == Told("So. Done.", (ROME_CALL,))


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"why\n</think>\n\n{NOW}", "why", "", [NOW_CALL]),
        (f"why</think>{NOW}", "why", "", [NOW_CALL]),
        (f"why\n\n{NOW}", "why", "", [NOW_CALL]),
        (f"why\n{NOW}\n</think>\n\nDone.", "why", "Done.", [NOW_CALL]),
        (f"a <tool_call> is for\n</think>\n{NOW}", "a <tool_call> is for", "", [NOW_CALL]),
        ("why <tool_call>\n", "why <tool_call>", "", []),
        ("why\n<tool_call>\n<function=now>", "why", "", [NOW_CALL]),
    ],
)
def test_a_call_inside_the_reasoning_ends_it_as_in_vllm(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        assert told(pieces, thinking=True) == Told(content, tuple(calls), reasoning)
