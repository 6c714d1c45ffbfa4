"""Diagrams and MathML match the formulas, and the inputs of a value are those that change it."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import pytest
import torch

from normlab.explain import flow, norm_examples
from normlab.explain.layout import layout
from normlab.explain.mathematics import GREEK, mathematics
from normlab.norms.base import load_all as load_norms
from normlab.placements.base import load_all as load_placements

PLACEMENTS = load_placements()

PARTS = {
    "A": lambda x: math.tanh(1.3 * x) + 0.2, "M": lambda x: math.sin(2 * x) + 0.4, "A_qkv": lambda x: math.cos(x) - 0.7,
    "heads": lambda x: x**2 - 0.3, "heads_scaled": lambda x: x**2 + 0.6, "hidden": lambda x: math.exp(-x),
    "W_out": lambda x: 1.7 * x + 0.1, "W_down": lambda x: 0.6 * x - 0.9, "N": lambda x: x / math.sqrt(x * x + 0.5),
    "stop": lambda x: x + 0.01, "norm2": lambda x: abs(x) + 0.5, "silu": lambda x: x / (1 + math.exp(-x)),
    "sqrt": math.sqrt, "ln": math.log, "abs": abs, "L": 5, "l": 3, "D": 7, "alpha": 0.8, "gate": 0.3, "scale": 1.9,
    "r": 1.1, "z": 0.7,
}  # fmt: skip
"""Functions of a number, no two alike, in place of sub-layers and norms."""
START = 0.65


def evaluate(graph: flow.Flow) -> float:
    """Return the value at the head."""
    values: list[float] = []
    for node in graph.nodes:
        values.append(value_of(node, [values[number] for number in node.inputs]))
    return values[-1]


def value_of(node: flow.Node, inputs: list[float]) -> float:
    match node.kind:
        case "embeddings":
            return START
        case "enter" | "leave" | "head":
            return inputs[0]
        case "add":
            return sum(inputs)
        case "subtract":
            return inputs[0] - sum(inputs[1:])
        case "scale":
            return inputs[0] * eval(node.expression, dict(PARTS))  # noqa: S307
        case "divide":
            return inputs[0] / eval(node.expression, dict(PARTS))  # noqa: S307
        case "unit":
            return inputs[0] / PARTS["norm2"](inputs[0])
    return PARTS[node.expression](inputs[0])


def forms(formula: str) -> list[str]:
    """Return the formula of each kind of block, from the text of `a if c else b`."""
    if " if " not in formula:
        return [formula]
    pairs = []
    for statement in formula.split("; "):
        name, _, value = statement.partition(" = ")
        first, _, rest = value.partition(" if ")
        pairs.append((f"{name} = {first}", f"{name} = {rest.partition(' else ')[2]}"))
    return ["; ".join(side) for side in zip(*pairs, strict=True)]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_diagram_computes_the_formula(name: str) -> None:
    placement = PLACEMENTS[name]
    for graph, form in zip(flow.flows(placement), forms(placement.formula), strict=True):
        streams: dict[str, Any] = {"x": START}
        exec(placement.embedding_formula, dict(PARTS), streams)  # noqa: S102
        for sub_layer in "AM" if "F(" in form else "A":
            exec(form, {**PARTS, "F": PARTS[sub_layer]}, streams)  # noqa: S102
        exec(placement.head_formula, dict(PARTS), streams)  # noqa: S102
        assert evaluate(graph) == pytest.approx(streams["x"], rel=1e-12)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_nothing_in_a_diagram_overlaps(name: str) -> None:
    for diagram in map(layout, flow.flows(PLACEMENTS[name])):
        boxes = [
            (node["x"] - node["width"] / 2, node["y"] - node["height"] / 2, node["x"] + node["width"] / 2,
             node["y"] + node["height"] / 2)
            for node in diagram["nodes"]
        ]  # fmt: skip
        for number, (left, top, right, bottom) in enumerate(boxes):
            assert 0 <= left < right <= diagram["width"]
            assert 0 <= top < bottom <= diagram["height"]
            for other in boxes[:number]:
                assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
        for line in diagram["lines"]:
            for (x0, y0), (x1, y1) in zip(line["points"], line["points"][1:], strict=False):
                assert x0 == x1 or y0 == y1
                for number, (left, top, right, bottom) in enumerate(boxes):
                    beside = max(x0, x1) <= left or right <= min(x0, x1)
                    crosses = not beside and not (max(y0, y1) <= top or bottom <= min(y0, y1))
                    assert not crosses or number in (line["from"], line["to"]), (name, line, diagram["nodes"][number])


@pytest.mark.parametrize("name", load_norms())
def test_mathematics_equals_the_formula(name: str) -> None:
    """The tree written as Python parses to the formula; the gain has one symbol, gamma."""
    formula = load_norms()[name].formula
    tree = mathematics(formula)
    if tree is None:
        assert name in ("batchnorm_past", "gatednorm", "prmsnorm")  # with prose, or with several statements
        return
    text = formula.split(", for each")[0].replace("^", "**").replace(" . ", " * ").replace("|x|", "length(x)")
    text = text.replace("gamma", "gain").replace("beta", "bias")
    python = re.sub(r"\N{DOUBLE VERTICAL LINE} (\w+) \N{DOUBLE VERTICAL LINE}", r"length(\1)", to_python(tree))
    assert ast.dump(ast.parse(python, mode="eval")) == ast.dump(ast.parse(text, mode="eval"))


LETTERS = {sign: name for name, sign in GREEK.items() if name not in ("gamma", "beta")}


def to_python(tree: list[Any] | str) -> str:
    """Return a MathML tree as Python."""
    if isinstance(tree, str):
        return tree
    name, *children = tree
    parts = [to_python(child) for child in children]
    match name:
        case "mfrac":
            return f"(({parts[0]}) / ({parts[1]}))"
        case "msup":
            return f"({parts[0]} ** {parts[1]})"
        case "msqrt":
            return f"sqrt({parts[0]})"
        case "msub":
            return "_".join(parts)
        case "mi":
            return LETTERS.get(parts[0], parts[0])
        case "mo":
            return {"\N{MINUS SIGN}": "-", "\N{MIDDLE DOT}": "*"}.get(parts[0], parts[0])
    return " ".join(parts)


KINDS = {
    "layernorm": "row", "rmsnorm": "row", "zscore": "row", "minmax": "row", "l2norm": "row", "gatednorm": "row",
    "batchnorm": "column", "batchnorm_past": "past", "batchnorm_position": "other", "dyt": "value", "derf": "value",
    "none": "value", "groupnorm": "group", "prmsnorm": "other", "scalenorm": "row", "crmsnorm": "row",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_group_kind_of_each_norm(name: str) -> None:
    assert norm_examples.group_kind(norm_examples.dependencies(name)) == KINDS[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", load_norms())
def test_dependencies_equal_finite_differences(name: str) -> None:
    """Compare the Jacobian's nonzero entries with finite differences at random matrices."""
    module = norm_examples.build(name)
    shape = (norm_examples.SEQUENCES.get(name, 1), -1, 6)
    generator = torch.Generator().manual_seed(1)
    moved = torch.zeros(24, 24, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(30):
            x = torch.randn(24, dtype=torch.float64, generator=generator)
            stepped = torch.cat([x[None], x + 1e-3 * torch.eye(24, dtype=torch.float64)])
            y = torch.stack([module(x.reshape(shape)).flatten() for x in stepped])
            moved |= ((y[1:] - y[0]).abs() > 1e-12).T
    assert [row.nonzero().flatten().tolist() for row in moved] == norm_examples.dependencies(name)
