"""Print how the estimators and criteria of studies behave where the truth is known, by simulation.

    python scripts/study_characteristics.py [--draws 4000]

Coverage of the 95 and 90 % intervals over seeds; the rate at which a criterion supports a claim that is false by a hair
(at most 2.5 % for a bound, 5 % for two one-sided tests); the size of Fisher's test; and the stated power against the
share of simulated studies that are supported. Exits with 1 if a number is outside its bounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import numpy as np
from scipy.stats import fisher_exact

from normlab.studies.base import AtLeast, Claim, Within
from normlab.studies.estimators import Contrast, Estimate, over_seeds
from normlab.studies.judge import power_of

SD = 0.02
"""Standard deviation over seeds, nats/token."""


def estimates(mean: float, n: int, draws: int, seed: int) -> Iterator[Estimate]:
    """Yield the estimates of simulated studies with n seeds."""
    for values in np.random.default_rng(seed).normal(mean, SD, (draws, n)).tolist():
        yield over_seeds({(number, number): value for number, value in enumerate(values)})


def rows(draws: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield a name, the simulated share, and the bounds within which it must be."""
    noise = 3 * math.sqrt(0.05 * 0.95 / draws)
    for n in (3, 4, 6, 10):
        found = list(estimates(0.1, n, draws, n))
        yield f"coverage of 95 % intervals, n={n}", share(e.low <= 0.1 <= e.high for e in found), 0.93, 0.97
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
    for n, criterion, effect in ((4, AtLeast(0.05), 0.1), (6, AtLeast(0.05), 0.07), (8, Within(-0.03, 0.03), 0.0)):
        claim = Claim("power", "", Contrast({"": 1.0}), criterion, effect=effect)
        stated = power_of(claim, Estimate(effect, n=n, deviation=SD)) or math.nan
        found = share(criterion.judge(e) == "supported" for e in estimates(effect, n, draws, 100 + n))
        yield f"power of {criterion.text}, n={n}: stated {stated:.3f}", found, stated - 0.05, stated + 0.05


def share(conditions: Iterator[bool]) -> float:
    return float(np.mean(list(conditions)))


def main() -> int:
    """Print a line for each property."""
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
