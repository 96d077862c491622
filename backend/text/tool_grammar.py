"""The grammar, in llguidance's Lark, of an answer that calls tools as Qwen3.5's chat template spells calls.

A function's parameters come in its schema's order, each written by its type: text as it is, all else as JSON. Knows
schemas alone, no token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MAX_SOURCE = 400_000  # characters of a grammar, which its tools' schemas have to fit into
_A_SCHEMA = 50  # characters, for telling what one is
_SUFFIX = r'[suffix="\n</parameter>"]'  # what it matches ends with the first of these
# What a value cannot have in it: its end, and what a reader may take for its end.
_NOT_IN_VALUE = (
    r"(\n<\/parameter>|<\/parameter>\s*<(parameter=|function=|tool_call>|\/function>|\/tool_call>)"
    r"|<\/function>\s*<\/tool_call>|<\/tool_call>\s*<tool_call>|\n<parameter=)"
)
# What a model that likes white space may write of it between two tokens of JSON.
_WHITESPACE = r"[ \t\r\n]{0,32}"
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of names to schemas
_OF_TEXT = ("pattern", "minLength", "maxLength", "format")
_OF_TYPE = {
    "object": ("properties", "additionalProperties", "required", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def source(tools: Sequence[Mapping[str, Any]], begin: str, end: str, *, many: bool, begun: bool, exact: bool) -> str:
    """Calls of `tools`, OpenAI's objects: one, or with `many` some. `begin` and `end`: the tags, as Lark spells them.

    With `begun`, after its first tag, the model itself chose to call: of functions that are not strict the name alone
    is held to. `exact`: patterns and lengths of text count for all functions, not for strict ones alone. Raises
    ValueError in one line, naming the function.
    """
    rules = _Rules()
    names = [rules.add(_function(rules, tool["function"], loosely=begun, exact=exact)) for tool in tools]
    call = f'"\\n" {_any_of(names)} "\\n" {end}'
    more = f' ("\\n" {begin} {call})*' if many else ""
    return "\n".join([f"start: {'' if begun else begin} {call}{more}", *rules.lines, ""])


@dataclass
class _Rules:
    """Lines of the grammar so far; `spent`: characters of it and of the way there."""

    lines: list[str] = field(default_factory=list)
    spent: int = 0
    _names: dict[str, str] = field(default_factory=dict)

    def add(self, body: str, attributes: str = "", kind: str = "r") -> str:
        """A rule's name, one for all that are alike. A `kind` in upper case is a lexeme of its own."""
        line = f"{attributes}: {body}"
        if line not in self._names:
            self.spend(len(line))
            self._names[line] = f"{kind}{len(self._names)}"
            self.lines.append(self._names[line] + line)
        return self._names[line]

    def spend(self, characters: int) -> None:
        self.spent += characters
        if self.spent > MAX_SOURCE:
            raise ValueError("the schemas up to here are too large")


