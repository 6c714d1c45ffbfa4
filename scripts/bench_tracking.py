#!/usr/bin/env python3
"""Measure what W&B costs a run: the speed while the follower works, against the speed while it is frozen.

    scripts/bench_tracking.py [OVERRIDES]       # default: a model of 4 layers, width 128

One run trains, and the follower sends it to an imitation of W&B's server in a process of its own. In every second turn
of `train.log_every` steps, all processes of the follower are frozen. What they miss, they do in the next turn, so the
ratio is a lower bound. The two turns of a pair follow each other; the script prints the median and the quartiles of the
ratios of the pairs. It exits with 1 if the median is below 0.99, or if the follower did not send the whole run.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normlab.config.compose import compose_run
from normlab.openmp import limit_spinning
from normlab.tracking.background import Task, start_follower

ROOT = Path(__file__).resolve().parents[1]
SERVER = (
    "from support.wandb_server import Server\nwith Server() as s: print(s.server_port, flush=True); s.serve_forever()"
)
TURNS = 122
BAR = 0.99
WARM_UP = 2
"""Turns without a measurement, in which the follower starts."""


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
        self._start = 0.0
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
        elif self.turns > WARM_UP:
            self.seconds[self.turns % 2].append(now - self._start)
        self.turns += 1
        os.killpg(self.follower.pid, signal.SIGSTOP if self.turns % 2 else signal.SIGCONT)
        self._start = time.perf_counter()

    def log_statistics(self, profiles: object) -> None:
        """Do nothing."""

    def finish(self, status: object) -> None:
        """Let the follower end."""
        del status
        os.killpg(self.follower.pid, signal.SIGCONT)


def main() -> int:
    """Run the bench, print the table, and return the exit code."""
    limit_spinning()
    from normlab.training.run import train

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
        with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{int(server.stdout.readline())}"
            os.environ["WANDB_API_KEY"] = "a" * 40
            freezer = Freezer(Path(folder))
            try:
                config = compose_run([
                    "model.depth=4", "model.width=128", "model.heads=4", *sys.argv[1:], f"results_dir={folder}",
                    f"train.steps={TURNS * 10}", "train.log_every=10", "eval.every=0", "train.checkpoint_every=0",
                    "tracking.wandb=off", "eval.sequences=4",
                ])  # fmt: skip
                train(config, trackers=[freezer])
                printed = freezer.follower.communicate(timeout=600)[1].strip()
            finally:
                server.kill()
    frozen, working = freezer.seconds[1], freezer.seconds[0]
    ratios = [off / on for off, on in zip(frozen, working, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    speed = 1000 * statistics.median(working) / 10
    print(f"{len(ratios)} pairs of 10 steps, {speed:.1f} ms/step with the follower")
    print(f"speed with the follower / without: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    print(printed)
    return int(middle < BAR or freezer.follower.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
