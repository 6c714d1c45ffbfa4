"""The block diagram of a placement, from the formula that `normlab verify` executes (`Placement.formula`, Python).

Each operation on a stream is a node in a column: 0 for the stream x, 1 and more for branches. Lengths are in pixels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from normlab.base.options import plain_tree
from normlab.catalogue.placements.base import Placement
from normlab.catalogue.placements.formula import KIND_OF, LABELS, SIZES, runs_twice

OTHER_STREAM = 3
"""The column of a second stream, to the right of all branches."""
ROW_HEIGHT, COLUMN_GAP, LEFT_MARGIN, END_HEIGHT, LETTER_WIDTH = 52.0, 22.0, 26.0, 20.0, 7.2


def make(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """Return an element with a text or elements in it; `class_` is the attribute `class`."""
    element = Element(tag)
    for name, value in attributes.items():
        element.set(name.rstrip("_").replace("_", "-"), str(value))
    element.text = ""
    for child in children:
        if isinstance(child, str):
            element.text += child
        elif child is not None:
            element.append(child)
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
        # The number below the label is in a smaller font.
        width = max(LETTER_WIDTH * len(self.label) + 18, 6.2 * len(self.number) + 16)
        if self.kind == "box":
            width = max(width, 86.0)
        if self.kind in ("embeddings", "head"):
            return width, END_HEIGHT
        if self.number:
            return width, 38.0
        return width, 26.0


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
        for name, _ in self._statements(self.placement.embedding_formula):
            if name != "x":
                self.streams[name] = OTHER_STREAM
        self._run(self.placement.embedding_formula)
        self.start = self._add_boundary("enter")
        formula = _with_stream_norms(self.placement.weights_formula, self.placement.formula)
        if runs_twice(formula):
            # A formula with F runs for attention and again for the MLP.
            formula = f"{formula.replace('F(', 'A(')}; {formula.replace('F(', 'M(')}"
        self._run(formula)
        self.end = self._add_boundary("leave")
        self._run(_with_stream_norms(self.placement.head_weights_formula, self.placement.head_formula))
        self._add("head", [self.node_of["x"]], 0, "LM head", "x")

    def _statements(self, formula: str) -> list[tuple[str, ast.expr]]:
        """Return a formula's assignments, with one side of each `a if condition else b`."""
        statements: list[tuple[str, ast.expr]] = []
        for statement in ast.parse(formula).body:
            if not isinstance(statement, ast.Assign):
                continue
            value = statement.value
            if isinstance(value, ast.IfExp):
                value = value.body if self.condition_holds else value.orelse
            statements.append((ast.unparse(statement.targets[0]), value))
        return statements

    def _run(self, formula: str) -> None:
        """Draw each assignment of a formula."""
        statements = self._statements(formula)
        for number, (name, value) in enumerate(statements, start=1):
            if isinstance(value, ast.Name) and name in self.streams:
                # A second stream starts as a copy of the first, from the same node.
                self.node_of[name] = self.node_of[value.id]
                continue
            # A temporary variable is drawn in the stream's column, unless the stream is still needed.
            is_x_needed = any("x" in _names(later) for _, later in statements[number:])
            self.node_of[name] = self._draw(value, self.streams.get(name, int(is_x_needed)))

    def _add(self, kind: str, inputs: list[Node], column: int, label: str, expression: str = "") -> Node:
        row = 1 + max((source.row for source in inputs), default=-1)
        self.nodes.append(Node(kind, inputs, column, label, expression, row=row))
        return self.nodes[-1]

    def _add_boundary(self, kind: str) -> int:
        """Add a node for each stream in one row above all others; return the row."""
        row = 1 + max(node.row for node in self.nodes)
        for name, column in self.streams.items():
            label = ""
            if len(self.streams) > 1:
                label = name
            node = self._add(kind, [self.node_of[name]], column, label, name)
            node.row = row
            self.node_of[name] = node
        return row

    def _draw(self, value: ast.expr, column: int) -> Node:
        """Return the node of an expression that is drawn in a column and the columns to its right."""
        match value:
            case ast.Name(id=name) if name in self.node_of:
                return self.node_of[name]
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                first_new = len(self.nodes)
                below = self._draw(left, column)
                # The right operand joins from the side, so its column is to the right of all that the left one needs.
                used = [column]
                for node in (below, *self.nodes[first_new:]):
                    if node.column < OTHER_STREAM:
                        used.append(node.column)
                side = self._draw(right, 1 + max(used))
                if isinstance(op, ast.Add):
                    return self._add("add", [below, side], column, "+")
                return self._add("subtract", [below, side], column, "\N{MINUS SIGN}")
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Call(func=ast.Name(id="norm2"), args=[argument])):
                if ast.unparse(left) == ast.unparse(argument):
                    return self._add("unit", [self._draw(left, column)], column, "length 1")
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
                streams = self.node_of.keys()
                # The factor of a product may be on either side; a divisor is on the right.
                if isinstance(op, ast.Mult) and not streams & _names(left):
                    left, right = right, left
                if not streams & _names(right):
                    source, factor = self._draw(left, column), _factor_text(right)
                    if isinstance(op, ast.Mult):
                        label = f"\N{MULTIPLICATION SIGN} {factor}"
                        return self._add("scale", [source], column, label, ast.unparse(right))
                    return self._add("divide", [source], column, f"÷ {factor}", ast.unparse(right))
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
        if name in ("N", "N_streams"):
            kind = "norm"
        return self._add(kind, [self._draw(value, column) for value in arguments], column, LABELS[name], name)

    def set_numbers(self, norms: Sequence[Sequence[str]]) -> None:
        """Write a text into each norm of the embeddings, the block and the head, given in the order of their calls."""
        of_embeddings, of_block, of_head = [iter(texts) for texts in norms]
        for node in self.nodes:
            if node.row < self.start:
                texts = of_embeddings
            elif node.row <= self.end:
                texts = of_block
            else:
                texts = of_head
            if node.kind == "norm":
                if texts is of_block:
                    # Each norm of the block comes after those of the weights of the streams, which are not drawn.
                    for _ in range(self.placement.weights_formula.count("N(")):
                        next(texts, "")
                if node.expression == "N_streams":
                    count = plain_tree(self.placement)["streams"]
                    for _ in range(count):
                        next(texts, "")
                    node.number = f"{count} norms"
                else:
                    node.number = next(texts, "")  # norm=none is not instrumented
            elif node.expression.endswith("_qkv"):
                for _ in "qkv":
                    next(texts, "")
                node.number = "3 norms: q, k, v"

    def svg(self) -> Element:
        """Return the drawing, with the embeddings at the bottom."""
        # Each column is as wide as its widest node, and `lefts` ends with the right edge of the last one.
        widths = [0.0] * (1 + max(node.column for node in self.nodes))
        for node in self.nodes:
            widths[node.column] = max(widths[node.column], node.size[0])
        lefts = [LEFT_MARGIN + COLUMN_GAP]
        for width in widths:
            lefts.append(lefts[-1] + (width + COLUMN_GAP))
        height = max(node.row for node in self.nodes) * ROW_HEIGHT + 2 * END_HEIGHT
        for node in self.nodes:
            node.x = lefts[node.column] + widths[node.column] / 2
            node.y = height - END_HEIGHT - ROW_HEIGHT * node.row
        # The frame around the block, with the blocks that it stands for at its left.
        bottom = height - END_HEIGHT - ROW_HEIGHT * self.start
        top = height - END_HEIGHT - ROW_HEIGHT * self.end
        frame = {"x": LEFT_MARGIN, "y": top, "width": lefts[-1] - LEFT_MARGIN, "height": bottom - top, "rx": 10}
        condition = self.placement.formula.partition(" if ")[2].partition(" else ")[0]
        blocks = "block"
        if condition:
            blocks = f"blocks with {condition}" if self.condition_holds else "all other blocks"
        turned = f"translate({LEFT_MARGIN - 11} {(top + bottom) / 2}) rotate(-90)"
        parts = [make("rect", class_="frame", **frame), make("text", blocks, class_="times", transform=turned)]
        # SVG draws in this order: nodes cover the ends of their edges.
        for node in self.nodes:
            parts += _edges(node, self.nodes)
        for node in self.nodes:
            parts.append(_drawing(node))
        width, label = lefts[-1] + COLUMN_GAP / 2, f"diagram of {self.placement.name}"
        return make(
            "svg", *parts, class_="flow", viewBox=f"0 0 {width} {height}", width=width, height=height, role="img",
            aria_label=label,
        )  # fmt: skip


