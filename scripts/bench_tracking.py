#!/usr/bin/env python3
"""Measure what W&B costs a run: the speed while the follower works, against the speed while it is frozen.

    scripts/bench_tracking.py [OVERRIDES]       # default: a model of 4 layers, width 128

One run trains, and the follower sends it to an imitation of W&B's server in a process of its own. In every second turn
of 60 steps, all processes of the follower are frozen. A working turn sends the rows of two turns, so the cost of a turn
is half of the difference between the two. Work that follows the clock (looking for new rows; W&B's process sends, here
every second instead of every 15 s) is not doubled; it is a small part. A lower bound counts the whole difference. Both
ratios of the speeds are medians over pairs of successive turns, with 95 % bootstrap intervals.

Two other figures do not depend on the noise of the machine: the processor time of the follower, and the time that the
training's threads were ready to run and waited for a core. The sum over the threads is at least what the follower takes
from the training by its use of the cores; what it takes by its use of the caches is not in it.

The script exits with 1 if the first ratio is below 0.99, or if the follower did not send the whole run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from normlab.config.compose import compose_run
from normlab.openmp import limit_spinning
from normlab.tracking.background import Task, start_follower
from normlab.tracking.uploads import Upload

ROOT = Path(__file__).resolve().parents[1]
SERVER = (
    "from support.wandb_server import Server\nwith Server() as s: print(s.server_port, flush=True); s.serve_forever()"
)
STEPS = 60
"""Of a turn."""
TURNS = 162
BAR = 0.99
WARM_UP = 2
"""Turns without a measurement, in which the follower starts."""


def descendants(process: int) -> list[int]:
    """Return the id of a process and those of its children, of their children, and so on."""
    found = [process]
    for parent in found:
        with suppress(OSError):
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, path.read_text().split())
    return found


def processor_time(processes: list[int]) -> float:
    """Return the processor time of processes, seconds."""
    ticks = 0
    for process in processes:
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user and in kernel mode
    return ticks / os.sysconf("SC_CLK_TCK")


def waiting_time() -> float:
    """Return the time that this process's threads were ready to run and waited for a core, their sum in seconds."""
    waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):
            waited += int(path.read_text().split()[1])
    return waited / 1e9


class Freezer:
    """A tracker that starts the follower and freezes it in every second turn.

    Args:
        results: The folder of the results.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self.turns = 0
        self.seconds: tuple[list[float], list[float]] = ([], [])
        """Of the turns with and without the follower."""
        self.waited = [0.0, 0.0]
        """Time that the training's threads waited for a core in these turns, seconds."""
        self.processor_s = 0.0
        """Processor time of the follower during these turns."""
        self._start = 0.0
        self._waited = 0.0
        self.follower: subprocess.Popen[str]

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Start the follower."""
        del first_step
        task = Task(runs=[self.results / "runs" / run["run_id"]], service="online", process=os.getpid())
        self.follower = start_follower(task)

    def log(self, rows: Any) -> None:
        """End a turn, if these are the rows of an interval, and start the next."""
        if rows[0]["kind"] != "train":
            return
        now = time.perf_counter()
        if self.turns == WARM_UP:
            time.sleep(20)  # the follower imports wandb and connects
            self.processor_s = -processor_time(descendants(self.follower.pid))
        elif self.turns > WARM_UP:
            self.seconds[self.turns % 2].append(now - self._start)
            self.waited[self.turns % 2] += waiting_time() - self._waited
        self.turns += 1
        for process in descendants(self.follower.pid):
            os.kill(process, signal.SIGSTOP if self.turns % 2 else signal.SIGCONT)
        self._start, self._waited = time.perf_counter(), waiting_time()

    def finish(self, status: object) -> None:
        """Let the follower end."""
        del status
        self.processor_s += processor_time(descendants(self.follower.pid))
        for process in descendants(self.follower.pid):
            os.kill(process, signal.SIGCONT)


def main() -> int:
    """Run the bench, print the table, and return the exit code."""
    limit_spinning()
    from normlab.training.start import train

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
        with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{int(server.stdout.readline())}"
            os.environ["WANDB_API_KEY"] = "a" * 40
            os.environ["WANDB__FILE_STREAM_TRANSMIT_INTERVAL"] = "1"
            freezer = Freezer(Path(folder))
            try:
                config = compose_run([
                    "model.depth=4", "model.width=128", "model.heads=4", *sys.argv[1:], f"results_dir={folder}",
                    f"train.steps={TURNS * STEPS}", f"train.log_every={STEPS}", "eval.every=0",
                    "train.checkpoint_every=0", "tracking.wandb=off", "eval.sequences=4",
                ])  # fmt: skip
                folder_of_run = train(config, trackers=[freezer]).folder.path
                freezer.follower.wait(timeout=600)
                upload = Upload.read(folder_of_run, "online")
            finally:
                with suppress(AttributeError, OSError):
                    freezer.follower.kill()
                server.kill()
    pairs = np.array(list(zip(*freezer.seconds, strict=False)))  # working, frozen
    ratios = np.stack([pairs[:, 1] / pairs.mean(axis=1), pairs[:, 1] / pairs[:, 0]])
    chosen = np.random.default_rng(0).integers(len(pairs), size=(10_000, len(pairs)))
    low, high = np.quantile(np.median(ratios[:, chosen], axis=2), [0.025, 0.975], axis=1)
    medians = np.median(ratios, axis=1)
    print(f"{len(pairs)} pairs of {STEPS} steps, {1000 * pairs[:, 0].mean() / STEPS:.1f} ms/step with the follower")
    for index, title in enumerate(["speed with the follower / without", "lower bound"]):
        print(f"{title}: {medians[index]:.3f} (95 % interval {low[index]:.3f} to {high[index]:.3f})")
    working, frozen = (waited / sum(turns) for waited, turns in zip(freezer.waited, freezer.seconds, strict=True))
    print(f"waiting for a core of the training's threads: {working:.2%} of the time with, {frozen:.2%} without")
    print(f"speed with the follower / without, by this waiting: at least {1 - (working - frozen) / 2:.3f}")
    total = sum(map(sum, freezer.seconds))
    print(f"processor time of the follower: {100 * freezer.processor_s / total:.1f} % of one core, in {total:.0f} s")
    print(f"not sent: {upload.problem}" if upload.problem else "sent: all steps")
    return int(medians[0] < BAR or upload.problem != "")


if __name__ == "__main__":
    sys.exit(main())
