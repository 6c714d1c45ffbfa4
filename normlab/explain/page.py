"""The page of `normlab explain`: its words, its data, its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normlab import __version__, catalogue
from normlab.explain import matrix, norms
from normlab.explain.flow import flows
from normlab.explain.layout import layout
from normlab.placements.base import load_all
from normlab.report.pages.shell import page, write_page

TITLE = "What normalisation does"
OURS = Path(__file__).parent / "assets"
ASSETS = [OURS / name for name in ("explain.css", "arithmetic.js", "tables.js", "live.js", "flows.js", "explain.js")]


def write(path: Path) -> None:
    """Compute the page, and write it.

    Raises:
        StoreError: The system refused.
    """
    write_page(path, text())


def text() -> str:
    """The page, whole."""
    body = (OURS / "body.html").read_text(encoding="utf-8")
    return page(TITLE, body, data(), ASSETS, plotly=False)


def data() -> dict[str, Any]:
    """What the scripts show: the matrix, what is live, every norm as its module computes it, every placement."""
    return {
        "version": __version__,
        "original": [list(row) for row in matrix.ORIGINAL],
        "limit": matrix.LIMIT,
        "presets": list(matrix.PRESETS),
        "updates": norms.UPDATES,
        "groups": norms.GROUPS,
        "live": norms.live_norms(),
        "norms": norms.all_norms(),
        "placements": placements(),
    }


def placements() -> list[dict[str, Any]]:
    """Every placement of the catalogue: what it says of it, and its drawings; a plugin's are in none."""
    entries = {entry["name"]: entry for entry in catalogue.placements()}
    return [
        {
            "name": name,
            "formula": placement.formula,
            "opens": placement.opens,
            "closes": placement.closes,
            "inside": placement.inside,
            "learns": entries[name]["parameters"],
            **{word: entries[name][word] for word in ("init", "equals", "note", "source")},
            "flows": [layout(flow) for flow in flows(placement)],
        }
        for name, placement in load_all().items()
        if name in entries
    ]
