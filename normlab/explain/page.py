"""The page of `normlab explain`: its title, data and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normlab import catalogue
from normlab.explain import norm_examples
from normlab.explain.flow import flows
from normlab.explain.layout import layout
from normlab.placements.base import load_all
from normlab.report.pages.shell import page, write_page
from normlab.version import __version__

TITLE = "What normalisation does"
ASSETS = Path(__file__).parent / "assets"
ASSET_NAMES = ("explain.css", "arithmetic.js", "tables.js", "live.js", "flows.js", "explain.js")


def write(path: Path) -> None:
    """Compute and write the page.

    Raises:
        StoreError: The file could not be written.
    """
    body = (ASSETS / "body.html").read_text(encoding="utf-8")
    write_page(path, page(TITLE, body, page_data(), [ASSETS / name for name in ASSET_NAMES]))


def page_data() -> dict[str, Any]:
    """Return the matrix, the live norms, every norm's output, and every placement."""
    return {
        "version": __version__,
        "original": norm_examples.ORIGINAL,
        "limit": norm_examples.LIMIT,
        "presets": norm_examples.PRESETS,
        "updates": norm_examples.UPDATES,
        "groups": norm_examples.GROUPS,
        "live": norm_examples.live_norms(),
        "norms": norm_examples.all_norms(),
        "placements": placements(),
    }


def placements() -> list[dict[str, Any]]:
    """Return every catalogued placement with its diagrams; plugins are not in the catalogue."""
    known = load_all()
    return [
        {
            "name": entry["name"],
            "formula": placement.formula,
            "embedding_formula": placement.embedding_formula,
            "head_formula": placement.head_formula,
            "inside": placement.inside,
            **{key: entry[key] for key in ("parameters", "init", "equals", "note", "source")},
            "flows": [layout(flow) for flow in flows(placement)],
        }
        for entry in catalogue.placements()
        for placement in [known[entry["name"]]]
    ]