def _edges(node: Node, nodes: Sequence[Node]) -> Iterator[Element]:
    """Yield the edges into a node, and a dot where an edge leaves another one.

    An edge to another column turns sideways half a row above its source; one into the side of a sum goes up first.
    """
    for position, source in enumerate(node.inputs):
        is_from_below = position == 0
        side = 1 if source.x > node.x else -1
        edge = node.x + side * node.size[0] / 2
        turn = source.y - ROW_HEIGHT / 2
        # A branch that ends below the sum leaves its column if other nodes of the column are in the way.
        is_blocked = False
        for above in nodes:
            if above.column == source.column and source.row < above.row <= node.row:
                is_blocked = True
        corners: list[tuple[float, float]] = []
        if not is_from_below and source.column and is_blocked:
            gap = edge + side * COLUMN_GAP * 0.7
            corners = [(source.x, turn), (gap, turn), (gap, node.y)]
        elif not is_from_below:
            corners = [(source.x, node.y)]
        elif source.x != node.x:
            corners = [(source.x, turn), (node.x, turn)]
        start, end = (source.x, source.y - source.size[1] / 2), (edge, node.y)
        if is_from_below:
            end = (node.x, node.y + node.size[1] / 2)
        points = " ".join(f"{x},{y}" for x, y in (start, *corners, end))
        kinds = ["line"]
        if is_from_below and source.column == node.column == 0:
            kinds.append("stream")
        if node.kind not in ("enter", "leave"):
            kinds.append("arrow")
        yield make("polyline", points=points, class_=" ".join(kinds))
        is_shared = sum(source in user.inputs for user in nodes) > 1
        if corners and is_shared:
            yield make("circle", cx=corners[0][0], cy=corners[0][1], r=3, class_="branch")


