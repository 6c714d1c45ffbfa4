"""Print how the estimators and criteria of studies behave where the truth is known, by simulation.

    python scripts/prove/study_characteristics.py [--draws 2000]

A simulated study is judged at each of its looks, and its result counts as wrong if it is wrong at any of them: coverage
of the confidence sequences of means and shares; false support by a criterion whose claim is false by a hair, and with
the choice of the learning rates; and the stated power against the share of simulated studies that are supported. Exits
with 1 if a number is outside its bounds.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from normlab.analysis.arms import CHOOSING_SEEDS, chosen_lrs
from normlab.studies.base import LEVEL, LOOKS, AtLeast, AtMost, Within
from normlab.studies.estimators import Estimate, contrast, over_seeds, share
from normlab.studies.judge import simulated_power
from normlab.studies.noise import deviation

SD = 0.02
"""Standard deviation over seeds, nats/token."""
MOST_BY_TUNING = 0.3
"""How often an arm with equal best loss may be judged worse because its rates are harder to choose: the page has it."""
Looks = list[Estimate]
"""The estimates of one study, at each look."""

NOISE: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.normal(0, 1, n),
    "t with 4 degrees of freedom": lambda rng, n: rng.standard_t(4, n) / math.sqrt(2),
    "skewed": lambda rng, n: rng.gamma(4, 0.5, n) - 2,
    "one outlier of four standard deviations in ten": lambda rng, n: _contaminated(rng, n),
}
"""Distributions over seeds, of mean 0 and standard deviation near 1."""


def _contaminated(rng: np.random.Generator, n: int) -> np.ndarray:
    signs = rng.choice([-1.0, 1.0], n)
    return np.where(rng.random(n) < 0.1, 4 * signs, rng.normal(0, 0.6, n))


def means(noise: str, mean: float, draws: int, seed: int) -> Iterator[Looks]:
    """Yield the estimates of the mean of simulated studies."""
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        values = (mean + SD * NOISE[noise](rng, LOOKS[-1])).tolist()
        yield [over_seeds({(k, k): value for k, value in enumerate(values[:n])}) for n in LOOKS]


def shares(p: float, draws: int, seed: int) -> Iterator[Looks]:
    for counts in np.random.default_rng(seed).random((draws, LOOKS[-1])):
        yield [share(int((counts[:n] < p).sum()), n) for n in LOOKS]


Shape = tuple[Sequence[float], Sequence[float]]
"""How much higher than the best the loss at each of four rates is, in SD, and the noise there, in SD."""
SHARP: Shape = ((15, 10, 0, 15), (1, 1, 1, 1))
"""An arm with one good rate."""


def equal_arms(shapes: Sequence[Shape], draws: int, seed: int, *, lowest: bool = False) -> Iterator[Looks]:
    """Yield the estimated differences of two arms of equal best losses, each at the rates that its first seeds choose.

    Args:
        shapes: Of the first arm, and of the second.
        lowest: Judge an arm at the lowest of its chosen rates, and not by its mean over them.
    """
    rng, rates = np.random.default_rng(seed), (3e-4, 1e-3, 3e-3, 1e-2)
    for _ in range(draws):
        arms = []
        for gaps, noise in shapes:
            loss, scale = 2.5 + SD * np.array(gaps), SD * np.array(noise)
            losses = loss[:, None] + scale[:, None] * rng.normal(0, 1, (len(rates), CHOOSING_SEEDS + LOOKS[-1]))
            first = {
                lr: {(k, k): float(x) for k, x in enumerate(row[:CHOOSING_SEEDS])}
                for lr, row in zip(rates, losses, strict=True)
            }
            best = rates[int(losses[:, :CHOOSING_SEEDS].mean(1).argmin())]
            chosen = chosen_lrs(best, first, ())[: 1 if lowest else None]
            arms.append(losses[[rates.index(lr) for lr in chosen], CHOOSING_SEEDS:].mean(0).tolist())
        yield [contrast([{(k, k): x for k, x in enumerate(arm[:n])} for arm in arms], (1.0, -1.0)) for n in LOOKS]


def excludes(estimate: Estimate, truth: float) -> bool:
    low, high = estimate.bounds
    return truth < low or high < truth


def ever(studies: Iterable[Looks], is_wrong: Callable[[Estimate], bool]) -> float:
    """Return the share of studies that are wrong at any look."""
    return float(np.mean([any(map(is_wrong, looks)) for looks in studies]))


def rows(draws: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield a name, the simulated share, and the bounds within which it must be."""
    limit = 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    for noise in NOISE:
        found = list(means(noise, 0.1, draws, 1))
        yield (
            f"true mean outside the interval at any look, {noise} noise",
            ever(found, lambda e: excludes(e, 0.1)),
            0,
            limit,
        )
        for criterion in (AtLeast(0.1), Within(-0.1, 0.1)):
            wrong = ever(found, lambda e, criterion=criterion: criterion.verdict(e.interval) == "supported")
            yield f"false support by {type(criterion).__name__} at any look, {noise} noise", wrong, 0, limit
    for p in (0.05, 0.5, 0.9):
        wrong = ever(shares(p, draws, 2), lambda e, p=p: excludes(e, p))
        yield f"true share of {p:g} outside the interval at any look", wrong, 0, limit
    lower, few = AtMost(0.0), draws // 2
    for gap, wider in ((0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (1.5, 1.0), (2.0, 1.0), (0.1, 6.0), (2.0, 3.0)):
        name = f"two learning rates {gap:g} standard deviations apart, the better one with {wider:g} times the noise"
        for lowest, most in ((False, 0.05 + 3 * math.sqrt(0.05 * 0.95 / few)), (True, 1.0)):
            found = equal_arms([((15, gap, 0, 15), (1, 1, wider, 1))] * 2, few, 3, lowest=lowest)
            wrong = ever(found, lambda e: lower.verdict(e.interval) == "supported")
            rule = "for comparison, at the lowest chosen rate" if lowest else "with the choice of the learning rates"
            yield f"false support of a lower loss at any look, {rule}, {name}", wrong, 0, most
    for gap, noise, count in ((0, 1, 1), (1, 1, 1), (2, 1, 1), (2, 3, 1), (2, 3, 2), (2, 3, 3), (3, 6, 3)):
        others = [(gap, noise) if index < count else (15, 1) for index in range(3)]
        gaps, noises = zip(*others[:2], (0, 1), *others[2:], strict=True)
        found = equal_arms([SHARP, (gaps, noises)], few, 3)
        name = f"{count} more rates that are {gap} standard deviations worse and {noise} times as noisy"
        wrong = ever(found, lambda e: lower.verdict(e.interval) == "supported")
        yield (
            f"support of a higher loss at any look of an arm with equal best loss and {name}",
            wrong,
            0,
            MOST_BY_TUNING,
        )
    rng = np.random.default_rng(8)
    losses = [deviation(each) for each in rng.normal(2.5, SD, (draws, 14)).tolist()]
    yield (
        "true standard deviation outside its interval, n=14",
        ever([[e] for e in losses], lambda e: excludes(e, SD)),
        0,
        limit,
    )
    for criterion, effect in ((AtLeast(0.05), 0.1), (AtLeast(0.05), 0.07), (Within(-0.03, 0.03), 0.0)):
        stated = simulated_power(effect, SD, criterion.limits, LEVEL * criterion.sides)
        found = ever(
            means("normal", effect, draws, 9),
            lambda e, criterion=criterion: criterion.verdict(e.interval) == "supported",
        )
        yield f"power of {criterion.text} at {effect:g}: stated {stated:.3f}", found, stated - 0.05, stated + 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="simulated studies (default: 2000)")
    bad = 0
    for name, found, low, high in rows(parser.parse_args().draws):
        holds = low <= found <= high
        bad += not holds
        print(f"{'ok  ' if holds else 'FAIL'}  {name}: {found:.3f} (must be {low:.3f} to {high:.3f})")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
