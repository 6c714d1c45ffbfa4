"""The sweep of the tests of the comparison page, and functions that read the page in a browser."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from synthetic_runs import Record

from normlab.store.format import DIVERGED
from normlab.store.outcome import STUCK

STEPS = 400
BY = "norm,placement,model.depth"
FIGURES = ("factor", "curves", "rates", "matrix", "gradients", "layers")


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
    """Wait until the page has all figures; record what each of them draws from then on."""
    # `wait_for_function` evaluates text, which the page's policy forbids.
    page.evaluate("""async () => {
      while (document.documentElement.dataset.ready !== 'yes') await new Promise((resume) => setTimeout(resume, 20));
      globalThis.drawings = new Map();
      for (const name of ['drawLines', 'drawGrid']) {
        const draw = name === 'drawLines' ? drawLines : drawGrid;
        const record = (place, spec) => {
          drawings.set(place.closest('.chart').dataset.figure, spec);
          draw(place, spec);
        };
        if (name === 'drawLines') drawLines = record;
        else drawGrid = record;
      }
      for (const figure of FIGURES) drawNow(figure);
    }""")
    return page


def open_table(page, table: str) -> None:
    """Open a table of the page, and wait for its rows: the browser sends `toggle` some time after the click."""
    page.locator(f"#{table} summary").click()
    page.locator(f"#{table} tbody tr").first.wait_for()


def drawn(page, figure: str) -> dict[str, Any]:
    """Return what a figure draws."""
    return page.evaluate(
        """(name) => {
          drawNow(FIGURES.find((figure) => figure.element.dataset.figure === name));
          return JSON.parse(JSON.stringify(drawings.get(name)));
        }""",
        figure,
    )


def points(page, figure: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the points of each line of a figure, by the title of the panel and the label of the line."""
    return {
        (panel["title"], line["label"]): line["points"]
        for panel in drawn(page, figure)["panels"]
        for line in panel["lines"]
    }


def overlapping_texts(page) -> list[str]:
    """Return the pairs of horizontal texts of a panel that overlap by more than the space between two lines."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.panel svg[role=img]')].flatMap((panel) => {
          const texts = [...panel.querySelectorAll('text:not([transform])')]
            .map((text) => [text.textContent, text.getBoundingClientRect()]);
          const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
          const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
          return texts.flatMap(([text, a], i) => texts.slice(i + 1)
            .filter(([, b]) => across(a, b) > 3 && down(a, b) > 5)
            .map(([other]) => `${panel.closest('.chart').dataset.figure}: ${text} | ${other}`));
        })"""
    )
