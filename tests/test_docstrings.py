"""Each entry of the catalogue documents its shapes, formula, source, units of eps and errors."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from normlab import catalogue
from normlab.norms.base import NORMS
from normlab.norms.base import load_all as load_norms
from normlab.placements.base import load_all as load_placements

load_norms()
load_placements()

PUBLISHED = r"arXiv:\d{4}\.\d{5}|[a-zA-Z-]+/[a-zA-Z-]+"
"""An arXiv id, or a repository."""
UNPUBLISHED = {"zscore", "minmax", "pre_post"}
"""Two from textbooks, and one without a known paper."""
ENTRIES = {entry["name"]: entry for entry in (*catalogue.norms(), *catalogue.placements()) if "preset_of" not in entry}
FILES = [
    importlib.import_module(f"normlab.{kind}.{path.stem}")
    for kind in ("norms", "placements")
    for path in sorted((Path(inspect.getfile(catalogue)).parent / kind).glob("*.py"))
    if path.stem not in ("__init__", "base")
]


def functions(module: ModuleType) -> list[ast.FunctionDef]:
    """Return the functions of a module and of its classes."""
    tree = ast.parse(inspect.getsource(module))
    nodes = [inner for node in tree.body for inner in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]]
    return [node for node in nodes if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_has_a_formula_and_a_source(name: str) -> None:
    entry = ENTRIES[name]
    assert entry["formula"]
    assert name in UNPUBLISHED or re.search(PUBLISHED, entry["source"]), entry["source"]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_documents_its_options_and_the_unit_of_its_eps(name: str) -> None:
    options = {option["option"]: option for option in ENTRIES[name]["options"]}
    assert options.keys() == {field.name for field in dataclasses.fields(NORMS[name])} - {"name", "preset"}
    assert all(option["about"] for option in options.values())
    if "eps" in options:
        assert re.search(r"unit of x( squared)?\b", options["eps"]["about"], re.IGNORECASE)


def test_every_option_outside_norms_has_help() -> None:
    entries = [*catalogue.placements(), *catalogue.data(), *catalogue.optim()]
    options = [*catalogue.options(), *(option for entry in entries for option in entry["options"])]
    assert [option for option in options if not option["about"]] == []


@pytest.mark.parametrize("name", NORMS)
def test_a_norms_module_documents_its_shapes(name: str) -> None:
    kind = type(NORMS[name]().build(16))  # pyright: ignore[reportCallIssue]
    assert name == "none" or "(*batch, D)" in (kind.__doc__ or "")


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.__name__)
def test_a_file_has_a_legend_of_shapes_and_documents_public_functions(module: ModuleType) -> None:
    used = set(re.findall(r"\b[a-z]\w*_([A-Z]+\d?)\b(?!\()", inspect.getsource(module)))
    legend = (module.__doc__ or "").partition("Shapes:")[2]
    assert legend, "no line `Shapes:`"
    missing = {letter for letters in used for letter in letters if letter.isalpha() and f"{letter} " not in legend}
    assert not missing, f"{module.__doc__} has no {missing}"
    for function in functions(module):
        assert function.name.startswith("_") or ast.get_docstring(function), function.name


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.__name__)
def test_a_function_documents_the_errors_that_it_raises(module: ModuleType) -> None:
    for function in functions(module):
        raised = {
            ast.unparse(node.exc.func)
            for node in ast.walk(function)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        } - {"NotImplementedError"}
        documented = (ast.get_docstring(function) or "").partition("Raises:")[2]
        assert all(error in documented for error in raised), function.name
