#!/usr/bin/env python3
"""Reproduce what is known of signal propagation at initialisation, with `normlab probe`'s own measure.

    .venv/bin/python scripts/init_laws.py [--seeds 8] [--depths 6 12 24 48] [--write results/init_laws.md]
    .venv/bin/python scripts/init_laws.py --again results/init_laws.json [--write results/init_laws.md]

For each placement, at the init that the law belongs to: the last and the first block's gradient of the MLP's down
projection, and the RMS of the stream after the last block, at each depth, the mean over the seeds; then the laws, each
with what was expected and what was seen; then the numbers that the project began with, and where they differ. Exits
with 1 where a law does not hold. What was measured is written beside the tables, as JSON, of which `--again` makes
them without measuring.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from laws.claims import compared
from laws.expected import LAWS
from laws.profiles import CASES, LAYERNORM, WORDS, Case, Cases, measured

from normlab.store.files import write_atomic


def measure(seeds: int, depths: list[int]) -> dict[str, Any]:
    """Every case at every depth, two at a time; as it is kept."""
    tasks = [(placement, init, depth, seeds) for placement, init in CASES for depth in depths]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(measured, tasks))
    cases = []
    for placement, init in CASES:
        rows = [numbers for task, numbers in zip(tasks, found, strict=True) if task[:2] == (placement, init)]
        case = Case(depths, *(list(column) for column in zip(*rows, strict=True)))
        cases.append({"placement": placement, "init": init, **asdict(case)})
    return {"seeds": seeds, "depths": depths, "torch": torch.__version__, "cases": cases}


def tables(kept: dict[str, Any]) -> tuple[bool, str]:
    """Whether every law holds, and all tables."""
    cases: Cases = {
        (one["placement"], one["init"]): Case(one["depths"], one["stream"], one["first"], one["last"])
        for one in kept["cases"]
    }
    lines = ["| placement | init | last gradient | first gradient | stream's RMS |", "|---|---|---|---|---|"]
    for (placement, init), case in cases.items():
        columns = [" ".join(f"{value:.3g}" for value in values) for values in (case.last, case.first, case.stream)]
        lines.append(f"| {placement} | {init} | {' | '.join(columns)} |")
    verdicts = [law.line(cases) for law in LAWS]
    lines += ["", "| law | expected | seen | |", "|---|---|---|---|", *(line for _, line in verdicts)]
    about = (
        f"L = {', '.join(map(str, kept['depths']))}; the mean of {kept['seeds']} seeds; torch {kept['torch']} on a "
        f"CPU; `{' '.join([*LAYERNORM, *WORDS])}`; none is `norm=none placement=pre`."
    )
    return all(holds for holds, _ in verdicts), "\n".join([about, "", *lines, "", *compared(cases)])


def main() -> int:
    """Measure, or read what was measured, and hold the laws and the claims against it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--again", type=Path, help="what was measured before, to make the tables of")
    parser.add_argument("--write", type=Path, help="a file to keep the tables in, and what was measured beside it")
    options = parser.parse_args()
    kept = json.loads(options.again.read_text()) if options.again else measure(options.seeds, options.depths)
    if options.write is not None and options.again is None:
        write_atomic(options.write.with_suffix(".json"), (json.dumps(kept, indent=1) + "\n").encode())
    hold, text = tables(kept)
    print(text)
    if options.write is not None:
        command = f"`scripts/init_laws.py --write {options.write}`"
        write_atomic(options.write, f"# Laws at initialisation\n\nBy {command}.\n\n{text}\n".encode())
    return int(not hold)


if __name__ == "__main__":
    sys.exit(main())
