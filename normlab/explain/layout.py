"""Lay out the block diagram: node and edge coordinates in pixels, embeddings at the bottom.

An edge leaves its node upwards. An edge to another column turns sideways half a row above its source; an edge into the
side of a sum goes up first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from normlab.explain.flow import Flow, Node

ROW_HEIGHT, COLUMN_GAP, LEFT_MARGIN = 48.0, 22.0, 26.0
"""Pixels, as all sizes here."""
LETTER_WIDTH = 7.2
HEIGHTS = {"box": 30.0, "norm": 26.0, "unit": 24.0, "scale": 24.0, "divide": 24.0, "function": 24.0}
MIN_BOX_WIDTH = 86.0
SUM_DIAMETER = 22.0
END_HEIGHT = 20.0
"""The height of the texts `embeddings` and `head`."""
BOX_HEIGHT_WITH_NORMS = 42.0

Point = tuple[float, float]


@dataclass
class Rectangle:
    """The centre and size of a node."""

    x: float
    y: float
    width: float
    height: float


def layout(flow: Flow) -> dict[str, Any]:
    """Return the coordinates of a graph as JSON values."""
    sizes = [_size(node) for node in flow.nodes]
    widths = [0.0] * (1 + max(node.column for node in flow.nodes))
    for node, (width, _) in zip(flow.nodes, sizes, strict=True):
        widths[node.column] = max(widths[node.column], width)
    lefts = [LEFT_MARGIN + COLUMN_GAP + sum(widths[:column]) + COLUMN_GAP * column for column in range(len(widths))]
    height = max(node.row for node in flow.nodes) * ROW_HEIGHT + 2 * END_HEIGHT
    rectangles = [
        Rectangle(lefts[node.column] + widths[node.column] / 2, height - END_HEIGHT - ROW_HEIGHT * node.row, *size)
        for node, size in zip(flow.nodes, sizes, strict=True)
    ]
    right = lefts[-1] + widths[-1] + COLUMN_GAP
    bottom, top = (height - END_HEIGHT - ROW_HEIGHT * row for row in flow.block)
    return {
        "when": flow.when,
        "width": right + COLUMN_GAP / 2,
        "height": height,
        "frame": {"x": LEFT_MARGIN, "y": top, "width": right - LEFT_MARGIN, "height": bottom - top},
        "nodes": [
            {**asdict(node), **asdict(rectangle)} for node, rectangle in zip(flow.nodes, rectangles, strict=True)
        ],
        "lines": _edges(flow, rectangles),
    }


def _size(node: Node) -> tuple[float, float]:
    if node.kind in ("add", "subtract"):
        return SUM_DIAMETER, SUM_DIAMETER
    if node.kind in ("enter", "leave"):
        return 6.0, 6.0
    width = LETTER_WIDTH * len(node.label) + 18
    if node.kind == "box":
        width = max(width, MIN_BOX_WIDTH)
    if node.kind in ("embeddings", "head"):
        return width, END_HEIGHT
    return width, BOX_HEIGHT_WITH_NORMS if node.norms else HEIGHTS[node.kind]


def _edges(flow: Flow, rectangles: list[Rectangle]) -> list[dict[str, Any]]:
    outputs = [sum(number in node.inputs for node in flow.nodes) for number in range(len(flow.nodes))]
    edges = []
    for target, node in enumerate(flow.nodes):
        for order, source in enumerate(node.inputs):
            if order:
                points = _path_from_side(flow, rectangles, source, target)
            else:
                points = _path_from_below(rectangles[source], rectangles[target])
            edges.append({
                "from": source, "to": target, "points": points,
                "arrow": node.kind not in ("enter", "leave"),
                "dot": points[1] if outputs[source] > 1 and len(points) > 2 else None,
                "stream": not order and flow.nodes[source].column == node.column == 0,
            })  # fmt: skip
    return edges


def _path_from_below(source: Rectangle, target: Rectangle) -> list[Point]:
    start, end = (source.x, source.y - source.height / 2), (target.x, target.y + target.height / 2)
    if source.x == target.x:
        return [start, end]
    turn = source.y - ROW_HEIGHT / 2
    return [start, (source.x, turn), (target.x, turn), end]


def _path_from_side(flow: Flow, rectangles: list[Rectangle], source_number: int, target_number: int) -> list[Point]:
    """Return a path into the side of a sum, which avoids nodes above its source through the gap beside the sum."""
    source, target = rectangles[source_number], rectangles[target_number]
    side = 1 if source.x > target.x else -1
    start, end = (source.x, source.y - source.height / 2), (target.x + side * target.width / 2, target.y)
    column, low, high = flow.nodes[source_number].column, flow.nodes[source_number].row, flow.nodes[target_number].row
    if any(node.column == column and low < node.row <= high for node in flow.nodes if column):
        turn, gap = source.y - ROW_HEIGHT / 2, target.x + side * (target.width / 2 + COLUMN_GAP * 0.7)
        return [start, (source.x, turn), (gap, turn), (gap, target.y), end]
    return [start, (source.x, target.y), end]
