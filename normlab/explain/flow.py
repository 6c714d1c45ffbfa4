"""A placement's formula as a graph of what flows where: read from the formula itself, as `normlab verify` reads it.

The formula is Python (`Placement.formula`). Each operation on a stream becomes a node; numbers and learned parameters
become the label of the factor that they are. A node has a column: 0 for the stream x, the next ones for branches.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from normlab.errors import ConfigError
from normlab.explain.formula import assigned, choices, chosen, is_read, parsed, pretty, renamed, terms, value
from normlab.placements.base import Placement

BOXES = {
    "A": "attention", "A_qkv": "attention", "M": "MLP", "heads": "heads", "heads_qkv": "heads",
    "heads_scaled": "scaled heads", "W_out": "projection", "hidden": "MLP, hidden", "W_down": "down projection",
}  # fmt: skip
"""The parts of sub-layers, by the formula's names."""
INNER = ("q", "k", "v")
"""The norms inside `A_qkv` and `heads_qkv`."""
CONSTANTS = {"L", "l", "D", "sqrt", "ln", "abs"}
"""Names in a factor that are not learned; `silu` only forms what is."""
SIGNS = {"add": "+", "subtract": "\N{MINUS SIGN}", "scale": "\N{MULTIPLICATION SIGN}", "divide": "\N{DIVISION SIGN}"}
OUTSIDE = 1000
"""The column of a second stream, until it is known how wide the branches are."""


@dataclass
class Node:
    """An operation, and what it is applied to."""

    kind: str
    """embeddings, enter, leave, head, norm, box, scale, divide, unit, function, add or subtract."""
    inputs: list[int]
    """Numbers of nodes; of `add` and `subtract` the first comes from below, and what is subtracted from the side."""
    column: int
    row: int
    """From the bottom: one more than the highest input."""
    label: str = ""
    expression: str = ""
    """As the formula has it: the factor of `scale` and `divide`, the name of a box or a function, the stream's name."""
    learned: bool = False
    """Whether a factor is learned."""
    norms: tuple[str, ...] = ()
    """Norms inside a box."""


@dataclass
class Flow:
    """A model of one block: what opens the streams, the block, and what closes them."""

    when: str = ""
    """Of which blocks, where they are not all alike."""
    nodes: list[Node] = field(default_factory=list)
    block: tuple[int, int] = (0, 0)
    """Rows of the block's beginning and end."""


def flows(placement: Placement) -> list[Flow]:
    """The graphs of a placement: one, or one for each kind of block.

    Raises:
        ConfigError: The formula has something that is not known here.
    """
    tests = choices(placement.formula)
    if not tests:
        return [_Drawer(placement).flow(parsed(placement.formula), "")]
    if len(tests) > 1:
        raise ConfigError(f"placement {placement.name!r}: its formula chooses by {', '.join(tests)}; one can be drawn")
    said = tests[0].replace("<=", "\N{LESS-THAN OR EQUAL TO}").replace("==", "=")
    return [
        _Drawer(placement).flow(chosen(placement.formula, first), when)
        for first, when in ((True, f"blocks with {said}"), (False, "all other blocks"))
    ]


