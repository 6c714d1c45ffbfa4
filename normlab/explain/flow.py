"""Parse a placement's formula into a graph of operations, for its block diagram.

`normlab verify` executes the same formula (`Placement.formula`, Python). Each operation on a stream becomes a node in a
column: 0 for the stream x, 1 and more for branches.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from normlab.placements.base import Placement

FUNCTIONS = {
    "A": "attention", "A_qkv": "attention", "M": "MLP", "heads": "heads", "heads_qkv": "heads",
    "heads_scaled": "scaled heads", "W_out": "projection", "hidden": "MLP, hidden", "W_down": "down projection",
    "N": "norm", "stop": "no gradient",
}  # fmt: skip
"""Labels of the functions in a formula, by name."""
KINDS = {"N": "norm", "stop": "function"}
"""Node kinds of functions; all others (sub-layers and their parts) are a `box`."""
INNER_NORMS = ("q", "k", "v")
"""The norms inside `A_qkv` and `heads_qkv`."""
CONSTANTS = {"L", "l", "D", "sqrt", "ln", "abs"}
"""Names in a factor that are not learned."""
SIGNS = {"add": "+", "subtract": "\N{MINUS SIGN}", "scale": "\N{MULTIPLICATION SIGN}", "divide": "\N{DIVISION SIGN}"}
UNASSIGNED_COLUMN = 1000
"""The column of a second stream until the width of the branches is known."""

Statements = list[tuple[str, ast.expr]]
"""Assignments: a name and its value."""


@dataclass
class Node:
    """An operation and its inputs."""

    kind: str
    """embeddings, enter, leave, head, norm, box, scale, divide, unit, function, add or subtract."""
    inputs: list[int]
    """Indices of nodes. The first input of `add` and `subtract` enters from below, the others from the side."""
    column: int
    row: int
    """From the bottom: one more than the highest input."""
    label: str = ""
    expression: str = ""
    """The formula of a factor, or the name of a box, function or stream."""
    learned: bool = False
    """Whether a factor contains a parameter."""
    norms: tuple[str, ...] = ()
    """The norms inside a box."""
    x: float = 0.0
    """The centre, in pixels, as `layout` sets it."""
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


@dataclass
class Flow:
    """The graph of a model with one block."""

    when: str = ""
    """The blocks that the graph shows, if the placement has two kinds of blocks."""
    nodes: list[Node] = field(default_factory=list)
    block: tuple[int, int] = (0, 0)
    """The rows at which the block starts and ends."""


def flows(placement: Placement) -> list[Flow]:
    """Return the graphs of a placement: one, or one for each side of its formula's condition."""
    conditions = conditions_of(placement.formula)
    if not conditions:
        return [_FlowBuilder(placement).build()]
    (condition,) = conditions
    condition = condition.replace("<=", "\N{LESS-THAN OR EQUAL TO}").replace("==", "=")
    kinds = ((True, f"blocks with {condition}"), (False, "all other blocks"))
    return [_FlowBuilder(placement).build(holds, when) for holds, when in kinds]


def parse_formula(formula: str, condition_holds: bool = True) -> Statements:
    """Return a formula's assignments, with one side of each `a if condition else b`."""
    statements = []
    for statement in ast.parse(formula).body:
        assert isinstance(statement, ast.Assign)
        value = statement.value
        if isinstance(value, ast.IfExp):
            value = value.body if condition_holds else value.orelse
        statements.append((ast.unparse(statement.targets[0]), value))
    return statements


def conditions_of(formula: str) -> list[str]:
    """Return the conditions of a formula's `if` expressions."""
    tests = [node.test for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.IfExp)]
    return list(dict.fromkeys(map(ast.unparse, tests)))


