#!/usr/bin/env python3
"""Train every norm in every placement for a few steps, and go on with each bit for bit after an interruption.

    .venv/bin/python scripts/matrix.py [--only norm=dyt placement=pre] [--write results/matrix.md]

Each pair is trained twice at depth 4 on the CPU: once in one go, and once interrupted in the middle by a signal and
gone on with from its checkpoint. Both must leave the same record and the same last checkpoint. Printed is the
validation loss after 20 steps; `diverged` is a state, not a failure. A pair that is refused has a dash.

Exits with 1 where a run fails, is neither finite nor marked as diverged, does not go on bit for bit, or none is
trained at all.
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

from normlab.errors import ConfigError, NormlabError, unknown
from normlab.launch import compose_run, register
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.store.files import write_atomic
from normlab.store.runs import RunFolder
from normlab.train.start import train

CORPUS = Path(__file__).parents[1] / "tests" / "corpus.txt"
STEPS, MIDDLE = 20, 9
WORDS = [
    "data=files", f"data.path=[{CORPUS}]", "device=cpu", "tracking.wandb=off", "model.depth=4", "model.width=64",
    "model.heads=4", "model.context=32", f"train.steps={STEPS}", "train.batch_size=8", "train.log_every=1",
    "train.checkpoint_every=20", "eval.every=10", "eval.sequences=16", "optim.lr=3e-3", "optim.warmup_steps=5",
]  # fmt: skip
REFUSED = "-"


class Interrupting:
    """A sink that interrupts the run in its middle, as Ctrl-C does."""

    def start(self, run: Any, first_step: int) -> None:
        """Nothing to do."""

    def log(self, seen: Sequence[Any]) -> None:
        """Send the signal at one step."""
        if any(row["step"] == MIDDLE and row["kind"] == "train" for row in seen):
            os.kill(os.getpid(), signal.SIGINT)

    def log_statistics(self, profiles: Any) -> None:
        """Nothing to do."""

    def finish(self, status: Any) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of a pair."""

    text: str
    """What the table says."""
    wrong: str = ""
    """What went wrong, if anything did."""
    resumed: bool = False
    """Whether it was interrupted and gone on with; what diverges before the middle is not."""


def pair(norm: str, placement: str) -> Cell:
    """Train a pair in one go and in two, and compare."""
    torch.set_num_threads(1)
    register()
    try:
        base = compose_run([*WORDS, f"norm={norm}", f"placement={placement}"])
    except ConfigError:
        return Cell(REFUSED)
    with tempfile.TemporaryDirectory(prefix="normlab-matrix-") as folder:
        try:
            whole = train(dataclasses.replace(base, results_dir=f"{folder}/whole"), sinks=[])
            parts = dataclasses.replace(base, results_dir=f"{folder}/parts")
            first = train(parts, sinks=[Interrupting()])
            again = first if first.state == "diverged" else train(parts, sinks=[])
        except (NormlabError, RuntimeError) as error:
            return Cell("failed", f"{type(error).__name__}: {error}")
        resumed = first.state == "interrupted"
        if whole.state != "diverged" and not resumed:
            return Cell("failed", f"was not interrupted, but {first.state}")
        return Cell(outcome(whole.folder, whole.status), differing(whole.folder, again.folder), resumed)


def outcome(folder: RunFolder, status: dict[str, Any]) -> str:
    """The validation loss, or that it diverged."""
    loss = status.get("val_loss")
    if status["state"] == "diverged":
        return f"diverged at {status['diverged']['step']}"
    if status["state"] != "finished" or not isinstance(loss, float) or not math.isfinite(loss):
        return f"{status['state']}, {loss}"
    return f"{loss:.3f}"


def differing(one: RunFolder, other: RunFolder) -> str:
    """What two folders of a run differ in, beyond times; and whether the outcome is neither finite nor a divergence."""
    found = differing_state(one.path, other.path, STEPS) if one.state() == "finished" else []
    if rows(one.path) != rows(other.path):
        found.append("the records differ")
    if timeless(one.status()) != timeless(other.status()):
        found.append("the status differs")
    if not outcome(one, one.status()).replace(".", "").isdigit() and one.state() != "diverged":
        found.append(f"ended as {outcome(one, one.status())}")
    return "; ".join(found)


