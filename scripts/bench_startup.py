"""How long `normlab` takes to answer: its help, its lists, and a summary of 200 runs.

    python scripts/bench_startup.py            # about two minutes on two CPU cores
    python scripts/bench_startup.py --check    # exit 1 above the bars

Every time is that of a fresh process, from its start to its end, as a shell sees it; least and median of ten.
The bars are held against the median. Beside each is what of the heavy packages it loaded, as a process of its
own found it in `sys.modules` at the end.

The runs are real ones: 200 trainings of two steps each, of several norms, placements, sizes and seeds, in one
process. One is trained by the command line, to be timed from its first line to its last.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEAVY = ("torch", "wandb", "datasets", "pandas", "hydra", "rich", "numpy")
BARS = {"--help": 0.4, "summarize": 1.0}
"""Seconds, medians, by the first word."""

PROBE = f"""
import sys
from normlab.cli import main
try:
    main(sys.argv[1:])
finally:
    print(",".join(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """One command's times."""

    words: Sequence[str]
    seconds: list[float]
    loaded: str
    """The heavy packages that it loaded."""

    @property
    def bar(self) -> float | None:
        """The bar that its median is held against, if any."""
        return BARS.get(self.words[0])

    @property
    def failed(self) -> bool:
        """Whether it is above its bar."""
        return self.bar is not None and statistics.median(self.seconds) > self.bar


def measure(words: Sequence[str], times: int, environment: dict[str, str]) -> Timing:
    """Run `normlab words` in fresh processes, and once more to see what it loads."""
    script = Path(sys.executable).with_name("normlab")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "normlab"]
    seconds = []
    for _ in range(times):
        since = time.perf_counter()
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.perf_counter() - since)
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, *words], check=True, capture_output=True, text=True, env=environment
    )
    return Timing(words, seconds, probe.stderr.splitlines()[-1] or "none of them")


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

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder, contextlib.ExitStack() as cleanup:
        results, text = Path(folder, "results"), Path(folder, "text.txt")
        # Real text, long enough for every context, and short enough not to be what takes the time.
        text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        environment = {**os.environ, "NORMLAB_CACHE": str(Path(folder, "cache"))}
        os.environ["NORMLAB_CACHE"] = environment["NORMLAB_CACHE"]
        cleanup.callback(os.environ.pop, "NORMLAB_CACHE", None)
        print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)

        since = time.perf_counter()
        train_many(results, text, options.runs)
        print(f"{options.runs} runs of two steps trained in {time.perf_counter() - since:.0f} s\n", flush=True)

        commands = [["--help"], ["--version"], ["list", "norms"], ["list", "runs", str(results)]]
        commands += [["summarize", str(results)], ["summarize", str(results), "--format", "json"]]
        timings = [measure(words, options.times, environment) for words in commands]
        train = ["train", "model=gpt2_nano", "data=files", f"data.path={text}", f"results_dir={results}"]
        train += ["train.steps=1", "run.fresh=true"]
        for wandb in ("off", "offline"):
            timings.append(measure([*train, f"tracking.wandb={wandb}"], max(1, options.times // 3), environment))
            # The runs are counted: without the new ones the next line is about as many as was said.

        print(f"{'normlab':28} {'least':>7} {'median':>7} {'bar':>5}  loaded")
        for timing in timings:
            words = [word for word in timing.words if str(folder) not in word]
            if words[0] == "train":
                words = ["train", *(word for word in words if word.startswith(("model", "tracking")))]
            bar = "" if timing.bar is None else f"{timing.bar:.1f}"
            median = statistics.median(timing.seconds)
            mark = "  ABOVE ITS BAR" if timing.failed else ""
            print(f"{' '.join(words):28.28} {min(timing.seconds):7.3f} {median:7.3f} {bar:>5}  {timing.loaded}{mark}")
        print(f"load after: {os.getloadavg()[0]:.1f}")
    return int(options.check and any(timing.failed for timing in timings))


if __name__ == "__main__":
    sys.exit(main())