def _function(rules: _Rules, function: Mapping[str, Any], *, loosely: bool, exact: bool) -> str:
    name, schema, strict = function["name"], function.get("parameters"), function.get("strict") is True
    if loosely and not strict:
        schema = {}
    try:
        parameters = "" if schema is None else _parameters(rules, _Document(schema, strict, exact or strict))
    except RecursionError:
        raise ValueError(f"{name}: the schema of its parameters refers to itself or is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return f'{_text(f"<function={name}>")} "\\n" {parameters} "</function>"'


def _parameters(rules: _Rules, document: _Document) -> str:
    schema = document.resolved(document.root)
    if not isinstance(schema, Mapping):
        raise ValueError("the schema of its parameters is not an object")
    properties, required = schema.get("properties"), schema.get("required", [])
    if properties is None and not required and not document.strict:
        value = document.value(rules, schema.get("additionalProperties", True))
        return f'("<parameter=" /[^<>\\s]+/ ">\\n" {value})*' if value else ""
    if properties is None and not document.strict:
        properties = {}
    if not isinstance(properties, Mapping):
        raise ValueError("the schema of its parameters has no properties that are an object")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError("what its parameters' schema calls required is not a list of names")
    properties = {**properties, **{key: True for key in required if key not in properties}}
    written = []
    for key, of_key in properties.items():
        value = document.value(rules, of_key)
        if not value and key in required:
            raise ValueError(f"no value of {key!r} is allowed")
        if value and (key != key.strip() or not re.fullmatch(r"[^<>\r\n]+", key)):
            raise ValueError(f"no parameter can be called {key!r}")
        if value:
            optional = "" if key in required else "?"
            written.append(f'({_text(f"<parameter={key}>")} "\\n" {value}){optional}')
    return " ".join(written)


@dataclass(frozen=True)
class _Literal:
    """This very text."""

    value: str


@dataclass(frozen=True)
class _Text:
    """Text as it is, that matches these regexes."""

    regexes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Json:
    """A value written as JSON."""

    schema: Mapping[str, Any]


@dataclass(frozen=True)
class _Document:
    """The schema of a function's parameters, which its references point into.

    `strict`: nothing in it is left out. `exact`: neither are patterns and lengths of text.
    """

    root: Any
    strict: bool
    exact: bool

    def value(self, rules: _Rules, schema: Any) -> str:
        """What matches a value of that schema and its end; empty where there is none."""
        forms = list(self._forms(rules, schema))
        if any(form == _Text() for form in forms):
            forms = [_Text()]  # whatever else it may be is text as well
        texts = [rules.add(_whole(form.regexes), _SUFFIX) for form in forms if isinstance(form, _Text)]
        alternatives = [f'{text} "\\n"' for text in dict.fromkeys(texts)]
        literals = dict.fromkeys(_text(form.value) for form in forms if isinstance(form, _Literal))
        plain = [rules.add(" | ".join(literals), kind="R")] if literals else []
        plain += [rules.add(f"%json {self._alone(form.schema)}") for form in forms if isinstance(form, _Json)]
        if plain:
            alternatives.append(f'{_any_of(plain)} "\\n</parameter>\\n"')
        return _any_of(alternatives) if alternatives else ""

    def _forms(self, rules: _Rules, schema: Any) -> Iterator[_Literal | _Text | _Json]:
        """The ways to write a value; more than the schema allows where it is not worth telling them apart."""
        schema = self.resolved(schema)
        rules.spend(_A_SCHEMA + len(schema) if isinstance(schema, Mapping) else _A_SCHEMA)
        if schema is False:
            return
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"{str(schema)[:80]!r} is not a schema")
        types = _types(schema)
        if "const" in schema or "enum" in schema:
            listed = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(listed, list):
                raise ValueError("an enum is not a list")
            for value in listed:
                if isinstance(value, str) and "string" in types:
                    yield _literal(value)
            if others := [value for value in listed if not isinstance(value, str)]:
                yield _Json({"enum": others})
        elif combining := next((keyword for keyword in ("anyOf", "oneOf", "allOf") if keyword in schema), None):
            yield from self._combined(rules, schema, combining)
        else:
            if "string" in types:
                yield _Text(tuple(self._regexes(schema)))
                types = [kind for kind in types if kind != "string"] if "type" in schema else []
            if types:
                yield _Json({**{key: of for key, of in schema.items() if key not in _OF_TEXT}, "type": types})

    def _combined(self, rules: _Rules, schema: Mapping[str, Any], keyword: str) -> Iterator[_Literal | _Text | _Json]:
        if not isinstance(schema[keyword], list):
            raise ValueError(f"{keyword} is not a list")
        base = {key: of for key, of in schema.items() if key != keyword}
        parts = [self.resolved(part) for part in schema[keyword]]
        if keyword == "allOf":
            merged = [{key: of for part in (base, *parts) if isinstance(part, Mapping) for key, of in part.items()}]
        else:
            merged = [{**base, **part} if isinstance(part, Mapping) else part for part in parts]
        forms = [form for each in merged for form in self._forms(rules, each)]
        if forms and all(isinstance(form, _Json) for form in forms):
            yield _Json(schema)  # more exactly than merged
        else:
            yield from forms

    def _regexes(self, schema: Mapping[str, Any]) -> Iterator[str]:
        if self.exact and "pattern" in schema:
            yield _whole_pattern(str(schema["pattern"]))
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not isinstance(least, int) or not (isinstance(most, int) or most == ""):
            raise ValueError("a length is not an integer")
        if self.exact and (least or most != ""):
            yield f"(?s:.{{{least},{most}}})"

    def resolved(self, schema: Any) -> Any:
        """The schema a reference stands for, with what stands beside it."""
        for _ in range(64):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            beside = {key: of for key, of in schema.items() if key != "$ref"}
            target = self._target(schema["$ref"])
            schema = {**target, **beside} if isinstance(target, Mapping) else target
        raise ValueError("a reference leads to itself")

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
            raise ValueError(f"{str(reference)[:80]!r} does not refer to a part of the schema")
        found = self.root
        for step in unquote(reference).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (LookupError, TypeError, ValueError):
                raise ValueError(f"there is no {reference[:80]!r} in the schema") from None
        return found

    def _alone(self, schema: Mapping[str, Any]) -> str:
        """As JSON, on its own: references lead into a copy of the whole document."""
        own = _without_notes(schema)
        if "$ref" in json.dumps(own):
            own["$defs"] = {"root": _without_notes(self.root)}
        lenient = {"lenient": not self.strict, "coerce_one_of": not self.strict}
        return json.dumps({**own, "x-guidance": {"whitespace_pattern": _WHITESPACE, **lenient}})


