#!/usr/bin/env python3
"""Reproduce what is known of signal propagation at initialisation, with `normlab probe`'s own measure.

    .venv/bin/python scripts/init_laws.py [--seeds 8] [--depths 6 12 24 48] [--write results/init_laws.md]

For each placement, at the init that the law belongs to: the last and the first block's gradient of the MLP's down
projection, and the RMS of the stream after the last block, at each depth, the mean over the seeds; then the laws, each
with what was expected and what was seen. Exits with 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from normlab.launch import compose_run
from normlab.probe import Row, probe
from normlab.store.files import write_atomic
from normlab.verify.signal import slope

WORDS = [
    "norm=layernorm", "norm.gain=false", "norm.bias=false", "model.width=128", "model.heads=4", "model.bias=false",
    "model.tie_embeddings=false", "model.context=64", "train.batch_size=8",
]  # fmt: skip
CASES = (
    ("post", "xavier"), ("pre", "xavier"), ("peri", "xavier"), ("res_post", "xavier"), ("lns", "xavier"),
    ("deepnorm", "deepnorm"), ("sub_ln", "sub_ln"), ("hybridnorm", "xavier"), ("siamese", "xavier"),
    ("residual", "xavier"), ("keel", "xavier"), ("pre", "gpt2"), ("post", "gpt2"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Means over seeds at each depth."""

    depths: list[int]
    stream: list[float]
    first: list[float]
    last: list[float]


Cases = dict[tuple[str, str], Case]


@dataclass(frozen=True)
class Law:
    """What is expected of a number, and how far it may be off."""

    says: str
    expected: str
    seen: Callable[[Cases], list[float]]
    low: float
    high: float

    def line(self, cases: Cases) -> tuple[bool, str]:
        """Whether it holds, and the row of the table."""
        seen = self.seen(cases)
        holds = all(self.low <= value <= self.high for value in seen)
        shown = ", ".join(f"{value:.3g}" for value in seen)
        return holds, f"| {self.says} | {self.expected} | {shown} | {'holds' if holds else '**does not hold**'} |"


def power(placement: str, what: str, init: str = "xavier") -> Callable[[Cases], list[float]]:
    """The power of L by which something grows."""

    def fitted(cases: Cases) -> list[float]:
        case = cases[placement, init]
        return [slope(case.depths, getattr(case, what))]

    return fitted


def over_root_of_2l(placement: str) -> Callable[[Cases], list[float]]:
    """The stream's RMS over sqrt(2L)."""

    def ratios(cases: Cases) -> list[float]:
        case = cases[placement, "xavier"]
        return [rms / math.sqrt(2 * depth) for rms, depth in zip(case.stream, case.depths, strict=True)]

    return ratios


def last_over_first(placement: str, init: str) -> Callable[[Cases], list[float]]:
    """At each depth."""

    def ratios(cases: Cases) -> list[float]:
        case = cases[placement, init]
        return [last / first for last, first in zip(case.last, case.first, strict=True)]

    return ratios


def post_over_pre(init: str) -> Callable[[Cases], list[float]]:
    """The last gradients' ratio, at each depth."""

    def ratios(cases: Cases) -> list[float]:
        return [a / b for a, b in zip(cases["post", init].last, cases["pre", init].last, strict=True)]

    return ratios


def post_over_pre_power(cases: Cases) -> list[float]:
    """The power of L by which that ratio grows, at Xavier's init."""
    return [slope(cases["pre", "xavier"].depths, post_over_pre("xavier")(cases))]


LAWS = (
    Law("post: last gradient's power of L", "0 +- 0.1", power("post", "last"), -0.1, 0.1),
    Law("pre: last gradient's power of L", "-1/2 +- 0.1", power("pre", "last"), -0.6, -0.4),
    Law("pre: stream's power of L", "1/2 +- 0.1", power("pre", "stream"), 0.4, 0.6),
    Law("post/pre: power of L of the last gradients' ratio", "1/2 +- 0.1", post_over_pre_power, 0.4, 0.6),
    Law("peri: stream's RMS over sqrt(2L)", "1 +- 5 %", over_root_of_2l("peri"), 0.95, 1.05),
    Law("res_post: stream's RMS over sqrt(2L)", "1 +- 5 %", over_root_of_2l("res_post"), 0.95, 1.05),
    Law("deepnorm: last over first gradient", "1 +- 15 %", last_over_first("deepnorm", "deepnorm"), 0.85, 1.15),
    Law("deepnorm: last gradient's power of L", "-0.6 +- 0.1", power("deepnorm", "last", "deepnorm"), -0.7, -0.5),
    Law("keel: last over first gradient", "1 +- 5 %", last_over_first("keel", "xavier"), 0.95, 1.05),
    Law("keel: last gradient's power of L", "-1 +- 0.1", power("keel", "last"), -1.1, -0.9),
    Law("lns: stream's power of L", "below pre's: 0 to 0.3", power("lns", "stream"), 0.0, 0.3),
    Law("hybridnorm: last gradient's power of L", "0 +- 0.1", power("hybridnorm", "last"), -0.1, 0.1),
    Law("residual: last gradient's power of L", "0 +- 0.15", power("residual", "last"), -0.15, 0.15),
    Law("siamese: last gradient's power of L", "as pre: -0.75 to -0.4", power("siamese", "last"), -0.75, -0.4),
    Law("the trap, init=gpt2: post/pre, ratio of last gradients", "below 0.3", post_over_pre("gpt2"), 0.0, 0.3),
)  # fmt: skip


def measured(task: tuple[str, str, int, int]) -> Row:
    """One placement at one depth."""
    placement, init, depth, seeds = task
    torch.set_num_threads(1)
    config = compose_run([*WORDS, f"placement={placement}", f"init={init}", f"model.depth={depth}"])
    return next(probe([config], seeds))


def main() -> int:
    """Measure, two at a time, and hold the laws against it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--write", type=Path, help="a file to keep the tables in")
    options = parser.parse_args()
    tasks = [(placement, init, depth, options.seeds) for placement, init in CASES for depth in options.depths]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(measured, tasks))
    cases: Cases = {}
    lines = ["| placement | init | last gradient | first gradient | stream's RMS |", "|---|---|---|---|---|"]
    for placement, init in CASES:
        rows = [row for task, row in zip(tasks, found, strict=True) if task[:2] == (placement, init)]
        case = cases[placement, init] = Case(
            [row["depth"] for row in rows],
            [row["stream"][-1] for row in rows],
            [row["gradient"][0] for row in rows],
            [row["gradient"][-1] for row in rows],
        )
        shown = [" ".join(f"{value:.3g}" for value in values) for values in (case.last, case.first, case.stream)]
        lines.append(f"| {placement} | {init} | {' | '.join(shown)} |")
    verdicts = [law.line(cases) for law in LAWS]
    lines += ["", "| law | expected | seen | |", "|---|---|---|---|", *(line for _, line in verdicts)]
    depths = ", ".join(map(str, options.depths))
    about = f"L = {depths}; the mean of {options.seeds} seeds; torch {torch.__version__} on a CPU; `{' '.join(WORDS)}`."
    text = f"{about}\n\n" + "\n".join(lines)
    print(text)
    if options.write is not None:
        command = f"`scripts/init_laws.py --write {options.write}`"
        write_atomic(options.write, f"# Laws at initialisation\n\nBy {command}.\n\n{text}\n".encode())
    return int(not all(holds for holds, _ in verdicts))


if __name__ == "__main__":
    sys.exit(main())
