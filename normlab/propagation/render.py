"""Tables and pages of signal propagation at initialisation, measured by `propagation/measure.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from normlab.report.channels import COLORS, DARK_COLORS
from normlab.report.pages.shell import CHART, page
from normlab.report.pages.shell import write_page as write_html
from normlab.report.tables import Row, sparkline

PROFILES = {
    "stream": "RMS of the residual stream after each layer",
    "attn_ratio": "RMS of what attention adds to the residual stream, over the RMS of the stream that enters the layer",
    "mlp_ratio": "RMS of what the MLP adds to the residual stream, over the RMS of the stream that enters the layer",
    "gradient": "L2 norm of the gradient of each block's mlp.down.weight",
    "block_gradient": "L2 norm of the gradient of all of a block's parameters",
    "update": "L2 norm of the first update of a block's matrices at the peak learning rate, over that of the matrices",
}
BODY = """<header class="top"><h1 id="title"></h1><div id="theme-place"></div></header>
<main id="profiles"></main><div id="tip" role="status" hidden></div>
<noscript>This page draws its figures with scripts, which are disabled in this browser.</noscript>"""


def table_row(row: Row) -> Row:
    """Return a row as text for a table: first and last values of profiles, and two sparklines."""
    first, last = row["gradient"][0], row["gradient"][-1]
    return {
        **{name: row[name] for name in ("norm", "placement", "depth")},
        **{option: str(value) for option, value in row["overrides"].items()},
        **{name: row[name] for name in ("init", "seeds")},
        "loss": _number(row["loss"], ".3f"),
        "stream, last": _number(row["stream"][-1]),
        "stream profile": _sparkline(row["stream"]),
        "attn/stream, last": _number(row["attn_ratio"][-1]),
        "mlp/stream, last": _number(row["mlp_ratio"][-1]),
        "grad, first": _number(first),
        "grad, last": _number(last),
        "last/first": _number(last / first) if first and last is not None else "",
        "grad profile": _sparkline(row["gradient"]),
        "update, last": _number(row["update"][-1]),
    }


def _number(value: float | None, digits: str = ".3g") -> str:
    return "not finite" if value is None else f"{value:{digits}}"


def _sparkline(profile: Sequence[float | None]) -> str:
    return sparkline([math.nan if value is None else value for value in profile])


def power_laws(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each row's first non-finite block, and each group's growth as a power of depth."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_label(row), []).append(row)
        for name in PROFILES:
            if None in row[name]:
                block = row[name].index(None) + 1
                yield f"{_label(row)}, L = {row['depth']}: the {name} is not finite from block {block} on"
                break
    for label, group in groups.items():
        depths = [row["depth"] for row in group]
        if len(set(depths)) < 2:
            continue
        series = {
            "stream": [row["stream"][-1] for row in group],
            "first gradient": [row["gradient"][0] for row in group],
            "last gradient": [row["gradient"][-1] for row in group],
        }
        powers = [
            f"{name} ~ L^{slope(depths, values):.2f}"
            for name, values in series.items()
            if all(value is not None and value > 0 for value in values)
        ]
        if powers:
            yield f"{label}, L = {', '.join(map(str, depths))}: {', '.join(powers)}"


def _label(row: Row) -> str:
    """Return the label that a row shares with the rows that differ only in depth."""
    options = "".join(f" {option}={value}" for option, value in row["overrides"].items())
    return f"{row['norm']} {row['placement']}{options} (init {row['init']})"


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Write an HTML page with a figure of each profile, a colour for each row and a line style for each depth.

    Raises:
        StoreError: The file cannot be written.
    """
    labels = list(dict.fromkeys(_label(row) for row in rows))
    depths = sorted({row["depth"] for row in rows})
    lines = [
        {
            "label": f"{_label(row)}, depth {row['depth']}",
            "color": labels.index(_label(row)),
            "style": depths.index(row["depth"]),
            **{name: row[name] for name in PROFILES},
        }
        for row in rows
    ]
    seeds = rows[0]["seeds"]
    title = "At initialisation, " + ("one seed" if seeds == 1 else f"mean of {seeds} seeds")
    data = {"title": title, "profiles": PROFILES, "lines": lines, "light": COLORS, "dark": DARK_COLORS}
    write_html(path, page(title, BODY, data, [*CHART, Path(__file__).parent / "assets" / "propagation.js"]))


def slope(depths: list[int], values: list[float]) -> float:
    """Return the growth exponent: the least-squares slope of log(value) over log(depth)."""
    x, y = np.log(depths), np.log(values)
    return float(np.polyfit(x, y, 1)[0])