class _FlowBuilder:
    """Builds the graph of a formula; `node_of` maps each variable to the node of its value."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self.nodes: list[Node] = []
        self.node_of: dict[str, int] = {}
        self.columns = {"x": 0}

    def build(self, condition_holds: bool = True, when: str = "") -> Flow:
        """Return the graph from the embeddings to the head."""
        self.node_of["x"] = self._add(Node("embeddings", [], 0, 0, label="embeddings", expression="x"))
        embedding_formula = parse_formula(self.placement.embedding_formula)
        for number, name in enumerate(name for name, _ in embedding_formula if name != "x"):
            self.columns[name] = UNASSIGNED_COLUMN + number
        self._run(embedding_formula)
        streams = list(self.node_of)
        start = self._add_boundary("enter", streams)
        formula = self.placement.formula
        # A formula with F runs for attention and again for the MLP.
        formulas = [formula.replace("F(", "A("), formula.replace("F(", "M(")] if "F(" in formula else [formula]
        self._run([pair for each in formulas for pair in parse_formula(each, condition_holds)])
        end = self._add_boundary("leave", streams)
        self._run(parse_formula(self.placement.head_formula))
        self._add(Node("head", [self.node_of["x"]], 0, 0, label="LM head", expression="x"))
        self._place_streams()
        return Flow(when, self.nodes, (start, end))

    def _add(self, node: Node) -> int:
        """Add a node one row above its highest input; return its index."""
        node.row = 1 + max((self.nodes[number].row for number in node.inputs), default=-1)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _add_boundary(self, kind: str, streams: list[str]) -> int:
        """Add a node for each stream in one row above all others; return the row."""
        row = 1 + max(node.row for node in self.nodes)
        for name in streams:
            label = name if len(streams) > 1 else ""
            node = Node(kind, [self.node_of[name]], self.columns[name], row, label=label, expression=name)
            self.node_of[name] = self._add(node)
            node.row = row
        return row

    def _run(self, statements: Statements) -> None:
        for number, (name, value) in enumerate(statements):
            # A temporary variable is drawn in the stream's column, unless the stream is still needed.
            column = self.columns.get(name, 1 if _is_read("x", statements[number + 1 :]) else 0)
            if isinstance(value, ast.Name) and name in self.columns:
                self.node_of[name] = self.node_of[value.id]  # the start of a second stream
            else:
                self.node_of[name] = self._draw(value, column)

    def _draw(self, value: ast.expr, column: int) -> int:
        """Return the node of an expression that is drawn in a column and the columns to its right."""
        match value:
            case ast.Name(id=name) if name in self.node_of:
                return self.node_of[name]
            case ast.BinOp(op=ast.Add()):
                return self._draw_sum("add", sorted(_terms(value), key=self._weight), column)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return self._draw_sum("subtract", [left, right], column)
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Call(func=ast.Name(id="norm2"), args=[argument])):
                if ast.unparse(left) == ast.unparse(argument):
                    source = self._draw(left, column)
                    return self._add(Node("unit", [source], column, 0, label="length 1", expression="unit"))
            case ast.BinOp(left=left, op=ast.Div(), right=right) if self._is_factor(right):
                return self._draw_factor("divide", left, right, column)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if self._is_factor(left):
                return self._draw_factor("scale", right, left, column)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if self._is_factor(right):
                return self._draw_factor("scale", left, right, column)
            case ast.Call(func=ast.Name(id=name), args=[argument]) if name in FUNCTIONS:
                norms = INNER_NORMS if name.endswith("_qkv") else ()
                source, kind = self._draw(argument, column), KINDS.get(name, "box")
                return self._add(Node(kind, [source], column, 0, FUNCTIONS[name], name, norms=norms))
        raise NotImplementedError(f"{ast.unparse(value)!r} of placement {self.placement.name!r} cannot be drawn")

    def _draw_sum(self, kind: str, terms: list[ast.expr], column: int) -> int:
        """Draw the first term below the sum, and each other term in its own column."""
        inputs, free = [self._draw(terms[0], column)], column + _width(terms[0])
        for term in terms[1:]:
            inputs.append(self._draw(term, free))
            last = self.nodes[inputs[-1]].column if isinstance(term, ast.Name) else free + _width(term) - 1
            free = max(free, last + 1) if last < UNASSIGNED_COLUMN else free
        return self._add(Node(kind, inputs, column, 0, label=SIGNS[kind]))

    def _draw_factor(self, kind: str, value: ast.expr, factor: ast.expr, column: int) -> int:
        source = self._draw(value, column)
        names = {node.id for node in ast.walk(factor) if isinstance(node, ast.Name)}
        label = f"{SIGNS[kind]} {factor_text(factor)}"
        learned = bool(names - CONSTANTS)
        return self._add(Node(kind, [source], column, 0, label, ast.unparse(factor), learned))

    def _is_factor(self, value: ast.expr) -> bool:
        """Whether an expression contains no stream."""
        return not any(isinstance(node, ast.Name) and node.id in self.node_of for node in ast.walk(value))

    def _weight(self, value: ast.expr) -> int:
        """The amount of computation in a term; the lightest term of a sum is the stream itself."""
        nodes = list(ast.walk(value))
        boxes = sum(isinstance(node, ast.Name) and node.id in FUNCTIONS and node.id not in KINDS for node in nodes)
        return 100 * boxes + sum(isinstance(node, (ast.Call, ast.BinOp)) for node in nodes)

    def _place_streams(self) -> None:
        """Place further streams to the right of all branches."""
        width = 1 + max(node.column for node in self.nodes if node.column < UNASSIGNED_COLUMN)
        for node in self.nodes:
            if node.column >= UNASSIGNED_COLUMN:
                node.column += width - UNASSIGNED_COLUMN


def _is_read(name: str, statements: Statements) -> bool:
    """Whether a variable is read before it is assigned again."""
    for target, value in statements:
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value)):
            return True
        if target == name:
            return False
    return False


def _terms(value: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum or both sides of a difference, else the expression."""
    match value:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_terms(left), *_terms(right)]
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return [left, right]
    return [value]


def _width(value: ast.expr) -> int:
    """Return the number of columns of an expression."""
    match value:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return sum(0 if isinstance(term, ast.Name) else _width(term) for term in _terms(value)) or 1
        case ast.BinOp(left=left, right=right):
            return max(_width(left), _width(right))
        case ast.Call(args=[argument]):
            return _width(argument)
    return 1


def factor_text(node: ast.expr) -> str:
    """Return a factor in mathematical notation: 2L for 2 * L, √l for sqrt(l)."""

    def grouped(node: ast.expr) -> str:
        return factor_text(node) if isinstance(node, (ast.Name, ast.Constant)) else f"({factor_text(node)})"

    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            joint = "" if isinstance(left, ast.Constant) and isinstance(right, ast.Name) else " · "
            return f"{factor_text(left)}{joint}{factor_text(right)}"
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=power)):
            return f"{grouped(left)}^{'¼' if power == 0.25 else power}"
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            return f"√{grouped(argument)}"
        case ast.Call(func=ast.Name(id="abs"), args=[argument]):
            return f"|{factor_text(argument)}|"
    return ast.unparse(node)
