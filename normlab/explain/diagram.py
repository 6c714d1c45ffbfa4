"""The block diagram of a placement, from the formula that `normlab verify` executes (`Placement.formula`, Python).

Each operation on a stream is a node in a column: 0 for the stream x, 1 and more for branches. Lengths are in pixels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from xml.etree.ElementTree import Element

from normlab.catalogue.placements.base import Placement
from normlab.catalogue.placements.formula import KIND_OF, LABELS, SIZES, runs_twice

OTHER_STREAM = 3
"""The column of a second stream, to the right of all branches."""
ROW_HEIGHT, COLUMN_GAP, LEFT_MARGIN, END_HEIGHT, LETTER_WIDTH = 52.0, 22.0, 26.0, 20.0, 7.2


def make(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """Return an element with a text or elements in it; `class_` is the attribute `class`."""
    element = Element(tag, {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items()})
    element.text = "".join(child for child in children if isinstance(child, str))
    element.extend(child for child in children if isinstance(child, Element))
    return element


@dataclass(eq=False)
class Node:
    kind: str
    """embeddings, enter, leave, head, norm, box, scale, divide, unit, function, add or subtract."""
    inputs: list[Node]
    """The first input of `add` and `subtract` enters from below, the second from the side."""
    column: int
    label: str = ""
    expression: str = ""
    """The formula of a factor, or the name of a function or stream."""
    number: str = ""
    """The second line of the label."""
    row: int = 0
    """From the bottom."""
    x: float = 0.0
    y: float = 0.0

    @property
    def size(self) -> tuple[float, float]:
        if self.kind in ("add", "subtract"):
            return 22.0, 22.0
        if self.kind in ("enter", "leave"):
            return 6.0, 6.0
        width = max(LETTER_WIDTH * len(self.label) + 18, 6.2 * len(self.number) + 16, 86.0 * (self.kind == "box"))
        return width, END_HEIGHT if self.kind in ("embeddings", "head") else 38.0 if self.number else 26.0


@dataclass
class Diagram:
    """The graph of a model with one block; the condition of the formula selects one of two kinds of blocks."""

    placement: Placement
    condition_holds: bool = True
    nodes: list[Node] = field(default_factory=list)
    node_of: dict[str, Node] = field(default_factory=dict)
    """The node of the value of each variable."""
    streams: dict[str, int] = field(default_factory=lambda: {"x": 0})
    """The column of each stream."""

    def __post_init__(self) -> None:
        """Build the graph from the embeddings to the head."""
        self.node_of["x"] = self._add("embeddings", [], 0, "embeddings", "x")
        formula = self.placement.formula
        self.streams |= {
            name: OTHER_STREAM for name, _ in self._statements(self.placement.embedding_formula) if name != "x"
        }
        self._run(self.placement.embedding_formula)
        self.start = self._add_boundary("enter")
        if runs_twice(formula):
            formula = "; ".join(formula.replace("F(", f"{name}(") for name in "AM")
        self._run(formula)
        self.end = self._add_boundary("leave")
        self._run(self.placement.head_formula)
        self._add("head", [self.node_of["x"]], 0, "LM head", "x")

    def _statements(self, formula: str) -> list[tuple[str, ast.expr]]:
        """Return a formula's assignments, with one side of each `a if condition else b`."""
        statements = [each for each in ast.parse(formula).body if isinstance(each, ast.Assign)]
        side = "body" if self.condition_holds else "orelse"
        return [(ast.unparse(each.targets[0]), getattr(each.value, side, each.value)) for each in statements]

    def _run(self, formula: str) -> None:
        statements = self._statements(formula)
        for number, (name, value) in enumerate(statements, start=1):
            # A temporary variable is drawn in the stream's column, unless the stream is still needed.
            is_x_needed = any("x" in _names(later) for _, later in statements[number:])
            is_copy = isinstance(value, ast.Name) and name in self.streams  # the start of a second stream
            column = self.streams.get(name, int(is_x_needed))
            self.node_of[name] = self.node_of[ast.unparse(value)] if is_copy else self._draw(value, column)

    def _add(self, kind: str, inputs: list[Node], column: int, label: str, expression: str = "") -> Node:
        row = 1 + max((each.row for each in inputs), default=-1)
        self.nodes.append(Node(kind, inputs, column, label, expression, row=row))
        return self.nodes[-1]

    def _add_boundary(self, kind: str) -> int:
        """Add a node for each stream in one row above all others; return the row."""
        row = 1 + max(node.row for node in self.nodes)
        for name, column in self.streams.items():
            label = name if len(self.streams) > 1 else ""
            self.node_of[name] = self._add(kind, [self.node_of[name]], column, label, name)
            self.node_of[name].row = row
        return row

    def _draw(self, value: ast.expr, column: int) -> Node:
        """Return the node of an expression that is drawn in a column and the columns to its right."""
        match value:
            case ast.Name(id=name) if name in self.node_of:
                return self.node_of[name]
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                first_new, below = len(self.nodes), self._draw(left, column)
                used = [each.column for each in (below, *self.nodes[first_new:]) if each.column < OTHER_STREAM]
                side = self._draw(right, 1 + max([column, *used]))
                kind, sign = ("add", "+") if isinstance(op, ast.Add) else ("subtract", "\N{MINUS SIGN}")
                return self._add(kind, [below, side], column, sign)
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Call(func=ast.Name(id="norm2"), args=[argument])):
                if ast.unparse(left) == ast.unparse(argument):
                    return self._add("unit", [self._draw(left, column)], column, "length 1")
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
                is_product, streams = isinstance(op, ast.Mult), self.node_of.keys()
                left, right = (right, left) if is_product and not streams & _names(left) else (left, right)
                if not streams & _names(right):
                    kind, sign = ("scale", "\N{MULTIPLICATION SIGN}") if is_product else ("divide", "÷")
                    label = f"{sign} {_factor_text(right)}"
                    return self._add(kind, [self._draw(left, column)], column, label, ast.unparse(right))
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in LABELS:
                return self._draw_call(name, arguments, column)
        raise NotImplementedError(f"{ast.unparse(value)!r} of placement {self.placement.name!r} cannot be drawn")

    def _draw_call(self, name: str, arguments: list[ast.expr], column: int) -> Node:
        """Return the node of a function's call; weights of streams and queries for states are not drawn."""
        of = KIND_OF[name]
        if of == "streams":
            arguments = arguments[1:]
        elif of == "states":
            arguments = [value for value in arguments if isinstance(value, ast.Name) and value.id in self.node_of]
        kind = "box" if of == "the block" else "function"
        if name == "N":
            kind = "norm"
        return self._add(kind, [self._draw(value, column) for value in arguments], column, LABELS[name], name)

    def set_numbers(self, norms: Sequence[Sequence[str]]) -> None:
        """Write a text into each norm of the embeddings, the block and the head, given in the order of their calls."""
        queues = [iter(part) for part in norms]
        for node in self.nodes:
            part = (node.row >= self.start) + (node.row > self.end)
            queue = queues[part]
            if node.kind == "norm":
                for _ in range(self.placement.weights_formula.count("N(") if part == 1 else 0):
                    next(queue, "")
                node.number = next(queue, "")  # norm=none is not instrumented
            elif node.expression.endswith("_qkv"):
                node.number = f"{len([next(queue, '') for _ in 'qkv'])} norms: q, k, v"

    def svg(self) -> Element:
        """Return the drawing, with the embeddings at the bottom."""
        columns = range(1 + max(node.column for node in self.nodes))
        widths = [max((node.size[0] for node in self.nodes if node.column == each), default=0.0) for each in columns]
        lefts = list(accumulate((width + COLUMN_GAP for width in widths), initial=LEFT_MARGIN + COLUMN_GAP))
        height = max(node.row for node in self.nodes) * ROW_HEIGHT + 2 * END_HEIGHT
        for node in self.nodes:
            node.x, node.y = lefts[node.column] + widths[node.column] / 2, height - END_HEIGHT - ROW_HEIGHT * node.row
        bottom, top = (height - END_HEIGHT - ROW_HEIGHT * row for row in (self.start, self.end))
        frame = {"x": LEFT_MARGIN, "y": top, "width": lefts[-1] - LEFT_MARGIN, "height": bottom - top, "rx": 10}
        condition = self.placement.formula.partition(" if ")[2].partition(" else ")[0]
        blocks = f"blocks with {condition}" if self.condition_holds else "all other blocks"
        turned = f"translate({LEFT_MARGIN - 11} {(top + bottom) / 2}) rotate(-90)"
        times = make("text", blocks if condition else "block", class_="times", transform=turned)
        edges = [edge for node in self.nodes for edge in _edges(node, self.nodes)]
        width, label = lefts[-1] + COLUMN_GAP / 2, f"diagram of {self.placement.name}"
        return make(
            "svg", make("rect", class_="frame", **frame), times, *edges, *map(_drawing, self.nodes), class_="flow",
            viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", aria_label=label,
        )  # fmt: skip


