"""Time the start-up of `normlab`: help, lists, a summary of 200 runs, a run of one step.

    python scripts/bench_startup.py            # one to two minutes on two CPU cores
    python scripts/bench_startup.py --check    # exit 1 above the limits: 0.2 s for the help, 1 s for the summary

Every time is the wall time of a new process: the minimum and the median of ten, with the commands in turns so that a
busy minute affects all of them. `CPU` is the median CPU time. The limits apply to the minimum, since other programs
can only add time. `loaded` lists the heavy packages that the command imports.

The runs are real: 200 runs of two steps with several norms, placements, depths, learning rates and seeds, trained in
this process. The first `normlab train` makes the corpus and is not timed.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normlab.cgroup import allowed_cores

HEAVY = ("torch", "wandb", "datasets", "pandas", "hydra", "numpy", "rich", "pydantic", "torch._inductor")
HELP_LIMIT_S, SUMMARY_LIMIT_S = 0.2, 1.0
"""Limits of the minimum."""

PROBE = f"""
import sys
from normlab.cli import main
try:
    main(sys.argv[1:])
finally:
    print(", ".join(name for name in {HEAVY} if name in sys.modules) or "none", file=sys.stderr)
"""


@dataclass(slots=True)
class Command:
    """A command line and its times."""

    label: str
    arguments: Sequence[str]
    times: int
    """The number of processes."""
    limit_s: float | None = None
    """The limit of the minimum."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    loaded: str = ""
    """The heavy packages that it imports."""

    @property
    def failed(self) -> bool:
        """Whether the minimum exceeds the limit."""
        return self.limit_s is not None and min(self.seconds) > self.limit_s

    def measure(self) -> None:
        """Run the command once in a new process, and record its times."""
        script = Path(sys.executable).with_name("normlab")
        normlab = [str(script)] if script.exists() else [sys.executable, "-m", "normlab"]
        cpu, start = children_cpu(), time.perf_counter()
        run([*normlab, *self.arguments])
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(children_cpu() - cpu)

    def find_imports(self) -> None:
        """Run the command once more, and record its heavy imports."""
        self.loaded = run([sys.executable, "-c", PROBE, *self.arguments]).splitlines()[-1]


def run(command: Sequence[str]) -> str:
    """Run a command, which must succeed, and return its stderr."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stderr


def children_cpu() -> float:
    """Return the CPU seconds of finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train_many(results: Path, text: Path, count: int) -> None:
    """Train `count` small runs that differ in norm, placement, depth, learning rate and seed."""
    import torch

    from normlab.config.compose import compose_run
    from normlab.training.start import train

    # A second thread does not speed up such small models, and slows them on a busy machine.
    torch.set_num_threads(1)
    bases = [
        compose_run(
            [
                *("model=gpt2_nano", f"model.depth={depth}", "train.steps=2", "train.batch_size=2"),
                *(f"norm={norm}", f"placement={placement}", "eval.sequences=2", "tracking.wandb=off"),
                *("data=files", f"data.path={text}", f"results_dir={results}"),
            ]
        )
        for norm, placement, depth in (
            ("rmsnorm", "pre", 1),
            ("rmsnorm_llama", "post", 2),
            ("layernorm", "pre", 2),
            ("none", "pre", 1),
        )
    ]
    for number in range(count):
        run = copy.deepcopy(bases[number % len(bases)])
        run.seed = number // len(bases)
        run.optim.lr = 1e-3 * (1 + number % 7)
        train(run, trackers=[])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10, help="processes for each command (default: 10)")
    parser.add_argument("--runs", type=int, default=200, help="runs to summarize (default: 200)")
    parser.add_argument("--check", action="store_true", help="exit 1 above the limits")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        results, text = Path(folder, "results"), Path(folder, "text.txt")
        # Real text, longer than every context and short enough not to dominate the time.
        text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        os.environ["NORMLAB_CACHE"] = str(Path(folder, "cache"))
        print(f"load before: {os.getloadavg()[0]:.1f} on {allowed_cores()} cores", flush=True)

        start = time.perf_counter()
        train_many(results, text, options.runs)
        print(f"{options.runs} runs of two steps trained in {time.perf_counter() - start:.0f} s", flush=True)

        # The corpus is in the cache; another results folder keeps the number of summarised runs.
        train = ["train", "model=gpt2_nano", "train.steps=1", "data=files", f"data.path={text}"]
        train += [f"results_dir={folder}/more", "run.fresh=true"]
        few = max(1, options.times // 3)
        commands = [
            Command("--help", ["--help"], options.times, limit_s=HELP_LIMIT_S),
            Command("--version", ["--version"], options.times),
            Command("list norms", ["list", "norms"], options.times),
            Command("list runs", ["list", "runs", str(results)], options.times),
            Command("summarize", ["summarize", str(results)], options.times, limit_s=SUMMARY_LIMIT_S),
            Command("summarize --format json", ["summarize", str(results), "--format", "json"], options.times),
            Command("train, 1 step, W&B off", [*train, "tracking.wandb=off"], few),
            Command("train, 1 step, W&B offline", [*train, "tracking.wandb=offline"], few),
        ]
        for command in commands:
            command.find_imports()
        for turn in range(options.times):
            for command in commands:
                if turn < command.times:
                    command.measure()

    print(f"\n{'normlab':28} {'min':>7} {'median':>7} {'CPU':>6} {'limit':>5}  loaded")
    for command in commands:
        limit = "" if command.limit_s is None else f"{command.limit_s:.1f}"
        median, cpu = statistics.median(command.seconds), statistics.median(command.cpu_seconds)
        mark = "  TOO SLOW" if command.failed else ""
        times = f"{min(command.seconds):7.3f} {median:7.3f} {cpu:6.2f} {limit:>5}"
        print(f"{command.label:28} {times}  {command.loaded}{mark}")
    print(f"load after: {os.getloadavg()[0]:.1f}")
    return int(options.check and any(command.failed for command in commands))


if __name__ == "__main__":
    sys.exit(main())
