"""Print how the estimators and criteria of studies behave where the truth is known, by simulation.

    python scripts/prove/study_characteristics.py [--draws 4000]

Coverage of the 95 and 90 % intervals over seeds; the rate at which a criterion supports a claim that is false by a hair
(at most 2.5 % for a bound, 5 % for two one-sided tests); the size of Fisher's test; the false positives of the whole
procedure, with the choice of the learning rate; and the stated power against the share of simulated studies that are
supported. Exits with 1 if a number is outside its bounds.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import numpy as np
from scipy.stats import fisher_exact

from normlab.analysis.arms import CHOOSING_SEEDS, plausible_lrs
from normlab.studies.base import AtLeast, Claim, Within
from normlab.studies.estimators import Contrast, Estimate, over_rates, over_seeds
from normlab.studies.judge import power_of
from normlab.studies.noise import deviation

SD = 0.02
"""Standard deviation over seeds, nats/token."""


def estimates(mean: float, n: int, draws: int, seed: int) -> Iterator[Estimate]:
    """Yield the estimates of simulated studies with n seeds."""
    for values in np.random.default_rng(seed).normal(mean, SD, (draws, n)).tolist():
        yield over_seeds({(number, number): value for number, value in enumerate(values)})


def deviations(n: int, draws: int, seed: int) -> Iterator[Estimate]:
    """Yield the estimates of the standard deviation of n losses."""
    for losses in np.random.default_rng(seed).normal(2.5, SD, (draws, n)).tolist():
        yield deviation(losses)


def sensitivities(n: int, draws: int, seed: int) -> Iterator[Estimate]:
    """Yield the estimates of the sensitivity S from n seeds at seven learning rates, of which one is unstable."""
    rng, curve = np.random.default_rng(seed), np.array([0.5, 0.2, 0.05, 0.0, 0.1, 0.4, 2.0])
    for _ in range(draws):
        losses = 2.5 + curve + rng.normal(0, SD, (n, 7)) * np.array([1, 1, 1, 1, 2, 4, 10])
        yield over_seeds({(k, k): float(row.mean() - row.min()) for k, row in enumerate(np.minimum(losses, 5.5))})


def equal_arms(gap: float, n: int, draws: int, seed: int) -> Iterator[Estimate]:
    """Yield the estimated differences of two equal arms, each at the learning rate that its first two seeds prefer."""
    rng, rates = np.random.default_rng(seed), (3e-4, 1e-3, 3e-3, 1e-2)
    means = 2.5 + np.array([0.3, 0.0, gap, 0.3])
    for _ in range(draws):
        tables = []
        for _ in range(2):
            losses = means[:, None] + rng.normal(0, SD, (len(rates), n))
            by_rate = {
                rate: {(k, k): float(x) for k, x in enumerate(row)} for rate, row in zip(rates, losses, strict=True)
            }
            best = rates[int(losses[:, :CHOOSING_SEEDS].mean(1).argmin())]
            chosen = plausible_lrs(best, by_rate, ())
            tables.append({lr: {k: x for k, x in by_rate[lr].items() if k[0] >= CHOOSING_SEEDS} for lr in chosen})
        yield over_rates(tables, (1.0, -1.0))


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= truth <= estimate.high


def rows(draws: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield a name, the simulated share, and the bounds within which it must be."""
    noise = 3 * math.sqrt(0.05 * 0.95 / draws)
    for n in (3, 4, 6, 10):
        found = list(estimates(0.1, n, draws, n))
        yield f"coverage of 95 % intervals, n={n}", share(covers(e, 0.1) for e in found), 0.93, 0.97
        yield f"coverage of 90 % intervals, n={n}", share(e.low90 <= 0.1 <= e.high90 for e in found), 0.88, 0.92
        for criterion, size in ((AtLeast(0.1), 0.025), (Within(-0.1, 0.1), 0.05)):
            name = f"false support by {type(criterion).__name__}, n={n}"
            yield name, share(criterion.judge(e) == "supported" for e in found), 0.0, size + noise
    for n, p in ((6, 0.3), (20, 0.1), (20, 0.5)):
        rng = np.random.default_rng(n)
        pairs, counts = rng.binomial(n, p, (draws, 2)).tolist(), {}
        for a, b in set(map(tuple, pairs)):
            counts[a, b] = float(fisher_exact([[a, n - a], [b, n - b]]).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
        rejected = share(counts[a, b] < 0.05 for a, b in pairs)
        yield f"size of Fisher's test, n={n} and {n}, p={p}", rejected, 0.0, 0.05 + noise
    found = list(deviations(14, draws, 8))
    yield "coverage of the 95 % interval of a standard deviation, n=14", share(covers(e, SD) for e in found), 0.93, 0.97
    truth = float(np.mean([e.value for e in sensitivities(200, 200, 9)]))
    found = list(sensitivities(6, draws, 10))
    yield "coverage of the 95 % interval of S, n=6", share(covers(e, truth) for e in found), 0.93, 0.97
    for gap in (0.0, 0.5, 1.0):
        found = list(equal_arms(gap * SD, 8, draws // 4, 11))
        name = f"false positives with the choice of the learning rate, two rates {gap:g} standard deviations apart"
        yield name, share(e.p is not None and e.p < 0.05 for e in found), 0.0, 0.05 + noise
    for n, criterion, effect in ((4, AtLeast(0.05), 0.1), (6, AtLeast(0.05), 0.07), (8, Within(-0.03, 0.03), 0.0)):
        claim = Claim("power", "", Contrast({"": 1.0}), criterion, effect=effect)
        stated = power_of(claim, Estimate(effect, n=n, deviation=SD)) or math.nan
        found = share(criterion.judge(e) == "supported" for e in estimates(effect, n, draws, 100 + n))
        yield f"power of {criterion.text}, n={n}: stated {stated:.3f}", found, stated - 0.05, stated + 0.05


def share(conditions: Iterator[bool]) -> float:
    return float(np.mean(list(conditions)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000, help="simulated studies (default: 4000)")
    bad = 0
    for name, found, low, high in rows(parser.parse_args().draws):
        holds = low <= found <= high
        bad += not holds
        print(f"{'ok  ' if holds else 'FAIL'}  {name}: {found:.3f} (must be {low:.3f} to {high:.3f})")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
