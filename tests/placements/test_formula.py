"""The language of formulas: what `normlab list formulas` prints is what formulas use and `normlab verify` knows."""

import ast
import json
import math
from collections.abc import Callable

import torch

from normlab.base.plugins import plugin_file
from normlab.catalogue.placements.base import Placement
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.catalogue.placements.formula import KIND_OF, OF_BLOCK, SUB_LAYERS, TABLES
from normlab.catalogue.placements.formula_functions import FUNCTIONS, STREAM_FUNCTIONS

Command = Callable[..., tuple[int, str, str]]
PLACEMENTS = {name: each for name, each in load_placements().items() if plugin_file("placement", name) is None}


def called_functions(placement: Placement) -> set[str]:
    """Return the functions that the formulas of a placement call."""
    formulas = [*placement.end_formulas, placement.full_formula, placement.head_weights_formula, placement.inside]
    calls = [node for formula in formulas for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_each_function_of_a_formula_is_listed(run_command: Command) -> None:
    listed = {row["name"].partition("(")[0] for row in json.loads(run_command("list", "formulas", "--json")[1])}
    for placement in PLACEMENTS.values():
        assert called_functions(placement) <= KIND_OF.keys() & listed


def test_each_function_has_one_row() -> None:
    names = [function.name for table in TABLES.values() for function in table]
    assert len(names) == len(set(names))


def test_each_function_but_those_of_the_block_is_computed() -> None:
    of_block = {function.name for function in OF_BLOCK}
    assert of_block | FUNCTIONS.keys() | STREAM_FUNCTIONS.keys() == KIND_OF.keys()
    assert of_block >= SUB_LAYERS.keys()


def test_functions_of_numbers_take_tensors_element_by_element() -> None:
    t = torch.linspace(-2, 3, 11, dtype=torch.float64)
    assert FUNCTIONS["max"](t, 0).equal(torch.relu(t))
    assert FUNCTIONS["min"](1, t).equal(t.clamp(max=1))
    assert FUNCTIONS["max"](t, -1, 0.5).equal(t.clamp(min=0.5))
    assert FUNCTIONS["sqrt"](FUNCTIONS["max"](t, 0)).equal(torch.relu(t) ** 0.5)
    assert FUNCTIONS["ln"](t.exp()).allclose(t)
    # Of numbers they are those of Python, which decide in a formula between blocks.
    assert (FUNCTIONS["max"](1, 2), FUNCTIONS["min"](1, 2)) == (2, 1)
    assert (FUNCTIONS["sqrt"](2), FUNCTIONS["ln"](2)) == (math.sqrt(2), math.log(2))
