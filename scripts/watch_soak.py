"""Watch a real sweep in a real browser: measure the delays of its points, and the memory of both sides.

    python scripts/watch_soak.py                  # about three minutes on two CPU cores
    python scripts/watch_soak.py --steps 34000    # about ten minutes

`normlab sweep --watch` trains six small runs, of which two have a learning rate at which they diverge; the worker of
the third run is killed with SIGKILL in the middle of it. The delay of a step is the time from the first look at the
metrics that finds its row to the first look at the page that finds its point, with a look at both every 0.2 s. Rows are
written at every step. A curve of the page has at most `MAX_POINTS` points, so a point may be the mean of a few steps,
at their middle.

Exits with 1 if a delay is above five seconds, if no run diverged, if no worker was killed, if the page was reloaded, or
if the memory of one side grows by more than a quarter in the second half.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from browser import FLAGS, find_browser
from playwright.sync_api import sync_playwright

from normlab.report.figure_points import MAX_POINTS
from normlab.store.query import find_runs
from normlab.store.reading import read_last_row

LIMIT_S = 5.0
LOOK_EVERY_MS = 200
LARGEST_GROWTH = 1.25
"""Largest ratio of the memory at the end to that in the middle."""
KILLED_RUN = 3
"""Number of the run, from 1, whose worker is killed."""
SHOWN = """() => {
  const at = DATA.run_table.columns.indexOf('step');
  return DATA.run_table.rows.map(({id, values}) => [id, Number(values[at].replaceAll(',', '')) - 1]);
}"""
"""The last step of each run on the page: a row counts steps from 0, the table completed steps."""


def resident_mib(process: int) -> float:
    """Return the resident memory of a process, MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def children(process: int) -> list[int]:
    """Return the ids of the children of a process."""
    return [
        int(child) for path in Path(f"/proc/{process}/task").glob("*/children") for child in path.read_text().split()
    ]


def steps(results: Path) -> dict[str, int]:
    """Return the last recorded step of each run that trains."""
    rows = {run.run_id: read_last_row(run.folder.metrics_path) for run in find_runs(results) if run.state == "running"}
    # The step of a training row counts from 0; the step of any other row is the number of updates so far.
    return {run_id: int(row["step"]) - (row.get("kind") != "train") for run_id, row in rows.items() if row}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=9000, help="steps of each run")
    steps_each = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        sweep = subprocess.Popen(
            [sys.executable, "-m", "normlab", "sweep", "model=gpt2_nano", "optim.lr=1e-3,3e-3,3e4",
             "seed=0,1", f"train.steps={steps_each}", "train.log_every=1", "sweep.pack=off", "sweep.jobs=1",
             "tracking.wandb=off", "sweep.name=soak", f"results_dir={results}", "--watch"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            return watch(sweep, results, steps_each)
        finally:
            sweep.terminate()
            sweep.wait()


def watch(sweep: subprocess.Popen[str], results: Path, steps_each: int) -> int:
    """Watch a sweep until it ends, print the delays and the memory, and return the exit code."""
    waiting: dict[tuple[str, int], float] = {}
    delays: list[float] = []
    unseen: list[float] = []
    memory: list[tuple[float, float, float]] = []
    killed = False
    lines = iter(sweep.stdout or ())
    address = next((word for line in lines for word in line.split() if word.startswith("http://")), None)
    if address is None:
        print("the sweep printed no address")
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.goto(address)
        page.evaluate("globalThis.isSamePage = true")
        heap = page.context.new_cdp_session(page)
        started = time.monotonic()
        server = children(sweep.pid)[0]  # before the worker
        while sweep.poll() is None:
            now = time.monotonic()
            last_steps = steps(results)
            for run_id, step in last_steps.items():
                waiting.setdefault((run_id, step), now)
            shown = dict(page.evaluate(SHOWN))
            now = time.monotonic()
            for key in [key for key in waiting if shown.get(key[0], -1) >= key[1] - (key[1] // MAX_POINTS) / 2]:
                delays.append(now - waiting.pop(key))
            for key in [key for key in waiting if key[0] not in last_steps]:  # the run has ended
                unseen.append(now - waiting.pop(key))
            if now - started >= 10 * len(memory):
                heap.send("HeapProfiler.collectGarbage")
                used = heap.send("Runtime.getHeapUsage")["usedSize"] / 2**20
                memory.append((now - started, resident_mib(server), used))
            is_half_trained = any(step > steps_each / 2 for step in last_steps.values())
            if not killed and is_half_trained and len(find_runs(results)) == KILLED_RUN:
                os.kill(children(sweep.pid)[-1], signal.SIGKILL)
                killed = True
            page.wait_for_timeout(LOOK_EVERY_MS)
        unseen += [time.monotonic() - first_look for first_look in waiting.values()]
        states = page.evaluate("DATA.run_table.rows.map((run) => run.state)")
        is_same = page.evaluate("globalThis.isSamePage === true")
        browser.close()
    print(f"{time.monotonic() - started:.0f} s, states in the page at the end: {', '.join(states)}")
    largest, median = max(delays, default=math.inf), statistics.median(delays or [math.inf])
    print(
        f"delay from a step's record to its point: {len(delays)} steps, median {median:.2f} s, largest {largest:.2f} s"
    )
    oldest = max(unseen, default=0.0)
    print(f"steps whose run ended before their point was seen: {len(unseen)}; the oldest had waited {oldest:.2f} s")
    for name, index in (("start", 0), ("middle", len(memory) // 2), ("end", -1)):
        at, resident, used = memory[index]
        print(f"{name:6} at {at:4.0f} s: server {resident:.1f} MiB, heap of the page {used:.2f} MiB")
    _, *middle = memory[len(memory) // 2]
    _, *end = memory[-1]
    has_grown = any(last > LARGEST_GROWTH * half for half, last in zip(middle, end, strict=True))
    return int(max(largest, oldest) > LIMIT_S or has_grown or "diverged" not in states or not killed or not is_same)


if __name__ == "__main__":
    sys.exit(main())
