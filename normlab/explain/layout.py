"""Where a flow's nodes and lines stand on paper, in pixels; the embeddings at the bottom, the head at the top.

A line leaves its node upwards. To a node above another column it first goes sideways, half a row above where it came
from; into the side of a sum it first goes up, and then sideways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normlab.explain.flow import Flow, Node

PITCH, GAP, EDGE = 48.0, 22.0, 26.0
"""From row to row, between columns, left of the block; pixels."""
LETTER = 7.2
"""The width of a letter."""
HEIGHTS = {"box": 30.0, "norm": 26.0, "unit": 24.0, "scale": 24.0, "divide": 24.0, "function": 24.0}
BOX = 86.0
"""The width of a box, at least."""
ROUND = 22.0
"""Of a sum's circle."""
END = 20.0
"""The height of the words embeddings and head."""
WITH_NORMS = 42.0
"""The height of a box that shows norms inside."""

Point = tuple[float, float]


@dataclass
class Placed:
    """A node's centre and size."""

    x: float
    y: float
    width: float
    height: float


def layout(flow: Flow) -> dict[str, Any]:
    """A flow drawn: plain values for the page's script."""
    sizes = [_size(node) for node in flow.nodes]
    columns = 1 + max(node.column for node in flow.nodes)
    widths = [
        max((size[0] for node, size in zip(flow.nodes, sizes, strict=True) if node.column == column), default=0.0)
        for column in range(columns)
    ]
    lefts = [EDGE + GAP + sum(widths[:column]) + GAP * column for column in range(columns)]
    rows = 1 + max(node.row for node in flow.nodes)
    height = (rows - 1) * PITCH + 2 * END
    places = [
        Placed(lefts[node.column] + widths[node.column] / 2, height - END - PITCH * node.row, *size)
        for node, size in zip(flow.nodes, sizes, strict=True)
    ]
    right = lefts[-1] + widths[-1] + GAP
    bottom, top = (height - END - PITCH * row for row in flow.block)
    return {
        "when": flow.when,
        "width": right + GAP / 2,
        "height": height,
        "frame": {"x": EDGE, "y": top, "width": right - EDGE, "height": bottom - top},
        "nodes": [_drawn(node, place) for node, place in zip(flow.nodes, places, strict=True)],
        "lines": _lines(flow, places),
    }


def _size(node: Node) -> tuple[float, float]:
    if node.kind in ("add", "subtract"):
        return ROUND, ROUND
    if node.kind in ("enter", "leave"):
        return 6.0, 6.0
    width = LETTER * len(node.label) + 18
    if node.kind == "box":
        width = max(width, BOX)
    if node.kind in ("embeddings", "head"):
        return width, END
    return width, WITH_NORMS if node.norms else HEIGHTS[node.kind]


def _drawn(node: Node, place: Placed) -> dict[str, Any]:
    return {**vars(node), "norms": list(node.norms), **vars(place)}


def _lines(flow: Flow, places: list[Placed]) -> list[dict[str, Any]]:
    consumers = [sum(number in node.inputs for node in flow.nodes) for number in range(len(flow.nodes))]
    lines = []
    for target, node in enumerate(flow.nodes):
        for order, source in enumerate(node.inputs):
            points = _from_side(flow, places, source, target) if order else _from_below(places[source], places[target])
            lines.append({
                "from": source, "to": target, "points": [list(point) for point in points],
                "arrow": node.kind not in ("enter", "leave"),
                "dot": list(points[1]) if consumers[source] > 1 and len(points) > 2 else None,
                "stream": not order and flow.nodes[source].column == node.column == 0,
            })  # fmt: skip
    return lines


def _from_below(source: Placed, target: Placed) -> list[Point]:
    start, end = (source.x, source.y - source.height / 2), (target.x, target.y + target.height / 2)
    if source.x == target.x:
        return [start, end]
    fork = source.y - PITCH / 2
    return [start, (source.x, fork), (target.x, fork), end]


def _from_side(flow: Flow, places: list[Placed], number: int, joined: int) -> list[Point]:
    """Into the left or right of a sum; around what stands above the source, by the lane beside the sum."""
    source, target = places[number], places[joined]
    away = 1 if source.x > target.x else -1
    start, end = (source.x, source.y - source.height / 2), (target.x + away * target.width / 2, target.y)
    column, low, high = flow.nodes[number].column, flow.nodes[number].row, flow.nodes[joined].row
    if any(node.column == column and low < node.row <= high for node in flow.nodes if column):
        fork, lane = source.y - PITCH / 2, target.x + away * (target.width / 2 + GAP * 0.7)
        return [start, (source.x, fork), (lane, fork), (lane, target.y), end]
    return [start, (source.x, target.y), end]
