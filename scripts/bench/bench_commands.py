"""Time the commands that read: help, lists, and `summarize` and `compare` on 1,000 runs of 2,000 steps.

    python scripts/bench/bench_commands.py            # some minutes on two CPU cores
    python scripts/bench/bench_commands.py --check    # exit 1 above a limit

The runs are those of `synthetic_runs.py`; the times to read and draw numbers do not depend on their values. Every time
is the wall time of a new process, and the commands take turns. The limits apply to the minimum, since other programs
can only add time. With a browser, also the time from the navigation to the page's mark `first-picture`, which the page
sets when it has drawn its first figure.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from browser import FLAGS, find_browser
from playwright.sync_api import sync_playwright
from synthetic_runs import Record, write_sweep
from turns import table

from normlab.store.format import DIVERGED, FINISHED

GRID = {
    "seed": range(5), "lr": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "warmup_steps": (0, 50), "depth": (4, 8),
    "placement": ("pre", "post"), "norm": ("rmsnorm", "layernorm", "batchnorm", "dyt", "scalenorm"),
}  # fmt: skip
STEPS = 2000
LIMITS = {"--help": 0.2, "summarize": 1.5, "compare": 30.0, "first figure": 3.0, "page, MB": 20.0}
"""Limits of the minimum; seconds unless the name says otherwise."""


def records(count: int) -> list[Record]:
    """Return some runs of the grid; one in fifty diverged, one in ten has a spike."""
    choices = itertools.islice(itertools.product(*GRID.values()), count)
    return [
        Record(
            **dict(zip(GRID, values, strict=True)), steps=STEPS, outcome=DIVERGED if index % 50 == 49 else FINISHED,
            spike_at=STEPS // 3 if index % 10 == 5 else None,
        )
        for index, values in enumerate(choices)
    ]  # fmt: skip


def seconds_of(arguments: list[str]) -> float:
    """Return the seconds of a new process, which must succeed."""
    script = Path(sys.executable).with_name("normlab")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "normlab"]
    start = time.perf_counter()
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"normlab {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    return time.perf_counter() - start


def first_figure(page: Path, program: str) -> float:
    """Return the seconds from the navigation to the first figure, in a new browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        tab = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True).new_page()
        tab.goto(page.as_uri())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # polled, since the page's content policy forbids waiting inside it
            if marks := tab.evaluate("performance.getEntriesByName('first-picture').map((mark) => mark.startTime)"):
                return marks[0] / 1000
            tab.wait_for_timeout(50)
    raise SystemExit(f"{page}: no first figure in a minute")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=5, help="processes for each command (default: 5)")
    parser.add_argument("--runs", type=int, default=1000, help="number of runs (default: 1000)")
    parser.add_argument("--check", action="store_true", help="exit 1 above a limit")
    options = parser.parse_args()
    program = find_browser()
    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        sweep, page = str(write_sweep(Path(folder), "bench", records(options.runs))), Path(folder, "page.html")
        print(f"{options.runs} runs of {STEPS} steps; load before: {os.getloadavg()[0]:.1f}", flush=True)
        commands = {
            "--help": ["--help"],
            "list norms": ["list", "norms"],
            "summarize --runs": ["summarize", sweep, "--runs"],
            "summarize": ["summarize", sweep],
            "summarize --against": ["summarize", sweep, "--against", "norm=layernorm"],
            "compare": ["compare", sweep, "-o", str(page)],
        }
        measured: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(options.times):
            for label, arguments in commands.items():
                measured[label].append(seconds_of(arguments))
            if program is not None:
                measured.setdefault("first figure", []).append(first_figure(page, program))
        measured["page, MB"] = [page.stat().st_size / 1e6]
    slow = {label for label, limit in LIMITS.items() if min(measured.get(label, [0.0])) > limit}
    columns = {"command": "normlab", "min": "min", "median": "median", "limit": "limit", "mark": ""}
    rows = [
        {
            "command": label, "min": min(values), "median": sorted(values)[len(values) // 2],
            "limit": LIMITS.get(label), "mark": "TOO SLOW" if label in slow else "",
        }
        for label, values in measured.items()
    ]  # fmt: skip
    print(table(rows, columns))
    return int(options.check and bool(slow))


if __name__ == "__main__":
    sys.exit(main())
