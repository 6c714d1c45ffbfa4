"""Time `normlab compare` and `summarize` on 1,000 runs of 2,000 steps, and measure the page.

    python scripts/bench_compare.py            # some minutes on two CPU cores
    python scripts/bench_compare.py --check    # exit 1 above a limit

The folders are those of `synthetic_runs.py`, with statistics: five norms, two placements, two depths, two warm-ups,
five rates, five seeds; one in fifty diverged, one in ten has a spike. The runs are not trained, since the times to read
and draw numbers do not depend on them.

Every time of a command is the wall time of a new process. The time to the first figure runs in a new browser from the
start of the navigation to the page's mark `first-picture`, which the page sets when it has drawn its first figure. The
time of a control is from the event to the next frame, with every figure in view drawn again.
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
from browser import FLAGS, find_browser
from playwright.sync_api import Error, sync_playwright
from synthetic_runs import Record, write_sweep

from normlab.cgroup import allowed_cores
from normlab.store.format import DIVERGED, FINISHED

NORMS = ("rmsnorm", "layernorm", "batchnorm", "dyt", "scalenorm")
PLACEMENTS = ("pre", "post")
DEPTHS = (4, 8)
WARMUPS = (0, 50)
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = 5
STEPS = 2000
MB = 10**6
TIMEOUT_S = 60
"""The time limit for the first figure."""

WRITE, SUMMARIZE, SIZE, PICTURE = "compare, s", "summarize, s", "page, MB", "first figure, s"
LIMITS = {WRITE: 30.0, SUMMARIZE: 2.0, SIZE: 20.0, PICTURE: 3.0}
"""Limits of the medians."""
CONTROL_LIMIT = 0.2
"""The limit of the median of each control, seconds."""
CONTROLS = {
    "hide a line": "document.querySelector('.legend button').click()",
    "another curve": "choose('[data-figure=loss] select', 'train_loss')",
    "another statistic": "choose('[data-figure=layers] select', 'attn_rms')",
}
"""What a user does, as statements of JavaScript."""
TIMED = """async () => {
  const choose = (selector, value) => {
    const element = document.querySelector(selector);
    element.value = value;
    element.dispatchEvent(new Event('change'));
  };
  const start = performance.now();
  ACTION;
  await new Promise((resume) => requestAnimationFrame(() => setTimeout(resume)));
  return performance.now() - start;
}"""


def records() -> list[Record]:
    """Return the 1,000 runs."""
    grid = itertools.product(range(SEEDS), RATES, WARMUPS, DEPTHS, PLACEMENTS, NORMS)
    return [
        Record(
            norm=norm, placement=placement, depth=depth, lr=lr, seed=seed, warmup_steps=warmup, steps=STEPS,
            outcome=DIVERGED if index % 50 == 49 else FINISHED,
            spike_at=STEPS // 3 if index % 10 == 5 else None,
        )
        for index, (seed, lr, warmup, depth, placement, norm) in enumerate(grid)
    ]  # fmt: skip


def page_times(page: Path, program: str) -> tuple[float, dict[str, float]]:
    """Return the seconds from the navigation to the first figure, in a new browser, and of each control."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        tab = context.new_page()
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        try:
            tab.goto(page.as_uri(), timeout=TIMEOUT_S * 1000)
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:  # polled, since the page's content policy forbids waiting inside it
                if marks := tab.evaluate("performance.getEntriesByName('first-picture').map((mark) => mark.startTime)"):
                    break
                tab.wait_for_timeout(50)
            else:
                raise SystemExit(
                    f"{page}: no first figure in {TIMEOUT_S} s ({'; '.join(errors) or 'no error on the console'})"
                )
            at, height = 0, tab.evaluate("document.body.scrollHeight")
            while at < height:  # every figure is drawn once
                tab.evaluate("at => window.scrollTo(0, at)", at)
                tab.wait_for_timeout(200)
                at += 400
            tab.evaluate("document.querySelector('#figures').scrollIntoView()")
            tab.wait_for_timeout(300)
            return marks[0] / 1000, {
                name: tab.evaluate(TIMED.replace("ACTION", action)) / 1000 for name, action in CONTROLS.items()
            }
        except Error as error:
            raise SystemExit(f"{page}: cannot be opened ({error.message.splitlines()[0]})") from error
        finally:
            browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="processes and browsers (default: 3)")
    parser.add_argument("--check", action="store_true", help="exit 1 above a limit")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        raise SystemExit("no browser found; install one: apt-get install chromium")

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        start, runs = time.perf_counter(), records()
        sweep, page = write_sweep(Path(folder), "bench", runs), Path(folder, "page.html")
        text = f"{len(runs)} runs of {STEPS} points with statistics"
        print(f"{text}, written in {time.perf_counter() - start:.0f} s", flush=True)
        print(f"load before: {os.getloadavg()[0]:.1f} on {allowed_cores()} cores", flush=True)
        measured: dict[str, list[float]] = {what: [] for what in LIMITS}
        for _ in range(options.times):
            measured[WRITE].append(time_once(["compare", str(sweep), "-o", str(page)]))
            measured[SIZE].append(page.stat().st_size / MB)
            measured[SUMMARIZE].append(time_once(["summarize", str(sweep)]))
        for _ in range(options.times):
            first, controls = page_times(page, program)
            measured[PICTURE].append(first)
            for name, seconds in controls.items():
                measured.setdefault(f"{name}, s", []).append(seconds)

    print(f"\n{'normlab compare':22} {'min':>7} {'median':>7} {'limit':>5}")
    passed = True
    for what, values in measured.items():
        median, limit = statistics.median(values), LIMITS.get(what, CONTROL_LIMIT)
        passed &= median <= limit
        verdict = "ok" if median <= limit else "ABOVE THE LIMIT"
        print(f"{what:22} {min(values):7.2f} {median:7.2f} {limit:5g}  {verdict}")
    return int(options.check and not passed)


if __name__ == "__main__":
    sys.exit(main())
