#!/usr/bin/env python3
"""Train every norm in every placement for a few steps, and resume each bit for bit.

    .venv/bin/python scripts/matrix.py [--only norm=dyt placement=pre] [--write results/matrix.md]

Each pair is trained twice at depth 4 on the CPU: once without interruption, and once interrupted in the middle by a
signal and resumed from its checkpoint. Both must leave the same record and the same last checkpoint. The table shows
the validation loss after 20 steps; `diverged` is an outcome, not a failure. A pair that normlab rejects has a dash.

Exits with 1 if a run fails, is neither finite nor marked as diverged, does not resume bit for bit, or if no pair is
trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from kill_and_resume import differing_state, rows, timeless

from normlab.config.compose import compose_run, register
from normlab.errors import ConfigError, NormlabError, unknown
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.store.files import write_atomic
from normlab.store.runs import RunFolder
from normlab.training.start import train

CORPUS = Path(__file__).parents[1] / "tests" / "corpus.txt"
STEPS, MIDDLE = 20, 9
OVERRIDES = [
    "data=files", f"data.path=[{CORPUS}]", "device=cpu", "tracking.wandb=off", "model.depth=4", "model.width=64",
    "model.heads=4", "model.context=32", f"train.steps={STEPS}", "train.batch_size=8", "train.log_every=1",
    "train.checkpoint_every=20", "eval.every=10", "eval.sequences=16", "optim.lr=3e-3", "optim.warmup_steps=5",
]  # fmt: skip
REFUSED = "-"


class Interrupting:
    """A tracker that interrupts the run in the middle, as Ctrl-C does."""

    def start(self, run: Any, first_step: int) -> None:
        """Do nothing."""

    def log(self, rows: Sequence[Any]) -> None:
        """Send the signal at the middle step."""
        if any(row["step"] == MIDDLE and row["kind"] == "train" for row in rows):
            os.kill(os.getpid(), signal.SIGINT)

    def finish(self, status: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one pair, a cell of the table."""

    text: str
    """The text in the table."""
    error: str = ""
    """The failure, or the difference between the two runs."""
    resumed: bool = False
    """Whether the run was interrupted and resumed; a run that diverges before the middle is not."""


def pair(norm: str, placement: str) -> Cell:
    """Train a pair without and with an interruption, and compare."""
    torch.set_num_threads(1)
    register()
    try:
        base = compose_run([*OVERRIDES, f"norm={norm}", f"placement={placement}"])
    except ConfigError:
        return Cell(REFUSED)
    with tempfile.TemporaryDirectory(prefix="normlab-matrix-") as folder:
        try:
            complete = train(dataclasses.replace(base, results_dir=f"{folder}/complete"), trackers=[])
            interrupted = dataclasses.replace(base, results_dir=f"{folder}/interrupted")
            first = train(interrupted, trackers=[Interrupting()])
            again = first if first.state == "diverged" else train(interrupted, trackers=[])
        except (NormlabError, RuntimeError) as error:
            return Cell("failed", f"{type(error).__name__}: {error}")
        resumed = first.state == "interrupted"
        if complete.state != "diverged" and not resumed:
            return Cell("failed", f"{first.state}, expected interrupted")
        return Cell(outcome(complete.folder.status()), differences(complete.folder, again.folder), resumed)


def outcome(status: dict[str, Any]) -> str:
    """Return the validation loss, or the step at which the run diverged."""
    loss = status.get("val_loss")
    if status["state"] == "diverged":
        return f"diverged at {status['diverged']['step']}"
    if status["state"] != "finished" or not isinstance(loss, float) or not math.isfinite(loss):
        return f"{status['state']}, {loss}"
    return f"{loss:.3f}"


def differences(one: RunFolder, other: RunFolder) -> str:
    """Return the differences between two runs, except times, and an outcome that is neither finite nor diverged."""
    problems = differing_state(one.path, other.path, STEPS) if one.state() == "finished" else []
    if rows(one.path) != rows(other.path):
        problems.append("the records differ")
    if timeless(one.status()) != timeless(other.status()):
        problems.append("the status differs")
    if not outcome(one.status()).replace(".", "").isdigit() and one.state() != "diverged":
        problems.append(f"ended as {outcome(one.status())}")
    return "; ".join(problems)


