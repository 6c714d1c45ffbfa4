"""No test module imports another, and none uses a private name of normlab."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODULES = sorted(TESTS.rglob("*.py"))
TEST_MODULES = {path.stem for path in MODULES if path.stem.startswith("test_") or path.stem == "conftest"}

PRIVATE = re.compile(r"_[^_]\w*")
OTHERS = ("self", "cls", "os", "torch", "modeling_bloom")
"""Names whose private attributes do not belong to normlab."""
PUBLIC = ("_replace", "_asdict", "_fields", "_schema")
"""Public names of every NamedTuple, and of torch's operators."""


def imported_names(tree: ast.AST) -> Iterator[list[str]]:
    """Yield the parts of `module.name` for each imported name, and of `module` for each imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes, patched names, names in scripts, and methods that a subclass overrides."""
    of_normlab = {parts[-1] for parts in imported_names(tree) if parts[0] == "normlab"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in PUBLIC:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            names = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            yield from (f"{ast.unparse(node.args[0])}.{name}" for name in names if PRIVATE.fullmatch(str(name)))
        elif isinstance(node, ast.ClassDef) and of_normlab & {ast.unparse(base).split(".")[0] for base in node.bases}:
            methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
            yield from (f"{node.name}.{method}" for method in methods if PRIVATE.fullmatch(method))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\b[a-z][\w.]*\._[a-z]\w*", node.value)


def problems(source: str) -> list[str]:
    if not re.search(r"\b_[a-z]|\bimport\b.*\btest_|\btest_\w+ import|conftest", source):
        return []  # parsing every module takes seconds
    tree = ast.parse(source)
    imported = list(imported_names(tree))
    return [
        *("imports " + ".".join(parts) for parts in imported if parts[0] != "normlab" and TEST_MODULES & {*parts}),
        *("imports " + ".".join(parts) for parts in imported if parts[0] == "normlab" and PRIVATE.match(parts[-1])),
        *(name for name in private_names(tree) if name.split(".")[0] not in OTHERS),
    ]


def test_tests_use_no_private_name_and_no_other_test_module() -> None:
    found = {str(path.relative_to(TESTS)): problems(path.read_text()) for path in MODULES if path != Path(__file__)}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import train.test_resume",
        "from train.test_resume import run_id",
        "from conftest import train",
        "from normlab.store.reading import _parse",
        "reading._parse(b'')",
        "monkeypatch.setattr(reading, '_parse', None)",
        "script = 'corpus._write = kill'",
        "from normlab.tracking.wandb import WandbRun\nclass Stuck(WandbRun):\n  def _delete_temporary(self): ...",
    ],
)
def test_each_habit_is_found(source: str) -> None:
    assert len(problems(source)) == 1
