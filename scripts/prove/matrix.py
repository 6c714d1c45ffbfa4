#!/usr/bin/env python3
"""Train every norm in every placement for a few steps, and resume each bit for bit.

    .venv/bin/python scripts/prove/matrix.py [--norms dyt rmsnorm] [--placements pre] [--optim muon] > matrix.md

Each pair is trained twice at depth 4 on the CPU: once without interruption, and once interrupted in the middle by a
signal and resumed from its checkpoint. Both must leave the same record and the same last checkpoint. The table shows
the validation loss after 20 steps; `diverged` is an outcome, not a failure. A pair that normlab rejects has a dash.

Exits with 1 if a run fails, is neither finite nor marked as diverged, does not resume bit for bit, or if no pair is
trained.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from compare_runs import differing_state, rows, timeless

from normlab.base.errors import ConfigError, NormlabError
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.optimizers.options import OPTIMIZERS
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.config.compose import compose_run, register
from normlab.training.start import train

CORPUS = Path(__file__).parents[2] / "tests" / "corpus.txt"
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
    error: str = ""
    resumed: bool = False
    """Whether the run was interrupted and resumed; a run that diverges before the middle is not."""


def pair(norm: str, placement: str, optim: str = "adamw") -> Cell:
    """Train a pair without and with an interruption, and compare."""
    torch.set_num_threads(1)
    register()
    try:
        base = compose_run([*OVERRIDES, f"norm={norm}", f"placement={placement}", f"optim={optim}"])
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
        text = outcome(complete.folder.status())
        one, other = complete.folder, again.folder
        problems = differing_state(one.path, other.path, STEPS) if complete.state == "finished" else []
        if rows(one.path) != rows(other.path) or timeless(one.status()) != timeless(other.status()):
            problems.append("the records differ")
        if not text.replace(".", "").isdigit() and complete.state != "diverged":
            problems.append(f"ended as {text}")
        return Cell(text, "; ".join(problems), resumed)


def outcome(status: dict[str, Any]) -> str:
    """Return the validation loss, or the step at which the run diverged."""
    loss = status.get("val_loss")
    if status["state"] == "diverged":
        return f"diverged at {status['diverged']['step']}"
    if status["state"] != "finished" or not isinstance(loss, float) or not math.isfinite(loss):
        return f"{status['state']}, {loss}"
    return f"{loss:.3f}"


def main() -> int:
    register()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--norms", nargs="*", choices=sorted(NORMS), default=sorted(NORMS), metavar="NORM")
    parser.add_argument("--placements", nargs="*", choices=PLACEMENTS, default=[*PLACEMENTS], metavar="PLACEMENT")
    parser.add_argument("--optim", choices=OPTIMIZERS, default="adamw")
    options = parser.parse_args()
    pairs = [(norm, placement) for placement in options.placements for norm in options.norms]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        cells = dict(
            zip(
                pairs, pool.map(partial(pair, optim=options.optim), *zip(*pairs, strict=True), chunksize=4), strict=True
            )
        )
    print(f"torch {torch.__version__} on a CPU, one thread; `{' '.join(OVERRIDES)} optim={options.optim}`\n")
    print(f"| placement | {' | '.join(options.norms)} |\n|---|{'---|' * len(options.norms)}")
    for placement in options.placements:
        print(f"| {placement} | {' | '.join(cells[norm, placement].text for norm in options.norms)} |")
    trained = [cell for cell in cells.values() if cell.text != REFUSED]
    resumed = sum(cell.resumed and not cell.error for cell in trained)
    print(
        f"\n{len(trained)} pairs trained {STEPS} steps, {len(cells) - len(trained)} refused; {resumed} resumed bit for "
        f"bit, {sum(not cell.resumed and not cell.error for cell in trained)} diverged before the interruption"
    )
    for (norm, placement), cell in cells.items():
        if cell.error:
            print(f"FAILED {norm} {placement}: {cell.text}: {cell.error}", file=sys.stderr)
    return int(not trained or any(cell.error for cell in trained))


if __name__ == "__main__":
    sys.exit(main())