class _Drawer:
    """Follows the statements; what a name stands for is a node."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self.nodes: list[Node] = []
        self.known: dict[str, int] = {}
        self.columns = {"x": 0}

    def flow(self, statements: list[ast.stmt], when: str) -> Flow:
        """All of it, from the embeddings to the head."""
        placement = self.placement
        self.known["x"] = self._node("embeddings", [], 0, label="embeddings", expression="x")
        opens = parsed(placement.opens)
        for number, name in enumerate(n for one in opens for n in assigned(one) if n != "x"):
            self.columns[name] = OUTSIDE + number
        self._run(opens)
        bottom = self._boundary("enter", list(self.known))
        streams = list(self.known)
        if "F(" in placement.formula:
            statements = [one for name in "AM" for one in renamed(statements, "F", name)]
        self._run(statements)
        top = self._boundary("leave", streams)
        self._run(parsed(placement.closes))
        self._node("head", [self.known["x"]], 0, label="head", expression="x")
        self._settle()
        return Flow(when, self.nodes, (bottom, top))

    def _boundary(self, kind: str, streams: list[str]) -> int:
        row = 1 + max(node.row for node in self.nodes)
        for name in streams:
            self.known[name] = self._node(
                kind, [self.known[name]], self.columns[name], label=name if len(streams) > 1 else "", expression=name
            )
            self.nodes[-1].row = row
        return row

    def _run(self, statements: list[ast.stmt]) -> None:
        for number, one in enumerate(statements):
            (name,), what = assigned(one), value(one)
            # A temporary stands on the stream's own line, unless the stream is needed once more.
            stream_is_needed = is_read("x", statements[number + 1 :])
            column = self.columns.get(name, 1 if stream_is_needed else 0)
            if isinstance(what, ast.Name) and name in self.columns:
                self.known[name] = self.known[what.id]  # where a second stream begins
            else:
                self.known[name] = self._of(what, column)

    def _of(self, value: ast.expr, column: int) -> int:
        """The node of an expression, drawn from a column on to the right."""
        match value:
            case ast.Name(id=name) if name in self.known:
                return self.known[name]
            case ast.BinOp(op=ast.Add()):
                return self._joined("add", sorted(terms(value), key=self._weight), column)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return self._joined("subtract", [left, right], column)
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Call(func=ast.Name(id="norm2"), args=[of])):
                if ast.unparse(left) == ast.unparse(of):
                    return self._node("unit", [self._of(left, column)], column, label="length 1", expression="unit")
            case ast.BinOp(left=left, op=ast.Div(), right=right) if self._is_factor(right):
                return self._factor("divide", left, right, column)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if self._is_factor(left):
                return self._factor("scale", right, left, column)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if self._is_factor(right):
                return self._factor("scale", left, right, column)
            case ast.Call(func=ast.Name(id="N"), args=[inner]):
                return self._node("norm", [self._of(inner, column)], column, label="norm", expression="N")
            case ast.Call(func=ast.Name(id=name), args=[inner]) if name in BOXES:
                norms = INNER if name.endswith("_qkv") else ()
                source = self._of(inner, column)
                return self._node("box", [source], column, label=BOXES[name], expression=name, norms=norms)
            case ast.Call(func=ast.Name(id="stop"), args=[inner]):
                source = self._of(inner, column)
                return self._node("function", [source], column, label="no gradient", expression="stop")
        raise ConfigError(
            f"placement {self.placement.name!r}: {ast.unparse(value)!r} cannot be drawn; see explain/flow.py"
        )

    def _joined(self, kind: str, summands: list[ast.expr], column: int) -> int:
        """The first term from below, the others from the side, each in a column of its own."""
        inputs, free = [self._of(summands[0], column)], column + self._width(summands[0])
        for term in summands[1:]:
            inputs.append(self._of(term, free))
            taken = self.nodes[inputs[-1]].column if isinstance(term, ast.Name) else free + self._width(term) - 1
            free = max(free, taken + 1) if taken < OUTSIDE else free
        return self._node(kind, inputs, column, label=SIGNS[kind])

    def _factor(self, kind: str, of: ast.expr, by: ast.expr, column: int) -> int:
        source = self._of(of, column)
        names = {node.id for node in ast.walk(by) if isinstance(node, ast.Name)}
        return self._node(
            kind, [source], column, label=f"{SIGNS[kind]} {pretty(by)}", expression=ast.unparse(by),
            learned=bool(names - CONSTANTS),
        )  # fmt: skip

    def _is_factor(self, value: ast.expr) -> bool:
        """Whether no stream is in it."""
        return not any(isinstance(node, ast.Name) and node.id in self.known for node in ast.walk(value))

    def _weight(self, value: ast.expr) -> int:
        """How much happens in it; the lightest term of a sum is the line that the others are added to."""
        names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
        operations = sum(isinstance(node, (ast.Call, ast.BinOp)) for node in ast.walk(value))
        return 100 * sum(name in BOXES for name in names) + operations

    def _width(self, value: ast.expr) -> int:
        """How many columns it takes."""
        match value:
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return sum(0 if isinstance(term, ast.Name) else self._width(term) for term in terms(value)) or 1
            case ast.BinOp(left=left, right=right):
                return max(self._width(left), self._width(right))
            case ast.Call(args=[inner]):
                return self._width(inner)
        return 1

    def _node(self, kind: str, inputs: list[int], column: int, **more: object) -> int:
        row = 1 + max((self.nodes[number].row for number in inputs), default=-1)
        self.nodes.append(Node(kind, inputs, column, row, **more))  # pyright: ignore[reportArgumentType]
        return len(self.nodes) - 1

    def _settle(self) -> None:
        """Put the further streams to the right of all else."""
        width = 1 + max(node.column for node in self.nodes if node.column < OUTSIDE)
        for node in self.nodes:
            if node.column >= OUTSIDE:
                node.column += width - OUTSIDE