def table(norms: list[str], placements: list[str], cells: dict[tuple[str, str], Cell]) -> str:
    """The matrix in Markdown, a row a placement."""
    lines = [f"| placement | {' | '.join(norms)} |", f"|---|{'---|' * len(norms)}"]
    for placement in placements:
        lines.append(f"| {placement} | {' | '.join(cells[norm, placement].text for norm in norms)} |")
    return "\n".join(lines)


def summary(cells: Sequence[Cell]) -> str:
    """How many of them are what."""
    trained = [cell for cell in cells if cell.text != REFUSED]
    diverged = sum(cell.text.startswith("diverged") for cell in trained)
    resumed = sum(cell.resumed and not cell.wrong for cell in trained)
    early = sum(not cell.resumed and not cell.wrong for cell in trained)
    return (
        f"{len(trained)} pairs trained {STEPS} steps, {diverged} diverged, {len(cells) - len(trained)} refused; "
        f"{resumed} went on bit for bit after an interruption, {early} had diverged before it and did so again, "
        f"{sum(bool(cell.wrong) for cell in cells)} went wrong"
    )


def chosen(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The norms and the placements that the words of `--only` ask for; all where there is no word.

    Raises:
        ConfigError: A word is neither, or names none that there is.
    """
    every = {"norm": sorted(NORMS), "placement": list(PLACEMENTS)}
    asked: dict[str, list[str]] = {kind: [] for kind in every}
    for word in words:
        kind, _, name = word.partition("=")
        if kind not in every:
            raise ConfigError(f"--only {word}: " + unknown("word", kind, every))
        if name not in every[kind]:
            raise ConfigError(f"--only {word}: " + unknown(kind, name, every[kind]))
        asked[kind].append(name)
    norms, placements = ([name for name in every[kind] if name in (asked[kind] or every[kind])] for kind in every)
    return norms, placements


def main() -> int:
    """Run the pairs, two at a time, and print the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], help="norm=... and placement=... to try alone")
    parser.add_argument("--write", type=Path, help="a file to keep the matrix in")
    options = parser.parse_args()
    if options.only and options.write is not None:
        parser.error("--write keeps the whole matrix: leave out --only, or --write")
    register()
    try:
        norms, placements = chosen(options.only)
    except ConfigError as error:
        parser.error(str(error))
    pairs = [(norm, placement) for placement in placements for norm in norms]
    began = time.monotonic()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(pair, *zip(*pairs, strict=True), chunksize=4)
        cells: dict[tuple[str, str], Cell] = {}
        for number, (key, cell) in enumerate(zip(pairs, found, strict=True), start=1):
            cells[key] = cell
            if cell.wrong:
                print(f"{key[0]} {key[1]}: {cell.text}: {cell.wrong}", file=sys.stderr)
            if number % 50 == 0:
                print(f"{number} of {len(pairs)}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = f"{table(norms, placements, cells)}\n\n{summary(list(cells.values()))}."
    print(text)
    if options.write is not None:
        command = f"`scripts/matrix.py --write {options.write}`"
        about = f"Validation loss in nats per byte after {STEPS} steps of depth 4, by {command}. {setting()}"
        write_atomic(options.write, f"# Every norm in every placement\n\n{about}\n\n{text}\n".encode())
    nothing = all(cell.text == REFUSED for cell in cells.values())
    return int(nothing or any(cell.wrong for cell in cells.values()))


def setting() -> str:
    """What the numbers depend on."""
    words = " ".join(word for word in WORDS if "path" not in word)
    where = f"torch {torch.__version__} on a CPU, one thread"
    return f"{where}; `{words}`, the tests' corpus. One seed and few steps: signs of life, no ranking."


if __name__ == "__main__":
    sys.exit(main())
