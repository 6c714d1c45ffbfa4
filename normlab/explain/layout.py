"""Lay out the block diagram: node and edge coordinates in pixels, embeddings at the bottom.

An edge leaves its node upwards. An edge to another column turns sideways half a row above its source; an edge into the
side of a sum goes up first.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from normlab.explain.flow import Flow, Node

ROW_HEIGHT, COLUMN_GAP, LEFT_MARGIN = 48.0, 22.0, 26.0
"""Pixels, as all sizes here."""
LETTER_WIDTH = 7.2
HEIGHTS = {"box": 30.0, "norm": 26.0, "unit": 24.0, "scale": 24.0, "divide": 24.0, "function": 24.0}
MIN_BOX_WIDTH = 86.0
SUM_DIAMETER = 22.0
END_HEIGHT = 20.0
"""The height of the texts `embeddings` and `LM head`."""
BOX_HEIGHT_WITH_NORMS = 42.0

Point = tuple[float, float]


def layout(flow: Flow) -> dict[str, Any]:
    """Set the coordinates of a graph's nodes, and return the diagram as JSON values."""
    nodes = flow.nodes
    widths = [0.0] * (1 + max(node.column for node in nodes))
    for node in nodes:
        node.width, node.height = _size(node)
        widths[node.column] = max(widths[node.column], node.width)
    lefts = [LEFT_MARGIN + COLUMN_GAP + sum(widths[:column]) + COLUMN_GAP * column for column in range(len(widths))]
    height = max(node.row for node in nodes) * ROW_HEIGHT + 2 * END_HEIGHT
    for node in nodes:
        node.x = lefts[node.column] + widths[node.column] / 2
        node.y = height - END_HEIGHT - ROW_HEIGHT * node.row
    right = lefts[-1] + widths[-1] + COLUMN_GAP
    bottom, top = (height - END_HEIGHT - ROW_HEIGHT * row for row in flow.block)
    return {
        "when": flow.when,
        "width": right + COLUMN_GAP / 2,
        "height": height,
        "frame": {"x": LEFT_MARGIN, "y": top, "width": right - LEFT_MARGIN, "height": bottom - top},
        "nodes": [asdict(node) for node in nodes],
        "lines": _edges(nodes),
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


def _edges(nodes: list[Node]) -> list[dict[str, Any]]:
    edges = []
    for target, node in enumerate(nodes):
        for order, number in enumerate(node.inputs):
            source = nodes[number]
            points = _path_from_side(nodes, source, node) if order else _path_from_below(source, node)
            outputs = sum(number in other.inputs for other in nodes)
            edges.append({
                "from": number, "to": target, "points": points,
                "arrow": node.kind not in ("enter", "leave"),
                "dot": points[1] if outputs > 1 and len(points) > 2 else None,
                "stream": not order and source.column == node.column == 0,
            })  # fmt: skip
    return edges


def _path_from_below(source: Node, target: Node) -> list[Point]:
    start, end = (source.x, source.y - source.height / 2), (target.x, target.y + target.height / 2)
    if source.x == target.x:
        return [start, end]
    turn = source.y - ROW_HEIGHT / 2
    return [start, (source.x, turn), (target.x, turn), end]


def _path_from_side(nodes: list[Node], source: Node, target: Node) -> list[Point]:
    """Return a path into the side of a sum.

    If nodes are above the source, the path avoids them through the gap beside the sum.
    """
    side = 1 if source.x > target.x else -1
    start, end = (source.x, source.y - source.height / 2), (target.x + side * target.width / 2, target.y)
    if source.column and any(node.column == source.column and source.row < node.row <= target.row for node in nodes):
        turn, gap = source.y - ROW_HEIGHT / 2, target.x + side * (target.width / 2 + COLUMN_GAP * 0.7)
        return [start, (source.x, turn), (gap, turn), (gap, target.y), end]
    return [start, (source.x, target.y), end]
