"""How long `normlab compare` takes over 200 runs of 2,000 points, how large its page is, how soon it shows a picture.

    python scripts/bench_compare.py            # a minute or two on two CPU cores
    python scripts/bench_compare.py --check    # exit 1 above a bar: 15 s to write, 12 MB, 3 s to the first picture

The folders are those of `records.py`, with statistics: five norms, two placements, two depths, two learning rates, five
seeds; one in fifty diverged, one in ten has a spike. They are not trained: what reading and drawing cost does not
depend on what the numbers are.

Every time to write is that of a fresh process, from its start to its end, as a shell sees it. The first picture's is
that of a fresh browser, from the start of the navigation until the page's own mark `first-picture`, which it sets when
its first picture is drawn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_summarize import time_once
from playwright.sync_api import Error, sync_playwright
from records import Record, write_sweep

from normlab.report.pages.browser import FLAGS, find_browser
from normlab.store.schema import DIVERGED, FINISHED

NORMS = ("rmsnorm", "layernorm", "batchnorm", "dyt", "scalenorm")
PLACEMENTS = ("pre", "post")
DEPTHS = (4, 8)
RATES = (1e-3, 3e-3)
SEEDS = 5
STEPS = 2000
MB = 10**6
PATIENCE_S = 60
"""How long a page may take to its first picture before it is held to have none."""

WRITE, SIZE, PICTURE = "written, s", "size, MB", "first picture, s"
BARS = {WRITE: 15.0, SIZE: 12.0, PICTURE: 3.0}
"""Of the medians."""


def records() -> list[Record]:
    """The 200 runs."""
    grid = itertools.product(range(SEEDS), RATES, DEPTHS, PLACEMENTS, NORMS)
    return [
        Record(
            norm=norm, placement=placement, depth=depth, lr=lr, seed=seed, steps=STEPS,
            outcome=DIVERGED if index % 50 == 49 else FINISHED,
            spike_at=STEPS // 3 if index % 10 == 5 else None,
        )
        for index, (seed, lr, depth, placement, norm) in enumerate(grid)
    ]  # fmt: skip


def first_picture(page: Path, program: str) -> float:
    """Seconds from the start of the navigation until a fresh browser has drawn the page's first picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        tab = context.new_page()
        told: list[str] = []
        tab.on("pageerror", lambda error: told.append(str(error)))
        try:
            tab.goto(page.as_uri(), timeout=PATIENCE_S * 1000)
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:  # asked from outside: the page's policy lets nobody wait inside it
                if marks := tab.evaluate("performance.getEntriesByName('first-picture').map((mark) => mark.startTime)"):
                    return marks[0] / 1000
                tab.wait_for_timeout(50)
            raise SystemExit(f"{page}: no first picture in {PATIENCE_S} s ({'; '.join(told) or 'no error was told'})")
        except Error as error:
            raise SystemExit(f"{page}: cannot be opened ({error.message.splitlines()[0]})") from error
        finally:
            browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="fresh processes, and fresh browsers (3)")
    parser.add_argument("--check", action="store_true", help="exit 1 above a bar")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        raise SystemExit("there is no browser: apt-get install chromium")

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        since, runs = time.perf_counter(), records()
        sweep, page = write_sweep(Path(folder), "bench", runs), Path(folder, "page.html")
        told = f"{len(runs)} runs of {STEPS} points with statistics"
        print(f"{told}, written in {time.perf_counter() - since:.0f} s", flush=True)
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        seen: dict[str, list[float]] = {what: [] for what in BARS}
        for _ in range(options.times):
            seen[WRITE].append(time_once(["compare", str(sweep), "-o", str(page)]))
            seen[SIZE].append(page.stat().st_size / MB)
        for _ in range(options.times):
            seen[PICTURE].append(first_picture(page, program))

    print(f"\n{'normlab compare':20} {'least':>7} {'median':>7} {'bar':>5}")
    kept = True
    for what, values in seen.items():
        median = statistics.median(values)
        kept &= median <= BARS[what]
        verdict = "kept" if median <= BARS[what] else "NOT KEPT"
        print(f"{what:20} {min(values):7.2f} {median:7.2f} {BARS[what]:5g}  {verdict}")
    return int(options.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