def _drawing(node: Node) -> Element:
    """Return a box with a label, a circle with a sign, or a point."""
    (width, height), x, y = node.size, node.x, node.y
    classes = f"node {node.kind}"
    if node.kind in ("scale", "divide"):
        # Sizes and functions are no learned parameters.
        parameters = _names(ast.parse(node.expression)) - SIZES.keys() - KIND_OF.keys()
        if parameters:
            classes += " learned"
    group = {"class_": classes, "data_kind": node.kind}
    if node.kind in ("enter", "leave"):
        return make("g", make("circle", cx=x, cy=y, r=3), make("text", node.label, x=x + 9, y=y - 9), **group)
    if node.kind in ("add", "subtract"):
        return make("g", make("circle", cx=x, cy=y, r=11), make("text", node.label, x=x, y=y), **group)
    shape = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height}
    parts: list[Element] = []
    if node.kind not in ("embeddings", "head"):
        parts.append(make("rect", rx=6 if node.kind == "box" else 13, **shape))
    label_y = y
    if node.number:  # a second line moves the first one up
        label_y = y - 8
    parts.append(make("text", node.label, x=x, y=label_y))
    parts.append(make("text", node.number, x=x, y=y + 9, class_="number"))
    return make("g", *parts, **group)


def _with_stream_norms(weights_formula: str, formula: str) -> str:
    """Return a formula after those statements of the weights' formula that give streams their norms.

    What the other statements compute are numbers, which are drawn as factors.
    """
    statements = [text for text in weights_formula.split("; ") if " = N_streams(" in text]
    return "; ".join([*statements, formula])


def _names(value: ast.AST) -> set[str]:
    """Return the names in an expression."""
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _factor_text(factor: ast.expr) -> str:
    """Return a factor in mathematical notation: 2L for 2 * L, √l for sqrt(l)."""
    text = re.sub(r"(\d) \* (?=\w\b)", r"\1", ast.unparse(factor))
    text = re.sub(r"abs\((\w+)\)", r"|\1|", re.sub(r"sqrt\((\w)\)", r"√\1", text))
    return text.replace("sqrt", "√").replace(" ** 0.25", "^¼").replace(" * ", " · ")
