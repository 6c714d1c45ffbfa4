"""The sweep of the tests of the comparison page, and functions that read the page in a browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from synthetic_runs import Record

from normlab.store.format import DIVERGED
from normlab.store.outcome import STUCK

STEPS = 400
BY = "norm,placement,model.depth"
SECTIONS = ("losses", "curves", "rates", "matrix", "profiles", "heatmaps", "signatures")
DIVERGING = {"norm": "rmsnorm", "placement": "post", "depth": 4, "lr": 1e-2, "seed": 1}


def grid() -> list[Record]:
    """24 runs in eight cells: two learning rates at depth 4, one at depth 8, two seeds; one diverges, one spikes."""
    runs = []
    for norm in ("layernorm", "rmsnorm"):
        for placement in ("pre", "post"):
            for depth, lr in ((4, 1e-3), (4, 1e-2), (8, 1e-3)):
                for seed in (0, 1):
                    options = {"norm": norm, "placement": placement, "depth": depth, "lr": lr, "seed": seed}
                    more: dict[str, Any] = {}
                    if options == DIVERGING:
                        more = {"outcome": DIVERGED, "at": 250}
                    elif (norm, placement, lr, seed) == ("layernorm", "post", 1e-2, 0):
                        more = {"outcome": STUCK}
                    elif (norm, placement, depth, lr, seed) == ("rmsnorm", "pre", 4, 1e-3, 0):
                        more = {"spike_at": 301}
                    runs.append(Record(steps=STEPS, **options, **more))
    return runs


def normlab(*arguments: str) -> str:
    """Return what a command prints."""
    process = subprocess.run([sys.executable, "-m", "normlab", *arguments], capture_output=True, text=True, check=True)
    return process.stdout


def ready(page):
    # `wait_for_function` evaluates text, which the page's policy forbids.
    page.evaluate("""async () => {
      while (document.documentElement.dataset.ready !== 'yes') await new Promise((resume) => setTimeout(resume, 20));
    }""")
    return page


def drawn(page, section: str) -> dict[str, Any]:
    """Scroll to a figure and return its traces, layout, caption and message."""
    page.locator(f"[data-figure={section}]").scroll_into_view_if_needed()
    return page.evaluate(
        """async (section) => {
          const figure = FIGURES.find((figure) => figure.section === section);
          while (figure.dirty) await new Promise((resume) => setTimeout(resume, 20));
          const plain = (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
          await figure.drawn;
          const {drawing, plot, caption} = figure;
          const content = drawing.empty ? {data: [], layout: {}} : {data: plot.data, layout: plot.layout};
          return {...JSON.parse(JSON.stringify(content, plain)), empty: drawing.empty, caption: caption.textContent};
        }""",
        section,
    )


def lines(page, section: str = "curves", kind: str | None = None) -> list[dict[str, Any]]:
    """Return the named lines of a figure."""
    return [
        trace
        for trace in drawn(page, section)["data"]
        if "lines" in trace.get("mode", "") and trace.get("meta") and kind in (None, trace["meta"]["columns"][1])
    ]


def saved(page, section: str, button: str) -> bytes:
    """Return the file that a figure's button downloads."""
    figure = page.locator(f"[data-figure={section}]")
    figure.scroll_into_view_if_needed()
    with page.expect_download() as download:
        figure.get_by_role("button", name=button, exact=True).click()
    return Path(download.value.path()).read_bytes()
