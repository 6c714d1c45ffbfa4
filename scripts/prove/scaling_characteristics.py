"""Print how `normlab summarize --test scaling` behaves where the truth is known, by simulation.

    python scripts/prove/scaling_characteristics.py [--ladders 500] [--only TEXT]

Each ladder has two arms with known laws, at four sizes whose compute grows 81-fold, with losses and noise like those of
models of width 32 to 96 on bytes. Printed is how many of the 95 % intervals hold the true multiplier (at the smallest
and the largest size, and at 10 and 100 times the compute of the largest) and how wide these are, as the factor from the
middle to an end; how many forecasts of the largest size hold its loss; and how many ladders decide which arm needs less
compute. Exits with 1 if a number is outside its bounds: coverage of 92 to 98 %, and the noise of the simulation.
"""

import argparse
import math
import sys
from dataclasses import dataclass

import numpy as np

from normlab.analysis.intervals import LEVEL
from normlab.analysis.law_fit import log_multiplier
from normlab.analysis.scaling_laws import Estimated, Ladder, fit_laws, forecast_errors

E, ALPHA = 1.4, 0.12
LARGEST_ABOVE_E = 0.7
"""The loss of the baseline at the largest size, minus E."""
CORRELATION = 0.25
"""Of the losses of two arms with the same seed."""
POINTS = {"smallest": None, "largest": 1, "10 times": 10, "100 times": 100}
"""The compute at which multipliers are estimated, in that of the largest size."""


@dataclass(frozen=True)
class Case:
    """A kind of ladder."""

    name: str
    seeds: int = 4
    sd: float = 0.02
    """The standard deviation of the losses over seeds, nats/token."""
    multiplier: float = 1.0
    """The true multiplier of the second arm at the largest size."""
    alpha_ratio: float = 1.0
    """The exponent of the second arm over that of the first."""
    sizes: int = 4
    failing: float = 0.0
    """The share of seeds that diverge, which no law has."""
    noise_ratio: float = 1.0
    """The noise of the second arm over that of the first."""
    decided: tuple[float, float] = (0.0, 1.0)
    """The bounds of the share of ladders that decide which arm needs less compute at the largest size."""


CASES = [
    Case("equal laws", decided=(0.0, 0.08)),
    Case("equal laws, two seeds", seeds=2, decided=(0.0, 0.08)),
    Case("equal laws, three sizes", sizes=3, decided=(0.0, 0.08)),
    Case("equal laws, one seed in ten diverges", seeds=6, failing=0.1, decided=(0.0, 0.08)),
    Case("equal laws, one arm three times as noisy", noise_ratio=3.0, decided=(0.0, 0.08)),
    Case("1.5 times the compute", multiplier=1.5, decided=(0.8, 1.0)),
    Case("1.5 times the compute, one seed in ten diverges", multiplier=1.5, seeds=6, failing=0.1, decided=(0.8, 1.0)),
    Case("1.5 times the compute, growing with size", multiplier=1.5, alpha_ratio=1.1, decided=(0.8, 1.0)),
]


def true_parameters(case: Case) -> np.ndarray:
    """Return E, a and ln(alpha) of the two arms, at x = 0 for the largest size."""
    a = math.log(LARGEST_ABOVE_E)
    # At the largest size the second arm has the loss of the first with more compute.
    a_second = a - ALPHA * math.log(case.multiplier)
    return np.array([E, a, a_second, math.log(ALPHA), math.log(ALPHA * case.alpha_ratio)])


def draw_ladder(case: Case, rng: np.random.Generator) -> Ladder:
    x_K = np.linspace(-math.log(81), 0.0, case.sizes)
    _, *a, log_alpha, log_alpha_second = true_parameters(case)
    alpha = np.exp([log_alpha, log_alpha_second])
    laws_GK = E + np.exp(np.array(a)[:, None] - alpha[:, None] * x_K)
    shared = rng.normal(size=(1, case.sizes, case.seeds))
    own = rng.normal(size=(2, case.sizes, case.seeds))
    deviations = math.sqrt(CORRELATION) * shared + math.sqrt(1 - CORRELATION) * own
    sd_G = case.sd * np.array([1.0, case.noise_ratio])
    losses_GKS = laws_GK[:, :, None] + sd_G[:, None, None] * deviations
    losses_GKS[rng.random(losses_GKS.shape) < case.failing] = np.nan
    return Ladder(losses_GKS, np.stack([x_K, x_K]))