def _without_notes(schema: Any) -> Any:
    """What a schema demands, its references bent into `$defs/root`."""
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, of in schema.items():
        if key == "$ref" and isinstance(of, str) and of.startswith("#"):
            kept[key] = f"#/$defs/root{of[1:]}"
        elif key in ("const", "enum"):
            kept[key] = of
        elif key in _MAPS and isinstance(of, Mapping):
            kept[key] = {name: _without_notes(item) for name, item in of.items()}
        elif key not in _NOTES and key != "x-guidance":
            kept[key] = _without_notes(of)
    return kept


def _types(schema: Mapping[str, Any]) -> list[str]:
    """JSON's types that a value may be of; where none are named, those that its other keywords are about."""
    named = schema.get("type")
    if named is None:
        if any(key in schema for key in _OF_TEXT):
            return ["string"]
        about = [kind for kind, keywords in _OF_TYPE.items() if any(key in schema for key in keywords)]
        return about or list(_TYPES)
    types = named if isinstance(named, list) else [named]
    if wrong := [kind for kind in types if kind not in _TYPES]:
        raise ValueError(f"there is no type {str(wrong[0])[:80]!r}")
    return types


def _whole(regexes: Sequence[str]) -> str:
    """Of a value as a whole, as Lark spells it."""
    return " & ".join([*(f"/{regex}/" for regex in regexes or ["(?s:.*)"]), f"~/(?s:.*){_NOT_IN_VALUE}(?s:.*)/"])


def _whole_pattern(pattern: str) -> str:
    """A pattern, of which JSON schema looks for a match anywhere, as a regex of the whole text."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if re.search(r"(?<!\\)(\\\\)*\$$", pattern) else "(?s:.*)"
    inner = pattern[0 if begin else 1 : None if end else -1]
    return f"{begin}(?:{_slashed(inner)}){end}"


def _slashed(regex: str) -> str:
    """Fit to stand between two slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex)


def _literal(value: str) -> _Literal:
    if re.search(_NOT_IN_VALUE, value + "\n"):
        raise ValueError(f"no value can be {value[:80]!r}")
    return _Literal(value)


def _any_of(rules: Sequence[str]) -> str:
    return f"({' | '.join(rules)})"


def _text(text: str) -> str:
    """As Lark spells it."""
    return json.dumps(text, ensure_ascii=False)
