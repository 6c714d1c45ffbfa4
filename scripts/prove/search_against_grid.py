"""Compare a search for the learning rate with a grid of three times its tokens, in each of four cells.

    python scripts/prove/search_against_grid.py [--results-dir FOLDER] [--steps 300]

The cells are two norms at two depths. The grid has 12 learning rates from 1e-4 to 0.1 with 3 seeds each, and its choice
has the lowest mean loss among the rates at which every seed has learned; the search has 12 trials. Both choices are
judged with the same 8 other seeds. A row has the mean difference of the losses (search minus grid, paired by seed, with
its 95 % interval by t) beside the noise: the standard deviation between the grid's judged seeds. Exits with 1 if a
difference is larger than the noise. The same command resumes.
"""

import argparse
import sys
import tempfile
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

import normlab
from normlab.config.compose import quote

CELLS = ["norm=rmsnorm,layernorm", "placement=pre", "model.depth=2,8"]
LOW, HIGH, TRIALS, SEEDS = 1e-4, 1e-1, 12, 3
JUDGED = "seed=range(100,108)"
FACTORS = ["norm", "depth"]


def best_rates(grid: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Return the learning rate of the lowest mean loss in each cell."""
    learned = grid.groupby([*FACTORS, "lr"]).filter(lambda runs: (runs["state"] == "finished").all())
    # Any, because the result of a grouped mean has no single type in pandas.
    means: Any = learned.groupby([*FACTORS, "lr"])["val_loss"].mean()
    rates: dict[tuple[str, int], float] = {}
    for (norm, depth), cell in means.reset_index("lr").groupby(FACTORS):
        rates[norm, depth] = cell["lr"].iloc[cell["val_loss"].argmin()]
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results-dir", default=tempfile.mkdtemp(prefix="normlab-search-"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    common = [
        "model=gpt2_nano", f"train.steps={args.steps}", "eval.every=0", "stats=off", "sweep.pack=16", "sweep.jobs=2",
        "tracking.wandb=off", f"results_dir={quote(args.results_dir)}",
    ]  # fmt: skip
    sweep = partial(normlab.sweep, *common, retry_failed=True)
    rates = ",".join(f"{rate:.4g}" for rate in np.geomspace(LOW, HIGH, TRIALS))
    grid = sweep(*CELLS, f"optim.lr={rates}", f"seed=range({SEEDS})", "sweep.name=grid")
    arms = [
        f"{norm}_{depth}: norm={norm} model.depth={depth} optim.lr={rate:.4g}"
        for (norm, depth), rate in best_rates(grid).items()
    ]
    of_grid = sweep(f"arm=[{', '.join(arms)}]", "placement=pre", JUDGED, "sweep.name=grid-judged")
    search = [f"optim.lr=search({LOW},{HIGH})", f"sweep.trials={TRIALS}"]
    of_search = sweep(*CELLS, *search, JUDGED, "sweep.name=search")

    print(f"{'cell':>14} {'grid lr':>8} {'loss':>7} {'search lr':>9} {'loss':>7} {'difference':>22} {'noise':>6}")
    is_within = True
    for cell, runs in of_grid.groupby(FACTORS):
        assert isinstance(cell, tuple)
        norm, depth = cell
        first = runs.set_index("seed").sort_index()
        second = of_search.query("norm == @norm and depth == @depth").set_index("seed").loc[first.index]
        differences, noise = second["val_loss"] - first["val_loss"], first["val_loss"].std()
        mean, half = differences.mean(), stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
        is_within &= bool(mean <= noise)
        print(
            f"{f'{norm} {depth}':>14} {first['lr'].iloc[0]:8.3g} {first['val_loss'].mean():7.3f} "
            f"{second['lr'].iloc[0]:9.3g} {second['val_loss'].mean():7.3f} "
            f"{f'{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]':>22} {noise:6.3f}"
        )
    print(f"runs to choose the rate, each cell: grid {len(grid) // 4}, search {TRIALS}")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
