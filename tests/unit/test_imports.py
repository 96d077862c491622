"""The import rule of the packages, the libraries each may know, and the size of a module; all read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("serve", "backend", "capture", "training")
MAY_IMPORT = {
    "serve": {"backend", "capture"},
    "training": {"backend", "capture"},
    "backend": set[str](),
    "capture": set[str](),
}
WEB = {"fastapi", "starlette", "uvicorn", "sse_starlette"}
MODEL = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"}
MUST_NOT_KNOW = {
    "serve": {*MODEL, "numpy", "sqlite3", "sqlite_utils"},
    "backend": {*WEB, "sqlite3", "sqlite_utils", "prometheus_client", "typer"},
    "capture": {*MODEL, *WEB},
    "training": {*WEB, "sqlite3", "sqlite_utils"},
}
MOST_LINES = 400


def imports(file: Path, package: str) -> Iterator[str]:
    """Every module a file imports anywhere in it, absolute; `package` is the dotted package the file is in."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            match node.args:
                case [ast.Constant(value=str(module)), *_]:
                    yield module
                case _:
                    yield "<computed>"


def _name(function: ast.expr) -> str | None:
    return getattr(function, "attr", None) or getattr(function, "id", None)


def modules(root: Path, package: str) -> Iterator[tuple[Path, str]]:
    """Each source file of a top-level package, and the dotted package it is in."""
    for file in sorted((root / package).rglob("*.py")):
        yield file, ".".join(file.parent.relative_to(root).parts)


def violations(root: Path) -> list[str]:
    """What breaks the rule, as "file: imports what"."""
    found = []
    for package in PACKAGES:
        forbidden = {*PACKAGES, "tests", "<computed>"} - {package} - MAY_IMPORT[package] | MUST_NOT_KNOW[package]
        for file, inside in modules(root, package):
            found += [
                f"{file.relative_to(root)}: {name}" for name in imports(file, inside) if name.split(".")[0] in forbidden
            ]
    return found


def test_imports_run_one_way() -> None:
    assert violations(ROOT) == []


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for file, _ in modules(ROOT, package)
    }
    assert len(lengths) > 40
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file, _ in modules(ROOT, package)
        if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("backend/x.py", "import serve"),
        ("backend/x.py", "from serve.app import create_app"),
        ("backend/x.py", "from capture import store"),
        ("backend/deep/x.py", "import capture.store as s"),
        ("backend/deep/x.py", "def f():\n    from training import data"),
        ("backend/x.py", "import fastapi"),
        ("backend/x.py", "from tests import factory"),
        ("capture/x.py", "from backend.interface import Step"),
        ("capture/x.py", "import numpy, torch.nn as nn"),
        ("capture/x.py", "import importlib\nimportlib.import_module('backend.local')"),
        ("capture/x.py", "name = 'backend'\n__import__(name)"),
        ("serve/x.py", "from training.data import Rows"),
        ("serve/api/x.py", "if True:\n    import torch"),
        ("serve/x.py", "from torch import Tensor"),
        ("training/x.py", "import serve.settings"),
        ("serve/api/x.py", "from ...training import data"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    plant(tmp_path, file, line)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("serve/x.py", "from backend.interface import Step\nfrom capture.store import Store"),
        ("training/x.py", "import backend.models, capture, torch"),
        ("backend/deep/x.py", "from ..interface import Step\nfrom . import y"),
        ("backend/x.py", "import torch, transformers"),
        ("capture/x.py", "import numpy, sqlite3\nfrom capture.store import Store"),
    ],
)
def test_what_the_rule_allows_is_not_found(tmp_path: Path, file: str, line: str) -> None:
    plant(tmp_path, file, line)
    assert violations(tmp_path) == []


def plant(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize("module", ["serve.cli", "serve.app", "capture.cli"])
def test_the_wire_and_the_file_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