def _edges(node: Node, nodes: Sequence[Node]) -> Iterator[Element]:
    """Yield the edges into a node, and a dot where an edge leaves another one.

    An edge to another column turns sideways half a row above its source; one into the side of a sum goes up first.
    """
    for order, source in enumerate(node.inputs):
        turn, side = source.y - ROW_HEIGHT / 2, 1 if source.x > node.x else -1
        edge, corners = node.x + side * node.size[0] / 2, list[tuple[float, float]]()
        rows = [each.row for each in nodes if each.column == source.column]
        if order and source.column and any(source.row < row <= node.row for row in rows):
            gap = edge + side * COLUMN_GAP * 0.7
            corners = [(source.x, turn), (gap, turn), (gap, node.y)]
        elif order:
            corners = [(source.x, node.y)]
        elif source.x != node.x:
            corners = [(source.x, turn), (node.x, turn)]
        end = (edge, node.y) if order else (node.x, node.y + node.size[1] / 2)
        points = [(source.x, source.y - source.size[1] / 2), *corners, end]
        kinds = ["line"] + ["stream"] * (not order and source.column == node.column == 0)
        kinds += ["arrow"] * (node.kind not in ("enter", "leave"))
        yield make("polyline", points=" ".join(f"{x},{y}" for x, y in points), class_=" ".join(kinds))
        if corners and sum(source in each.inputs for each in nodes) > 1:
            yield make("circle", cx=corners[0][0], cy=corners[0][1], r=3, class_="branch")


