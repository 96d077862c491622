"""Facts about Python read from source files with `ast`: nothing is imported, nothing is run.

Knows modules, signatures and docstrings; knows no question, no tokenizer and no model.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.errors import TrainingError

# Direct or transitive dependencies of the project, all permissively licensed (backend/tiny/README.md names them).
PACKAGES = ("click", "fastapi", "httpx", "jinja2", "networkx", "pydantic", "rich", "starlette", "typer")
_SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__", "ensurepip"),
    *("pydoc_data", "encodings", "distutils", "__phello__", "config", "v1", "deprecated", "_vendor"),
}
_HELD_OUT_PERCENT = 8

Definition = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["function", "method", "class", "module"]


class SourceError(TrainingError):
    """A source of the corpus is missing. `str(error)` is fit for a user."""


@dataclass(frozen=True)
class Parameter:
    """One argument as its signature writes it; `default` and `annotation` are source text or empty."""

    name: str
    default: str = ""
    annotation: str = ""


@dataclass(frozen=True)
class Fact:
    """A documented public definition, or a module.

    `path` is the dotted name, `summary` the first sentence of its docstring (ends with a period), `code` its source
    without docstring and decorators, or empty where that is long. `members` lists the public names inside.
    """

    kind: Kind
    module: str
    name: str
    path: str
    summary: str
    parameters: tuple[Parameter, ...] = ()
    returns: str = ""
    code: str = ""
    members: tuple[str, ...] = ()


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the held-out 8 %: by a hash of its name, so that it never changes sides."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT


def roots() -> dict[str, tuple[Path, str]]:
    """Source name → (folder, dotted prefix). Raises SourceError when a package is not installed."""
    found = {"stdlib": (Path(sysconfig.get_paths()["stdlib"]), "")}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SourceError(f"the corpus needs the package {package!r}: pip install {package}")
        found[package] = (Path(spec.origin).parent, package)
    return found


def versions() -> dict[str, str]:
    """Package → installed version, for the model card."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def collect() -> list[Fact]:
    """Every fact of every source, in a fixed order."""
    facts: list[Fact] = []
    for folder, prefix in roots().values():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if any(part in _SKIPPED_FOLDERS for part in parts[:-1]):
                continue
            names = [part for part in parts if part != "__init__"]
            module = ".".join([prefix, *names] if prefix else names)
            if any(name.startswith("_") for name in names) or not module:
                continue
            facts.extend(facts_of(file.read_text(encoding="utf-8", errors="replace"), module))
    return facts


def facts_of(source: str, module: str) -> Iterator[Fact]:
    """The facts of one module's source text. A file that does not parse has none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    public = [n for n in tree.body if isinstance(n, Definition | ast.ClassDef) and not n.name.startswith("_")]
    summary = _summary(tree)
    if summary:
        members = tuple(node.name for node in public)
        yield Fact("module", module, module, module, summary, members=members)
    for node in public:
        if isinstance(node, ast.ClassDef):
            yield from _class_facts(node, module)
        else:
            yield from _function_fact(node, module, f"{module}.{node.name}", "function")


def _class_facts(node: ast.ClassDef, module: str) -> Iterator[Fact]:
    methods = [n for n in node.body if isinstance(n, Definition) and not n.name.startswith("_")]
    summary = _summary(node)
    path = f"{module}.{node.name}"
    if summary:
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        parameters = _parameters(init) if init else ()
        members = tuple(dict.fromkeys(n.name for n in methods))
        yield Fact("class", module, node.name, path, summary, parameters, members=members)
    for method in methods:
        yield from _function_fact(method, module, f"{path}.{method.name}", "method")


def _function_fact(node: Definition, module: str, path: str, kind: Kind) -> Iterator[Fact]:
    summary = _summary(node)
    code = _code(node)
    if not summary and not code:
        return
    returns = ast.unparse(node.returns) if node.returns else ""
    yield Fact(kind, module, node.name, path, summary, _parameters(node), returns, code)


def _summary(node: ast.Module | ast.ClassDef | Definition) -> str:
    """The docstring's first sentence on one line; empty unless it is plain prose of a usual length."""
    doc = ast.get_docstring(node) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    first = re.sub(r":(?:\w+:)+`~?([^`]*)`", r"`\1`", first).replace("``", "`")
    match = re.match(r"(.{12,150}?[.!?])(?:\s|$)", first + ("" if first.endswith((".", "!", "?", ":")) else "."))
    sentence = match.group(1) if match else ""
    plain = sentence.isascii() and sentence[:1].isupper() and not re.search(r"[<>{}\\|=@_]{2}|>>>|https?:", sentence)
    return sentence if plain else ""


def _parameters(node: Definition) -> tuple[Parameter, ...]:
    """Arguments in order, without self and cls; starred ones keep their stars."""
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    pairs = list(zip(positional, defaults, strict=True))
    if pairs and pairs[0][0].arg in ("self", "cls"):
        pairs = pairs[1:]
    found = [_parameter(arg, default) for arg, default in pairs]
    if spec.vararg:
        found.append(_parameter(spec.vararg, None, "*"))
    found.extend(_parameter(arg, default) for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True))
    if spec.kwarg:
        found.append(_parameter(spec.kwarg, None, "**"))
    return tuple(found)


def _parameter(arg: ast.arg, default: ast.expr | None, stars: str = "") -> Parameter:
    annotation = ast.unparse(arg.annotation) if arg.annotation else ""
    value = ast.unparse(default) if default else ""
    return Parameter(stars + arg.arg, value if len(value) <= 24 else "...", annotation if len(annotation) <= 24 else "")


def _code(node: Definition) -> str:
    """Normalised source of a short function (2 … 14 lines), docstring and decorators removed."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or (len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise | ast.Expr)):
        return ""
    copy = type(node)(**{name: getattr(node, name) for name in node._fields})
    copy.body, copy.decorator_list = body, []
    code = ast.unparse(ast.fix_missing_locations(copy))
    lines = code.count("\n") + 1
    return code if 2 <= lines <= 14 and len(code) <= 480 and code.isascii() else ""