def bounds(estimate: Estimated) -> tuple[float, float]:
    if estimate.low is None or estimate.high is None:
        raise ValueError("an interval needs seeds that differ")
    return estimate.low, estimate.high


@dataclass(frozen=True)
class Characteristics:
    coverage: dict[str, float]
    """Of the multiplier, by the name of `POINTS`."""
    width: dict[str, float]
    """The median factor from the middle of an interval to its end."""
    decided: float
    forecast: float | None
    """The share of forecasts of the largest size that hold its loss; None with three sizes."""
    determined: float
    """The share of ladders whose arms both have a law."""


def simulate(case: Case, ladders: int, seed: int = 0) -> Characteristics:
    rng = np.random.default_rng(seed)
    truth = true_parameters(case)
    held: dict[str, list[bool]] = {name: [] for name in POINTS}
    widths: dict[str, list[float]] = {name: [] for name in POINTS}
    forecasts: list[bool] = []
    determined: list[bool] = []
    decisions: list[bool] = []
    for _ in range(ladders):
        ladder = draw_ladder(case, rng)
        laws = fit_laws(ladder)
        has_law = all(laws.is_determined_G)
        determined.append(has_law)
        # A ladder without laws has no multipliers, and decides nothing.
        if not has_law:
            decisions.append(False)
            continue
        for name, multiple in POINTS.items():
            x = ladder.x_GK.min() if multiple is None else math.log(multiple)
            found = laws.multiplier(1, 0, math.exp(x))
            low, high = bounds(found)
            true = math.exp(log_multiplier(truth, 2, 1, 0, x))
            held[name].append(low <= true <= high)
            widths[name].append(math.sqrt(high / low))
            if name == "largest":
                decisions.append(not low <= 1 <= high)
        if case.sizes > 3:
            for error in forecast_errors(ladder):
                low, high = bounds(error)
                forecasts.append(low <= 0 <= high)
    coverage = {name: float(np.mean(each)) for name, each in held.items()}
    width = {name: float(np.median(each)) for name, each in widths.items()}
    forecast = float(np.mean(forecasts)) if forecasts else None
    return Characteristics(coverage, width, float(np.mean(decisions)), forecast, float(np.mean(determined)))


def rows(case: Case, ladders: int) -> list[tuple[str, float, float, float]]:
    """Return a name, the simulated share, and its bounds."""
    found = simulate(case, ladders)

    def noise(share: float) -> float:
        return 2.5 * math.sqrt(share * (1 - share) / ladders)

    low, high = LEVEL - 0.03 - noise(LEVEL), LEVEL + 0.03 + noise(LEVEL)
    made: list[tuple[str, float, float, float]] = []
    for name, coverage in found.coverage.items():
        text = f"{case.name}: intervals at {name} hold the multiplier (width: factor {found.width[name]:.2f})"
        made.append((text, coverage, low, min(1.0, high)))
    if found.forecast is not None:
        made.append((f"{case.name}: forecasts hold the loss of the largest size", found.forecast, low, min(1.0, high)))
    least, most = case.decided
    made.append((f"{case.name}: decided", found.decided, least - noise(least), most + noise(most)))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladders", type=int, default=500, help="simulated ladders of each kind (default: 500)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds whose name has this text")
    options = parser.parse_args()
    bad = 0
    for case in CASES:
        if options.only not in case.name:
            continue
        for name, share, low, high in rows(case, options.ladders):
            holds = low <= share <= high
            bad += not holds
            print(f"{'ok  ' if holds else 'FAIL'}  {name}: {share:.3f} (must be {low:.3f} to {high:.3f})", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
