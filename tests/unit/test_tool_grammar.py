"""Tools' grammars: which calls each schema allows, that what they allow is read back as its values, what is refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.interface import InvalidRequest
from backend.text.grammar import GrammarCompiler
from backend.text.tokenizer import ChatTokenizer
from backend.text.tool_calls import ToolCallParser
from tests.unit.test_grammar import TINY


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(TINY)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "act", "parameters": parameters, **more}}


def one(schema: Any, **more: Any) -> dict[str, Any]:
    """A tool with one parameter, `v`."""
    definitions = more.pop("definitions", {})
    return tool({"type": "object", "properties": {"v": schema}, "required": ["v"], **definitions}, **more)


def body(values: dict[str, str]) -> str:
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"\n<function=act>\n{written}</function>\n"


def fits(described: dict[str, Any], values: dict[str, str]) -> bool:
    """Whether a call with these texts as values is one by the tool's grammar."""
    tags = [tokenizer().literal_id(tag) for tag in ("<tool_call>", "</tool_call>")]
    matcher = compiler().calls([described], many=False)
    tokens = [tags[0], *tokenizer().plain(body(values)), tags[1]]
    return all(token is not None and matcher.advance(token) for token in tokens) and matcher.accepts


def allows(schema: Any, value: str, **more: Any) -> bool:
    return fits(one(schema, **more), {"v": value})


