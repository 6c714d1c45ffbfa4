#!/usr/bin/env python3
"""Test laws of signal propagation at initialisation.

    .venv/bin/python scripts/init_laws.py [--seeds 8] [--depths 6 12 24 48] [--write results/init_laws.md]
    .venv/bin/python scripts/init_laws.py --again results/init_laws.json [--write results/init_laws.md]

Prints for each placement, at the init of the law, the gradient of the first and of the last MLP's down projection and
the RMS of the stream after the last block, at each depth, as means over the seeds; then each law with the expected and
the measured number. Exits with 1 if a law does not hold.
The measurements are written beside the tables as JSON, from which `--again` makes the tables without measuring.
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
from laws.expected import LAWS
from laws.profiles import CASES, LAYERNORM, OVERRIDES, Case, Cases, measure_case

from normlab.store.files import write_atomic


def measure(seeds: int, depths: list[int]) -> dict[str, Any]:
    """Measure every case at every depth, two at a time, as the JSON file has it."""
    tasks = [(placement, init, depth, seeds) for placement, init in CASES for depth in depths]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(measure_case, tasks))
    cases = []
    for placement, init in CASES:
        rows = [numbers for task, numbers in zip(tasks, results, strict=True) if task[:2] == (placement, init)]
        case = Case(depths, *(list(column) for column in zip(*rows, strict=True)))
        cases.append({"placement": placement, "init": init, **asdict(case)})
    return {"seeds": seeds, "depths": depths, "torch": torch.__version__, "cases": cases}


def tables(measured: dict[str, Any]) -> tuple[bool, str]:
    """Return whether every law holds, and the tables in Markdown."""
    cases: Cases = {
        (case["placement"], case["init"]): Case(case["depths"], case["stream"], case["first"], case["last"])
        for case in measured["cases"]
    }
    lines = ["| placement | init | last gradient | first gradient | stream's RMS |", "|---|---|---|---|---|"]
    for (placement, init), case in cases.items():
        columns = [" ".join(f"{value:.3g}" for value in values) for values in (case.last, case.first, case.stream)]
        lines.append(f"| {placement} | {init} | {' | '.join(columns)} |")
    verdicts = [law.line(cases) for law in LAWS]
    lines += ["", "| law | expected | measured | |", "|---|---|---|---|", *(line for _, line in verdicts)]
    about = (
        f"L = {', '.join(map(str, measured['depths']))}; means of {measured['seeds']} seeds; "
        f"torch {measured['torch']} on a CPU; `{' '.join([*LAYERNORM, *OVERRIDES])}`; "
        "none is `norm=none placement=pre`."
    )
    return all(holds for holds, _ in verdicts), "\n".join([about, "", *lines])


def main() -> int:
    """Measure, or read measurements, and test the laws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--again", type=Path, help="make the tables from this JSON file")
    parser.add_argument("--write", type=Path, help="write the tables to this file, and the measurements beside it")
    options = parser.parse_args()
    measured = json.loads(options.again.read_text()) if options.again else measure(options.seeds, options.depths)
    if options.write is not None and options.again is None:
        write_atomic(options.write.with_suffix(".json"), (json.dumps(measured, indent=1) + "\n").encode())
    hold, text = tables(measured)
    print(text)
    if options.write is not None:
        command = f"`scripts/init_laws.py --write {options.write}`"
        write_atomic(options.write, f"# Laws at initialisation\n\nBy {command}.\n\n{text}\n".encode())
    return int(not hold)


if __name__ == "__main__":
    sys.exit(main())