def table(norms: list[str], placements: list[str], cells: dict[tuple[str, str], Cell]) -> str:
    """Return the matrix in Markdown, one row for each placement."""
    lines = [f"| placement | {' | '.join(norms)} |", f"|---|{'---|' * len(norms)}"]
    for placement in placements:
        lines.append(f"| {placement} | {' | '.join(cells[norm, placement].text for norm in norms)} |")
    return "\n".join(lines)


def summary(cells: Sequence[Cell]) -> str:
    """Return how many pairs were trained, refused, diverged and resumed."""
    trained = [cell for cell in cells if cell.text != REFUSED]
    diverged = sum(cell.text.startswith("diverged") for cell in trained)
    resumed = sum(cell.resumed and not cell.error for cell in trained)
    early = sum(not cell.resumed and not cell.error for cell in trained)
    return (
        f"{len(trained)} pairs trained {STEPS} steps, {diverged} diverged, {len(cells) - len(trained)} refused; "
        f"{resumed} resumed bit for bit, {early} diverged before the interruption and again, "
        f"{sum(bool(cell.error) for cell in cells)} failed"
    )


def select(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the norms and placements that the arguments of `--only` select; all without arguments.

    Raises:
        ConfigError: An argument is neither norm=... nor placement=..., or its name is unknown.
    """
    every = {"norm": sorted(NORMS), "placement": list(PLACEMENTS)}
    selected: dict[str, list[str]] = {kind: [] for kind in every}
    for argument in arguments:
        kind, _, name = argument.partition("=")
        if kind not in every:
            raise ConfigError(f"--only {argument}: " + unknown("argument", kind, every))
        if name not in every[kind]:
            raise ConfigError(f"--only {argument}: " + unknown(kind, name, every[kind]))
        selected[kind].append(name)
    norms, placements = ([name for name in every[kind] if name in (selected[kind] or every[kind])] for kind in every)
    return norms, placements


def main() -> int:
    """Run the pairs, two at a time, and print the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], help="norm=... and placement=... to train (default: all)")
    parser.add_argument("--write", type=Path, help="write the matrix to this file")
    options = parser.parse_args()
    if options.only and options.write is not None:
        parser.error("--write: needs the complete matrix; leave out --only or --write")
    register()
    try:
        norms, placements = select(options.only)
    except ConfigError as error:
        parser.error(str(error))
    pairs = [(norm, placement) for placement in placements for norm in norms]
    started = time.monotonic()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(pair, *zip(*pairs, strict=True), chunksize=4)
        cells: dict[tuple[str, str], Cell] = {}
        for number, (key, cell) in enumerate(zip(pairs, results, strict=True), start=1):
            cells[key] = cell
            if cell.error:
                print(f"{key[0]} {key[1]}: {cell.text}: {cell.error}", file=sys.stderr)
            if number % 50 == 0:
                print(f"{number} of {len(pairs)}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    text = f"{table(norms, placements, cells)}\n\n{summary(list(cells.values()))}."
    print(text)
    if options.write is not None:
        command = f"`scripts/matrix.py --write {options.write}`"
        about = f"Validation loss in nats per byte after {STEPS} steps of depth 4, by {command}. {setting()}"
        write_atomic(options.write, f"# Every norm in every placement\n\n{about}\n\n{text}\n".encode())
    none_trained = all(cell.text == REFUSED for cell in cells.values())
    return int(none_trained or any(cell.error for cell in cells.values()))


def setting() -> str:
    """Describe the overrides and the machine."""
    overrides = " ".join(override for override in OVERRIDES if "path" not in override)
    where = f"torch {torch.__version__} on a CPU, one thread"
    return f"{where}; `{overrides}`, the tests' corpus. One seed and few steps: this is no ranking."


if __name__ == "__main__":
    sys.exit(main())