TREE = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
# A parameter's schema, texts that are values of it, and texts that are none.
VALUES: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "string"},
        ["", "a", "two\nlines\n", '"quoted"', "12", "<b>", "</tool_call>", "</parameter>", "ü€🙂"],
        [],
    ),
    ({"type": "string"}, ["\n\n", "\n<param", "</function>"], ["a\n</parameter>\nb", "a\n<parameter=w>\nb"]),
    ({}, ["anything", "12", "{}"], []),
    (True, ["anything"], []),
    ({"description": "no type"}, ["anything"], []),
    ({"type": "integer"}, ["0", "-12"], ["1.5", "one", "", '"1"']),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13"]),
    ({"type": "number"}, ["1.5", "-2e3"], ["x", ""]),
    ({"type": "boolean"}, ["true", "false"], ["True", "yes"]),
    ({"type": "null"}, ["null"], ["none"]),
    ({"enum": ["a", "ab", "c d", 'e"f', "g/h"]}, ["a", "ab", "c d", 'e"f', "g/h"], ["b", "", '"a"', "abc"]),
    ({"type": "string", "enum": ["a", ""]}, ["a", ""], ["b"]),
    ({"enum": ["a", 1, None, {"x": [1]}]}, ["a", "1", "null", '{"x": [1]}'], ["2", '"a"', "{}"]),
    ({"type": "integer", "enum": ["a", 1]}, ["1"], ["a"]),
    ({"const": "only"}, ["only"], ["other"]),
    ({"const": 5}, ["5"], ["6"]),
    (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        ["[]", "[1,2]", "[ 1 ]"],
        ["[1,2,3]", '["a"]', "1"],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
        ['{"a": "b"}', '{"a":"</parameter>"}'],
        ["{}", '{"a": 1}', '{"a": "b", "c": 1}'],
    ),
    ({"properties": {"a": {"type": "null"}}}, ['{"a": null}'], ['{"a": 1}', "text"]),
    ({"type": ["integer", "null"]}, ["1", "null"], ["x"]),
    ({"type": ["string", "null"]}, ["x", "null", "1"], []),
    ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, ["1", "auto"], ["manual", "true"]),
    ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]}, ["1", "[null]"], ["[1]", "x"]),
    ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, ["true", "text"], []),
    ({"allOf": [{"type": "string"}, {"enum": ["x"]}]}, ["x"], ["y"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, ["5"], ["4"]),
    ({"$ref": "#/$defs/tree"}, ["[]", "[[], [[]]]"], ["[1]", "x"]),
    ({"type": "array", "items": {"$ref": "#/$defs/tree"}}, ["[[]]"], ["[1]"]),
    ({"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}], "title": "V", "default": None}, ["null", "[]"], ["x"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES, ids=lambda value: json.dumps(value)[:60])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_value_is_written_by_its_type(schema: Any, good: list[str], bad: list[str], strict: bool) -> None:
    if strict and "oneOf" in json.dumps(schema):
        return
    for value in good:
        assert allows(schema, value, definitions=TREE, strict=strict), value
    for value in bad:
        assert not allows(schema, value, definitions=TREE, strict=strict), value


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_values_text_has_the_form_that_its_schema_asks_for(strict: bool) -> None:
    pattern = {"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"}
    length = {"type": "string", "minLength": 2, "maxLength": 4}
    for schema, good, bad in (
        (pattern, ["a/12", "xyz/00"], ["a/1", " a/12", "a/123", "A/12"]),
        ({"type": "string", "pattern": "b\\$"}, ["b$", "ab$c"], ["b", "c"]),
        (length, ["ab", "abcd", "äöüß", "\n\n"], ["a", "abcde"]),
        ({**pattern, "maxLength": 4}, ["a/12"], ["ab/12"]),
        ({**length, "type": ["string", "null"]}, ["abc", "null"], ["abcdef"]),
    ):
        for value in (*good, *bad):
            assert allows(schema, value, strict=strict) is (value in good), value


@pytest.mark.parametrize("form", [{"pattern": "^(?=a)"}, {"pattern": "("}, {"minLength": 9000}], ids=str)
def test_a_form_that_cannot_be_kept_is_left_aside_unless_it_is_strict(form: dict[str, Any]) -> None:
    assert allows({"type": "string", **form}, "anything")
    with pytest.raises(InvalidRequest):
        allows({"type": "string", **form}, "anything", strict=True)


PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c d": {"type": "boolean"}}


def test_parameters_come_in_the_schemas_order_required_ones_always() -> None:
    some = tool({"type": "object", "properties": PROPERTIES, "required": ["b"]})
    for good in ({"b": "x"}, {"a": "1", "b": "x"}, {"b": "x", "c d": "true"}, {"a": "1", "b": "x", "c d": "true"}):
        assert fits(some, good)
    for bad in ({}, {"a": "1"}, {"b": "x", "a": "1"}, {"b": "x", "e": "y"}, {"a": "1", "c d": "true"}):
        assert not fits(some, bad)


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (None, [{}], [{"a": "1"}]),
        ({"type": "object", "properties": {}}, [{}], [{"a": "1"}]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": "1"}]),
        ({"type": "object"}, [{}, {"any": "1", "thing": "x y"}], []),
        ({"type": "object", "required": ["a"]}, [{"a": "x y"}], [{}, {"b": "1"}]),
        ({"properties": {"a": {"const": 1}}, "required": ["b"]}, [{"b": "x"}, {"a": "1", "b": "x"}], [{"a": "1"}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"any": "1"}], [{"any": "x"}]),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"const": 1}}}}},
            [{}, {"a": "1"}],
            [{"a": "2"}, {"b": "1"}],
        ),
    ],
)
def test_what_has_no_parameters_gets_none_and_what_names_none_gets_any(
    parameters: Any, good: list[dict[str, str]], bad: list[dict[str, str]]
) -> None:
    assert all(fits(tool(parameters), values) for values in good)
    assert not any(fits(tool(parameters), values) for values in bad)
    function = tool(parameters)["function"]
    if parameters is None:
        del function["parameters"]
        assert fits({"type": "function", "function": function}, {})


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("\n <>/=ab") | st.sampled_from(list("</parameter>\n<function=tool_call")), max_size=40)
    | st.lists(
        st.sampled_from(
            [
                "\n",
                " ",
                "v",
                "x",
                "</parameter>",
                "<parameter=",
                "<parameter=v>",
                "<parameter=w>",
                "</function>",
                "<function=act>",
                "<tool_call>",
                "</tool_call>",
            ]
        ),
        max_size=8,
    ).map("".join)
)
@example("x</parameter><parameter=w>")
@example("x</function> </tool_call>")
@example("x</tool_call><tool_call>")
def test_a_text_that_the_grammar_allows_is_read_back_as_it_is(text: str) -> None:
    described = tool({"type": "object", "properties": {"v": {"type": "string"}, "w": {"type": "string"}}})
    if not fits(described, {"v": text, "w": "after"}):
        assert "</" in text or "\n<parameter=" in text
        return
    parser = ToolCallParser([described])
    told = parser.push(f"<tool_call>{body({'v': text, 'w': 'after'})}</tool_call>") + parser.finish(cut=False)
    assert told.content == ""
    assert [json.loads(call.arguments) for call in parser.calls] == [{"v": text, "w": "after"}]


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (one({"type": "strange"}), "'strange'"),
        (one({"$ref": "#/$defs/none"}), "#/$defs/none"),
        (one({"$ref": "http://example.com/x"}), "example.com"),
        (one({"$ref": "#/properties/v"}), "leads to itself"),
        (one({"anyOf": [{"$ref": "#/properties/v"}, {"type": "string"}]}), "refers to itself"),
        (one(False), "no value of 'v'"),
        (one({"enum": []}), "no value of 'v'"),
        (one({"enum": "a"}), "enum"),
        (one({"anyOf": {}}), "anyOf"),
        (one("text"), "not a schema"),
        (one({"enum": ["a\n</parameter>\n"]}), "no value can be"),
        (one({"type": "string", "minLength": "2"}), "length"),
        (one({"type": "string", "pattern": "("}, strict=True), "unclosed group"),
        (one({"type": "array", "uniqueItems": True, "items": {}}, strict=True), "uniqueItems"),
        (tool("text"), "schema"),
        (tool({"type": "object"}, strict=True), "properties"),
        (tool({"type": "object", "properties": {"a>b": {}}}), "a>b"),
        (tool({"type": "object", "properties": {"a": {}}, "required": [["b"]]}), "required"),
        (tool({"type": "object", "properties": {"a": {}}, "required": "a"}), "required"),
        (tool({"type": "object", "properties": {f"p{i}": {"enum": ["x" * i]} for i in range(2000)}}), "too large"),
        (
            tool(
                {
                    "type": "object",
                    "properties": {"v": {"$ref": "#/$defs/d0"}},
                    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
                    | {"d40": {"type": "null"}},
                }
            ),
            "too large",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_a_grammar_is_refused_in_one_line(described: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiler().calls([described], many=True)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("keyword", ["properties", "anyOf", "items", "allOf"])
def test_a_schema_as_deep_as_json_goes_is_refused(keyword: str) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(900):
        schema = {keyword: {"a": schema} if keyword == "properties" else schema if keyword == "items" else [schema]}
    with pytest.raises(InvalidRequest, match=r"deep|limit"):
        compiler().calls([one(schema)], many=True)


JSON_SCHEMAS = st.recursive(
    st.sampled_from([True, False, None, 1, "x", [], {}, {"type": "string"}, {"type": "integer"}, {"$ref": "#"}]),
    lambda inner: st.dictionaries(
        st.sampled_from(
            [
                "type",
                "properties",
                "required",
                "items",
                "anyOf",
                "allOf",
                "oneOf",
                "enum",
                "const",
                "$ref",
                "$defs",
                "minLength",
                "maxLength",
                "pattern",
                "additionalProperties",
                "not",
                "minimum",
            ]
        ),
        inner | st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
        max_size=4,
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(schema=JSON_SCHEMAS, strict=st.booleans())
def test_whatever_calls_itself_a_schema_compiles_or_is_refused(schema: Any, strict: bool) -> None:
    for described in (one(schema, strict=strict), tool(schema, strict=strict)):
        try:
            allowed = compiler().calls([described], many=True).allowed()
        except InvalidRequest:
            continue
        assert allowed.sum() == 1
