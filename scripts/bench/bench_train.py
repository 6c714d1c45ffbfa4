"""Compare the speed of normlab's training on a CPU with a plain PyTorch loop over the same model, and with nanoGPT.

    python scripts/bench/bench_train.py                    # some minutes on two CPU cores
    python scripts/bench/bench_train.py --compile --packs 8 16 --nanogpt DIR
    python scripts/bench/bench_train.py --check            # exit 1 below the limits

All sides (`sides.py`) train the same shapes on the same text, and take turns of 10 steps. A ratio is the median over
the rounds of the other side's ms/step per run over this side's: 1 is equal, more is faster. The CPU times (all threads
of a process) exclude the waiting for a core. On busy cores, where two threads wait for each other, `OMP_NUM_THREADS=1`
is steadier. GPUs: `scripts/gpu`.
"""

import argparse
import logging
import os
import statistics
import sys
from typing import Any

import nanogpt
import torch
from sides import AS_NORMLAB, MODELS, NanoGPT, Normlab, PlainLoop, Training, describe
from turns import Side, table, take_turns

from normlab.config.compose import compose_run
from normlab.training.machine import resolve

LIMITS = {"plain loop": 0.95, "nanoGPT": 1 / 1.02}
"""Least ratio of a single run of normlab to each baseline."""
WITHOUT_LIMITS = {("2x32", "plain loop"), ("6x384", "nanoGPT")}
"""Comparisons without a limit; a step of the smallest model is mostly overhead."""
COLUMNS = {
    "batch": "batch", "side": "side", "ms_per_step_and_run": "ms/step per run", "quartiles": "quartiles (ms/step)",
    "cpu_ms_per_step_and_run": "CPU ms", "setup_s": "set-up s", "plain loop": "/ plain loop", "nanoGPT": "/ nanoGPT",
}  # fmt: skip


def works_of(model: str, compiled: bool, options: argparse.Namespace) -> dict[str, Training]:
    overrides = (*MODELS[model], "device=cpu")
    works: dict[str, Training] = {"plain loop": PlainLoop(overrides, compiled)}
    if options.nanogpt is not None:
        works["nanoGPT"] = NanoGPT(overrides, compiled, clone=options.nanogpt)
    works["normlab"] = Normlab(overrides, compiled)
    return works | {f"normlab, pack of {runs}": Normlab(overrides, compiled, runs=runs) for runs in options.packs}


def measure(works: dict[str, Training], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each side, with its ratios to the baselines."""
    sides = {name: Side(name, work, AS_NORMLAB if isinstance(work, Normlab) else {}) for name, work in works.items()}
    try:
        for side in sides.values():
            side.set_up()
        take_turns([*sides.values()], rounds)
    finally:
        for side in sides.values():
            side.stop()
    rows = [describe(side, works[name]) for name, side in sides.items()]
    for row in rows:
        for baseline in LIMITS.keys() & works.keys() - {row["side"]}:
            pairs = zip(sides[baseline].turns, sides[row["side"]].turns, strict=True)
            row[baseline] = statistics.median(row["runs"] * theirs.seconds / ours.seconds for theirs, ours in pairs)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default: 15)")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS], help="models (default: all)")
    parser.add_argument("--packs", nargs="*", type=int, default=[], help="sizes of packs (default: none)")
    nanogpt.add_option(parser, " to compare with")
    parser.add_argument("--check", action="store_true", help="exit 1 below the limits")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    here = resolve(compose_run(["device=cpu"]))
    commit = "" if options.nanogpt is None else f", nanoGPT {nanogpt.commit_of(options.nanogpt)[:12]}"
    print(
        f"torch {torch.__version__}, {here.precision}, {here.threads} threads, {here.instructions}{commit}; "
        f"load before: {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    slow: list[str] = []
    for model in options.models:
        for compiled in (False, True) if options.compile else (False,):
            rows = measure(works_of(model, compiled, options), options.rounds)
            kind = "compiled" if compiled else "eager"
            print(f"\n{model}, {kind}\n\n{table(rows, COLUMNS)}", flush=True)
            (single,) = (row for row in rows if row["side"] == "normlab")
            slow += [
                f"{model}, {kind}: {single[name]:.3f} of {name}, limit {limit:.2f}"
                for name, limit in LIMITS.items()
                if single.get(name, limit) < limit and (model, name) not in WITHOUT_LIMITS
            ]
    print("\n".join(["", *(f"BELOW THE LIMIT: {line}" for line in slow), f"load after: {os.getloadavg()[0]:.1f}"]))
    return int(options.check and bool(slow))


if __name__ == "__main__":
    sys.exit(main())