def _drawing(node: Node) -> Element:
    """Return a box with a label, a circle with a sign, or a point."""
    (width, height), (x, y) = node.size, (node.x, node.y)
    names = _names(ast.parse(node.expression)) if node.kind in ("scale", "divide") else set()
    learned = " learned" if names - SIZES.keys() - KIND_OF.keys() else ""
    group = {"class_": f"node {node.kind}{learned}", "data_kind": node.kind}
    if node.kind in ("enter", "leave"):
        return make("g", make("circle", cx=x, cy=y, r=3), make("text", node.label, x=x + 9, y=y - 9), **group)
    if node.kind in ("add", "subtract"):
        return make("g", make("circle", cx=x, cy=y, r=11), make("text", node.label, x=x, y=y), **group)
    shape = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height}
    rectangle = make("rect", rx=6 if node.kind == "box" else 13, **shape)
    label = make("text", node.label, x=x, y=y - 8 * bool(node.number))
    number = make("text", node.number, x=x, y=y + 9, class_="number")
    return make("g", None if node.kind in ("embeddings", "head") else rectangle, label, number, **group)


def _names(value: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _factor_text(factor: ast.expr) -> str:
    """Return a factor in mathematical notation: 2L for 2 * L, √l for sqrt(l)."""
    text = re.sub(r"(\d) \* (?=\w\b)", r"\1", ast.unparse(factor))
    text = re.sub(r"abs\((\w+)\)", r"|\1|", re.sub(r"sqrt\((\w)\)", r"√\1", text))
    return text.replace("sqrt", "√").replace(" ** 0.25", "^¼").replace(" * ", " · ")
