"""The sweep of the tests of the comparison page, and functions that read the page in a browser."""

import subprocess
import sys
from typing import Any

from synthetic_runs import Record

from normlab.store.format import DIVERGED
from normlab.store.outcome import STUCK

STEPS = 400
FIGURES = ("factor", "loss", "lr", "layers")


def grid() -> list[Record]:
    """36 runs in eight cells: two learning rates at depth 4, one at depth 8; one run diverges, one is stuck."""
    runs = []
    for norm in ("layernorm", "rmsnorm"):
        for placement in ("pre", "post"):
            for depth, lr in ((4, 1e-3), (4, 1e-2), (8, 1e-3)):
                for seed in (0, 1, 2):
                    options = {"norm": norm, "placement": placement, "depth": depth, "lr": lr, "seed": seed}
                    more: dict[str, Any] = {}
                    if (norm, placement, depth, lr, seed) == ("rmsnorm", "post", 8, 1e-3, 1):
                        more = {"outcome": DIVERGED, "at": 250}
                    elif (norm, placement, lr, seed) == ("layernorm", "post", 1e-2, 0):
                        more = {"outcome": STUCK}
                    runs.append(Record(steps=STEPS, **options, **more))
    return runs


def normlab(*arguments: str) -> str:
    """Return what a command prints."""
    process = subprocess.run([sys.executable, "-m", "normlab", *arguments], capture_output=True, text=True, check=True)
    return process.stdout


def ready(page):
    """Wait until the page is complete, and draw all figures."""
    # `wait_for_function` evaluates text, which the page's policy forbids.
    page.evaluate("""async () => {
      while (document.documentElement.dataset.ready !== 'yes') await new Promise((resume) => setTimeout(resume, 20));
      for (const figure of FIGURES.values()) drawNow(figure);
    }""")
    return page


def open_table(page, table: str) -> None:
    """Open a table of the page, and wait for its rows: the browser sends `toggle` some time after the click."""
    page.locator(f"#{table} summary").click()
    page.locator(f"#{table} tbody tr").first.wait_for()


def lines_of(data: dict[str, Any], figure: str, statistic: str = "") -> dict[tuple[str, str], list]:
    """Return the points of a figure of the page's data, by the title of the panel and the label of the line."""
    (spec,) = [spec for spec in data["figures"] if spec["id"] == figure]
    return {
        (panel["title"], data["lines"][line[0]][0]): line[1]
        for panel in spec["variants"][statistic]["panels"]
        for line in panel["lines"]
    }
