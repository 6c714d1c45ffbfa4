"""Compare the recorded streams and gradients of pre-norm and post-norm at depth 24.

    python scripts/signatures.py            # trains both on the default corpus: ten minutes on two CPU cores
    python scripts/signatures.py --write results/signatures.md

`normlab train` trains the two runs (a finished run is reused); the script reads only their records. It prints a table,
and exits with 1 if a signature is absent:

- pre: the stream grows with every block, and more in training (Xiong et al. 2020, arXiv:2002.04745); gradients are not
  larger in the last block than in the first;
- post: the stream after every block equals its norm's gain; gradients are larger in the last blocks, those of weights
  already at initialisation (the same paper), and vanish in the first blocks when it trains at pre-norm's learning rate.

The stream's gradient is compared from block 2 on, since no norm scales the input of block 1 in post-norm. There is one
seed each, so that ratios at initialisation vary by a factor of two; only whether they exceed 1 is tested.

Shapes: S measured steps, L blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from normlab.report.tables import render
from normlab.stats.profiles import Array, Profiles
from normlab.stats.registry import values_of
from normlab.stats.statistic import CORE
from normlab.store.files import write_atomic
from normlab.store.runs import RunFolder

PLACEMENTS = ("pre", "post")
WEIGHTS = ("grad_norm", "mlp.down.weight")
PROFILES = (("resid_rms", ""), ("dresid_rms", ""), WEIGHTS, ("adj_cos", ""))
"""Statistics and their sites."""
OVERRIDES = ["norm=rmsnorm", "tracking.wandb=off", "optim.lr=1e-3", "eval.every=0"]


def train_run(placement: str, args: argparse.Namespace) -> RunFolder:
    """Return the run of a placement."""
    from normlab.config.compose import compose_run
    from normlab.training.start import train

    overrides = [f"placement={placement}", f"model.depth={args.depth}", f"train.steps={args.steps}", *OVERRIDES]
    config = compose_run([*overrides, f"results_dir={args.results}"])
    print(f"normlab train {' '.join(overrides)}", file=sys.stderr, flush=True)
    return train(config).folder


def measured_times(profiles: Profiles, warmup: int) -> dict[str, int]:
    """Return the index of the measured step at initialisation, after warm-up and at the end."""
    last = len(profiles.steps) - 1
    return {"at init": 0, "after warm-up": min(int(np.searchsorted(profiles.steps, warmup)), last), "at the end": last}


def profile(profiles: Profiles, statistic: tuple[str, str], index: int) -> tuple[list[int], Array]:
    """Return the layers of a statistic and its values, at one measured step."""
    name, site = statistic
    values = values_of(profiles, name)[site]
    layers = np.flatnonzero(~np.isnan(values[index]))
    return layers.tolist(), values[index][layers]


def signatures(profiles_of: dict[str, Profiles], warmup: int) -> Iterator[tuple[str, str, float, bool]]:
    """Yield (claim, expected, measured, whether it holds)."""
    pre, post = (profiles_of[name] for name in PLACEMENTS)
    init, trains, end = measured_times(pre, warmup).values()
    streams = profile(pre, ("resid_rms", ""), init)[1]
    least = float((streams[1:] / streams[:-1]).min())
    yield (
        "pre, at init: smallest ratio of the stream after a block to the stream before it",
        "above 1",
        least,
        least > 1,
    )
    for when, index in (("after warm-up", trains), ("at the end", end)):
        streams = profile(pre, ("resid_rms", ""), index)[1]
        grown = float(streams[-1] / streams[0])
        yield f"pre, {when}: the stream at the head over the stream at block 1", "above 2", grown, grown > 2
    for when, index in (("at init", init), ("at the end", end)):
        streams = profile(post, ("resid_rms", ""), index)[1][1:]
        spread = float(streams.max() / streams.min())
        yield f"post, {when}: the largest stream after a block over the smallest", "below 1.5", spread, spread < 1.5
    for when, index, least in (("at init", init, 1), ("after warm-up", trains, 10), ("at the end", end, 10)):
        for placement, profiles in profiles_of.items():
            sizes = profile(profiles, WEIGHTS, index)[1]
            claim = f"{placement}, {when}: the gradient of {WEIGHTS[1]} in the last block over the first"
            yield _gradient_claim(claim, placement, float(sizes[-1] / sizes[0]), least)
    for when, index in (("after warm-up", trains), ("at the end", end)):
        for placement, profiles in profiles_of.items():
            sizes = profile(profiles, ("dresid_rms", ""), index)[1]
            claim = f"{placement}, {when}: the stream's gradient at the head over its gradient at block 2"
            yield _gradient_claim(claim, placement, float(sizes[-1] / sizes[1]), 10)


def _gradient_claim(claim: str, placement: str, ratio: float, least: float) -> tuple[str, str, float, bool]:
    """Return the claim that gradients are larger in the last block for post-norm, and smaller for pre-norm."""
    if placement == "post":
        return claim, f"above {least}", ratio, ratio > least
    return claim, "below 1", ratio, ratio < 1


def table(profiles_of: dict[str, Profiles], warmup: int) -> list[dict[str, Any]]:
    """Return rows with the first, middle and last layer of every profile."""
    rows = []
    for statistic in PROFILES:
        for placement, profiles in profiles_of.items():
            for when, index in measured_times(profiles, warmup).items():
                layers, values = profile(profiles, statistic, index)
                indices = [0, (len(layers) - 1) // 2, -1]
                labels = ("first", "middle", "last")
                numbers = {label: f"{values[at]:.3g}" for label, at in zip(labels, indices, strict=True)}
                rows.append({"statistic": " ".join(statistic).strip(), "placement": placement, "when": when, **numbers})
    return rows


def header(args: argparse.Namespace, run: dict[str, Any]) -> str:
    """Return the header of the Markdown file."""
    overrides = f"model.depth={args.depth} train.steps={args.steps} {' '.join(OVERRIDES)}"
    return f"""# Pre-norm and post-norm, by their statistics

