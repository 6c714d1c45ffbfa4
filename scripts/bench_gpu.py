"""Measure everything that needs a GPU, and write the numbers to results/bench/gpu-<name>.md.

    scripts/gpu              # on a machine with a GPU
    scripts/gpu --dry-run    # the same parts with tiny models on the CPU; prints the file and writes nothing

Each part is a command of its own. A part that fails is reported in the file with the end of its messages, and the other
parts still run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LINES_OF_ERROR = 15
"""Lines of the messages of a failed part that the file shows."""

PARTS: Mapping[str, str] = {
    "Tests marked gpu": "-m pytest -m gpu -q -p no:cacheprovider tests",
    "tok/s, MFU and peak memory of a step; tok/s of the loop": "scripts/bench_train.py --device cuda --compile",
    "Cost of statistics, and host synchronisations": "scripts/bench_stats.py --device cuda",
    "Sixteen runs packed, and one after another": (
        "scripts/bench_sweep.py --device cuda --models 4x128,6x384,12x768 --precisions bf16"
    ),
}
"""The arguments of Python, by title."""
DRY_RUN: Mapping[str, str] = {
    "Tests marked gpu": PARTS["Tests marked gpu"] + "/train/test_gpu.py",
    "tok/s, MFU and peak memory of a step; tok/s of the loop": (
        "scripts/bench_train.py --device cpu --models 2x32 --rounds 2 --only step"
    ),
    "Cost of statistics, and host synchronisations": (
        "scripts/bench_stats.py --device cpu --models 2x32 --compile off --rounds 2"
    ),
    "Sixteen runs packed, and one after another": (
        "scripts/bench_sweep.py --device cpu --models 2x32 --precisions fp32 --no-compile --runs 2 --pack 2 --rounds 2"
    ),
}
"""The same parts with tiny models on a CPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU; print the file, write nothing")
    dry_run = parser.parse_args(arguments).dry_run
    if not dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU; use --dry-run, or a machine with a GPU")
    name = "cpu" if dry_run else torch.cuda.get_device_name()
    parts = DRY_RUN if dry_run else PARTS
    path = ROOT / "results" / "bench" / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    sections = [header(name)]
    failed = False
    for title, command in parts.items():
        text, passed = section(title, command)
        failed |= not passed
        sections.append(text)
        print(text, flush=True)
        if not dry_run:  # after each part, so that a machine that is taken away leaves the parts before
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(sections))
    return int(failed)


def header(name: str) -> str:
    """Return the heading of the file: device, commit, date, torch."""
    git = [["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain"]]
    commit, changes = (subprocess.run(c, cwd=ROOT, capture_output=True, text=True).stdout.strip() for c in git)
    changed = " with uncommitted changes" if changes else ""
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"# Measured by scripts/gpu: {name}\n\n"
        f"Commit {commit or 'unknown'}{changed}, {date.today()}, torch {torch.__version__}{cuda}.\n"
    )


def section(title: str, command: str) -> tuple[str, bool]:
    """Run a part; return its section of the file, and whether it passed."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    messages = "" if done.returncode == 0 else "\n".join(done.stderr.splitlines()[-LINES_OF_ERROR:])
    state = "passed" if done.returncode == 0 else f"FAILED with exit code {done.returncode}"
    output = "\n".join(text.strip() for text in (done.stdout, messages) if text.strip())
    return (
        f"## {title}\n\n`python {command}`: {state} in {time.perf_counter() - start:.0f} s\n\n```\n{output}\n```\n",
        done.returncode == 0,
    )


if __name__ == "__main__":
    sys.exit(main())
