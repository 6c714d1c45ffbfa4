"""How long `normlab` takes to answer: its help, its lists, a summary of 200 runs, and a run of one step.

    python scripts/bench_startup.py            # one to two minutes on two CPU cores
    python scripts/bench_startup.py --check    # exit 1 above the bars: 0.4 s for the help, 1 s for the summary

Every time is that of a fresh process, from its start to its end, as a shell sees it: the least and the median
of ten, the commands in turns, so that a busy minute of the machine falls on all of them. `CPU` is the median
of what the process computed, which waiting for a core does not touch. The bars are held against the least:
other programs can only make it more. `loaded` is what of the heavy packages one more process found among its
modules at the end.

The runs are real ones: 200 trainings of two steps each, of several norms, placements, depths, learning rates
and seeds, in this process. The first `normlab train` makes the corpus and is not timed.
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

HEAVY = ("torch", "wandb", "datasets", "pandas", "hydra", "numpy", "rich", "pydantic", "torch._inductor")
HELP_BAR, SUMMARY_BAR = 0.4, 1.0
"""Seconds."""

PROBE = f"""
import sys
from normlab.cli import main
try:
    main(sys.argv[1:])
finally:
    print(", ".join(name for name in {HEAVY} if name in sys.modules) or "none of them", file=sys.stderr)
"""


@dataclass(slots=True)
class Command:
    """A command line, and the times that it took."""

    label: str
    words: Sequence[str]
    times: int
    """How many processes."""
    bar: float | None = None
    """Seconds that the least may be."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    loaded: str = ""
    """The heavy packages that it loaded."""

    @property
    def failed(self) -> bool:
        """Whether it is above its bar."""
        return self.bar is not None and min(self.seconds) > self.bar

    def measure(self) -> None:
        """Run it once in a fresh process."""
        script = Path(sys.executable).with_name("normlab")
        normlab = [str(script)] if script.exists() else [sys.executable, "-m", "normlab"]
        cpu, since = children_cpu(), time.perf_counter()
        run([*normlab, *self.words])
        self.seconds.append(time.perf_counter() - since)
        self.cpu_seconds.append(children_cpu() - cpu)

    def look(self) -> None:
        """Run it once more to see what it loads."""
        self.loaded = run([sys.executable, "-c", PROBE, *self.words]).splitlines()[-1]


def run(command: Sequence[str]) -> str:
    """Run a command that must succeed, and return what it wrote to stderr."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stderr


def children_cpu() -> float:
    """CPU seconds of the processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train_many(results: Path, text: Path, count: int) -> None:
    """Train `count` small runs that differ in norm, placement, depth, learning rate and seed."""
    import torch

    from normlab.launch import compose_run
    from normlab.train.start import train

    # They are far too small for more, and a second thread only waits where the machine is busy.
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
        train(run, sinks=[])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10, help="fresh processes for each command (10)")
    parser.add_argument("--runs", type=int, default=200, help="runs to summarize (200)")
    parser.add_argument("--check", action="store_true", help="exit 1 above the bars")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        results, text = Path(folder, "results"), Path(folder, "text.txt")
        # Real text, long enough for every context, and short enough not to be what takes the time.
        text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        os.environ["NORMLAB_CACHE"] = str(Path(folder, "cache"))
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)

        since = time.perf_counter()
        train_many(results, text, options.runs)
        print(f"{options.runs} runs of two steps trained in {time.perf_counter() - since:.0f} s", flush=True)

        # The same corpus, so that it is in the cache; elsewhere, so that the summary is of as many runs as said.
        train = ["train", "model=gpt2_nano", "train.steps=1", "data=files", f"data.path={text}"]
        train += [f"results_dir={folder}/more", "run.fresh=true"]
        some = max(1, options.times // 3)
        commands = [
            Command("--help", ["--help"], options.times, bar=HELP_BAR),
            Command("--version", ["--version"], options.times),
            Command("list norms", ["list", "norms"], options.times),
            Command("list runs", ["list", "runs", str(results)], options.times),
            Command("summarize", ["summarize", str(results)], options.times, bar=SUMMARY_BAR),
            Command("summarize --format json", ["summarize", str(results), "--format", "json"], options.times),
            Command("train, 1 step, W&B off", [*train, "tracking.wandb=off"], some),
            Command("train, 1 step, W&B offline", [*train, "tracking.wandb=offline"], some),
        ]
        for command in commands:
            command.look()
        for turn in range(options.times):
            for command in commands:
                if turn < command.times:
                    command.measure()

    print(f"\n{'normlab':28} {'least':>7} {'median':>7} {'CPU':>6} {'bar':>4}  loaded")
    for command in commands:
        bar = "" if command.bar is None else f"{command.bar:.1f}"
        median, cpu = statistics.median(command.seconds), statistics.median(command.cpu_seconds)
        mark = "  ABOVE ITS BAR" if command.failed else ""
        print(
            f"{command.label:28} {min(command.seconds):7.3f} {median:7.3f} {cpu:6.2f} {bar:>4}  {command.loaded}{mark}"
        )
    print(f"load after: {os.getloadavg()[0]:.1f}")
    return int(options.check and any(command.failed for command in commands))


if __name__ == "__main__":
    sys.exit(main())