By `scripts/signatures.py --depth {args.depth} --steps {args.steps} --write {args.write.name}`.

`normlab train placement=pre {overrides}` and the same with `placement=post`; torch {run["versions"]["torch"]},
one seed each. `normlab inspect RUN resid_rms` draws any of these profiles in the terminal.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=24, help="at least 3")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    parser.add_argument("--results", default="results", help="results folder (default: results)")
    parser.add_argument("--write", type=Path, default=None, help="write the tables to this Markdown file")
    args = parser.parse_args()
    if args.depth < 3:
        parser.error(f"--depth {args.depth}: too small for a profile; choose 3 or more")
    profiles_of: dict[str, Profiles] = {}
    warmup, folder = 0, RunFolder(Path())
    for placement in PLACEMENTS:
        folder = train_run(placement, args)
        warmup = folder.run()["config"]["optim"]["warmup_steps"]
        parts, damaged = folder.statistics.read(CORE)
        if len(parts) != 1 or damaged:
            print(f"{folder.path}: was resumed with other options or is damaged; delete it", file=sys.stderr)
            return 2
        profiles_of[placement] = parts[0]
    claims = list(signatures(profiles_of, warmup))
    rows = [
        {"claim": claim, "expected": expected, "measured": f"{value:.3g}", "": "holds" if holds else "DOES NOT HOLD"}
        for claim, expected, value, holds in claims
    ]
    text = f"{render(rows, 'markdown')}\n\n{render(table(profiles_of, warmup), 'markdown')}"
    print(text)
    if args.write is not None:
        write_atomic(args.write, header(args, folder.run()).encode() + text.encode() + b"\n")
    return int(not all(holds for *_, holds in claims))


if __name__ == "__main__":
    sys.exit(main())
