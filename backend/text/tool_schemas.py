"""What a tool's JSON schema says about its parameters' types, and a parameter's text as JSON of its type.

Knows schemas and values; must never know the markup they come in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Types = frozenset[str]
TEXT: Types = frozenset({"string"})
_SAYS_NOTHING: Types = frozenset()
_NOWHERE: Mapping[str, Any] = {}
_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
_TYPE_BY_KEYWORD = {
    "string": ("pattern", "minLength", "maxLength", "format"),
    "object": ("properties", "additionalProperties", "required", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WORDS = re.compile(r'"(?:\\.|[^"\\])*"?|\b(?:True|False|None)\b', re.DOTALL)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Types]]:
    """Of each tool by name, the types each parameter may have.

    Where a schema names no type it is text, as vLLM's qwen3_coder takes it.
    """
    functions = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    return {str(function.get("name")): _properties(function.get("parameters")) for function in functions}


def _properties(schema: Any) -> dict[str, Types]:
    root = schema if isinstance(schema, Mapping) else {}
    properties = _resolved(root, root).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    known: dict[int, Types] = {}
    return {name: _types(property, root, known, depth=0) or TEXT for name, property in properties.items()}


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, Types], depth: int) -> Types:
    """The types a value may have by a schema inside `root`, to which its references point; none where it is silent.

    `known`: what was found of each schema, by its identity, so that references do not multiply what is looked at.
    """
    if not isinstance(schema, Mapping) or depth > 16:
        return _SAYS_NOTHING
    schema = _resolved(schema, root)
    if id(schema) not in known:
        known[id(schema)] = _SAYS_NOTHING  # of itself, if it refers to itself
        known[id(schema)] = _own_types(schema, root, known, depth)
    return known[id(schema)]


def _own_types(schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, Types], depth: int) -> Types:
    null = frozenset({"null"}) if schema.get("nullable") is True else _SAYS_NOTHING
    if named := schema.get("type"):
        names = named if isinstance(named, list) else [named]
        return frozenset(_NAMES.get(name, name) for name in names if isinstance(name, str)) | null
    if "const" in schema:
        return frozenset({_type_of(schema["const"])}) | null
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_of, values)) | null
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list):
            each = [_types(branch, root, known, depth + 1) for branch in branches]
            return frozenset().union(*each) | null if all(each) else _SAYS_NOTHING
    if isinstance(branches := schema.get("allOf"), list):
        said = [types for branch in branches if (types := _types(branch, root, known, depth + 1))]
        return frozenset.intersection(*said) | null if said else _SAYS_NOTHING
    about = frozenset(kind for kind, words in _TYPE_BY_KEYWORD.items() if any(word in schema for word in words))
    return about | null if about else _SAYS_NOTHING


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What its local `$ref` points to, if it has one; nothing where that leads nowhere."""
    for _ in range(16):
        reference = schema.get("$ref")
        if reference is None:
            return schema
        found: Any = root if isinstance(reference, str) and reference.startswith("#") else None
        for step in str(reference).split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return _NOWHERE
        schema = found
    return _NOWHERE


def as_json(text: str, types: Types) -> str:
    """A parameter's text as JSON: itself where it is JSON of one of `types` that is not text, else a string.

    Null passes for every type, as does Python's spelling of JSON's words. Text is never quoted in Qwen's markup.
    """
    stripped = text.strip(" \t\r\n")
    for spelled in (stripped, _WORDS.sub(lambda word: _PYTHON.get(word[0], word[0]), stripped)):
        try:
            value = strict_json(spelled)
        except ValueError:
            continue
        if _fits(value, types):
            return spelled
    return json.dumps(text, ensure_ascii=False)


def strict_json(text: str) -> Any:
    """Raises ValueError for what is not JSON, of what Python takes for it too."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _fits(value: Any, types: Types) -> bool:
    kind = _type_of(value)
    return kind != "string" and (
        kind in types
        or value is None
        or (kind == "integer" and "number" in types)
        or (kind == "number" and "integer" in types and value.is_integer())
    )


def _type_of(value: Any) -> str:
    return _TYPE_OF.get(type(value), "null")
