"""Print how the estimators and criteria of studies behave where the truth is known, by simulation.

    python scripts/prove/study_characteristics.py [--draws 2000]

A simulated study is judged at each of its looks, and its result counts as wrong if it is wrong at any of them: coverage
of the confidence sequences of typical values and shares; false support by a criterion whose claim is false by a hair;
false support because learning rates are chosen, at worst over a family of arms; and the stated power against the share
of simulated studies that are supported. Exits with 1 if a number is outside its bounds.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np

from normlab.analysis.arms import CHOOSING_SEEDS, chosen_lrs
from normlab.analysis.intervals import Replicate
from normlab.analysis.scaling_laws import Ladder, fit_laws
from normlab.analysis.sequences import log_wealth
from normlab.studies.base import LEVEL, LOOKS, SUPPORTED, UNDECIDED, AtLeast, Claim, Criterion, Within
from normlab.studies.estimate import Estimate, contrast, over_seeds, share
from normlab.studies.estimators import difference
from normlab.studies.judge import is_futile
from normlab.studies.noise import deviation
from normlab.studies.over_sizes import log_multipliers
from normlab.studies.power import simulated_power
from normlab.studies.simulations import FALSE_DIFFERENCES, MOST_AGAINST_A_SHARP_ARM, MOST_FALSE_DIFFERENCES

SD = 0.02
"""Standard deviation over seeds, nats/token."""
CENTER = 0.1
"""The typical value over seeds, nats/token."""
Looks = list[Estimate]
"""The estimates of one study, at each look."""

FAR = 20.0
"""How far off the seeds are that are off, in standard deviations of the others."""
Noise = Callable[[np.random.Generator, int], np.ndarray]


def of_two_arms(noise: Noise) -> Noise:
    """Return the noise of the difference of two arms that have the same noise."""
    return lambda rng, n: noise(rng, n) - noise(rng, n)


def partly_off(share: float) -> Noise:
    """Return normal noise with a share of seeds that are far off on one side, as seeds that learn late."""
    return lambda rng, n: rng.normal(0, 1, n) + FAR * (rng.random(n) < share)


NOISE: dict[str, Noise] = {
    "normal": lambda rng, n: rng.normal(0, 1, n),
    "t with 4 degrees of freedom": lambda rng, n: rng.standard_t(4, n),
    "of two exponential arms": of_two_arms(lambda rng, n: rng.exponential(1, n)),
    "of two arms with one seed in ten off": of_two_arms(partly_off(0.1)),
    "of two arms with one seed in five off": of_two_arms(partly_off(0.2)),
    "exponential, about its median": lambda rng, n: rng.exponential(1, n) - math.log(2),
    # The median of normal noise with a share p that is far above it is the normal quantile of 1 / (2 - 2 p).
    "with one seed in ten off, about its median": lambda rng, n: (
        partly_off(0.1)(rng, n) - NormalDist().inv_cdf(0.5 / 0.9)
    ),
}
"""Distributions over seeds of median 0. All but the last two are symmetric."""


def centers(noise: str, center: float, draws: int, seed: int) -> Iterator[Looks]:
    """Yield the estimates of the typical value in simulated studies."""
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        values = (center + SD * NOISE[noise](rng, LOOKS[-1])).tolist()
        yield [over_seeds({(k, k): value for k, value in enumerate(values[:n])}) for n in LOOKS]


def shares(p: float, draws: int, seed: int) -> Iterator[Looks]:
    for counts in np.random.default_rng(seed).random((draws, LOOKS[-1])):
        yield [share(int((counts[:n] < p).sum()), n) for n in LOOKS]


LOG_COMPUTE = 4 * np.log(np.array([12, 16, 24, 32]) / 32)
"""ln of the compute of four sizes over that of the largest: parameters and tokens grow as the width squared."""


def multipliers(multiplier: float, growth: float, draws: int) -> Iterator[tuple[Looks, Looks]]:
    """Yield the estimates of ln of a compute multiplier at the largest size, and of ln of its growth.

    Its logarithm is linear in that of the compute. One seed in ten has not learned at each size, in each arm.
    """
    rng = np.random.default_rng(7)

    def losses_at(log_compute: float, seeds: int) -> dict[Replicate, float]:
        losses = 0.8 + 1.2 * math.exp(-0.12 * log_compute) + rng.normal(0, SD, seeds)
        losses[rng.random(seeds) < 0.1] = math.inf
        return {(seed, seed): loss for seed, loss in enumerate(losses.tolist())}

    smallest, largest = float(LOG_COMPUTE[0]), float(LOG_COMPUTE[-1])
    log_multiplier = {largest: math.log(multiplier), smallest: math.log(multiplier / growth)}
    for _ in range(draws):
        choosing = np.array([[*losses_at(x, CHOOSING_SEEDS).values()] for x in LOG_COMPUTE])
        law = fit_laws(Ladder(np.where(np.isfinite(choosing), choosing, np.nan)[None], LOG_COMPUTE[None]))
        values: list[dict[Replicate, float]] = []
        for x in (largest, smallest):
            arm = losses_at(x + log_multiplier[x], LOOKS[-1])
            values.append(log_multipliers(arm, losses_at(x, LOOKS[-1]), law))
        at_looks: Looks = []
        growth_at_looks: Looks = []
        for n in LOOKS:
            seeds: list[Replicate] = [(seed, seed) for seed in range(n)]
            tables = [{seed: table[seed] for seed in seeds} for table in values]
            at_looks.append(contrast(tables[:1], [1.0]))
            growth_at_looks.append(contrast(tables, [1.0, -1.0]))
        yield at_looks, growth_at_looks


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm with one best learning rate and others near it, of normal losses that are independent over rates."""

    others: int
    """How many other rates it has; any further rate is so much worse that it is never chosen."""
    gap: float
    """How much higher than the best the loss at each of them is, in standard deviations over seeds of the best."""
    noise: float
    """The standard deviation over seeds at each of them, as a multiple of that of the best."""


OTHERS, GAPS, NOISES = (1, 2, 3, 4, 5, 6), (0.0, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0)
"""The family of arms. Most grids of the studies have five or seven rates, so that at most six are near the best one. In
the study noise, of two rates with nearly the same loss the higher one has up to three times the noise."""
SHARP = Arm(0, 0.0, 1.0)


def judged_losses(arm: Arm, draws: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses by which studies judge an arm, in standard deviations, of shape (draws, judging seeds).

    Those are the means over the chosen rates, and for comparison the losses at the first chosen rate of the grid.
    """
    # The best rate is the last of the grid, so that it is not the first chosen one.
    gaps = np.array([*[arm.gap] * arm.others, 0.0])
    noises = np.array([*[arm.noise] * arm.others, 1.0])
    losses = rng.normal(gaps[:, None], noises[:, None], (draws, len(gaps), CHOOSING_SEEDS + LOOKS[-1]))
    is_chosen = np.array([chosen_rates(each) for each in losses[:, :, :CHOOSING_SEEDS]])
    judging = losses[:, :, CHOOSING_SEEDS:]
    mean = (judging * is_chosen[:, :, None]).sum(1) / is_chosen.sum(1)[:, None]
    return mean, judging[np.arange(draws), is_chosen.argmax(1)]


def chosen_rates(losses: np.ndarray) -> np.ndarray:
    """Return whether each rate is chosen, by the losses of the choosing seeds, of shape (rates, seeds)."""
    best = float(losses.mean(1).argmin())
    by_seed: dict[float, dict[Replicate, float]] = {}
    for rate, row in enumerate(losses.tolist()):
        by_seed[float(rate)] = {(seed, seed): loss for seed, loss in enumerate(row)}
    return np.isin(np.arange(len(losses)), chosen_lrs(best, by_seed, ()))


def finds_lower(differences: np.ndarray) -> float:
    """Return the share of studies that at any look find a difference below 0; of shape (draws, judging seeds)."""
    logs = log_wealth(differences, 0.0)
    found = np.zeros(len(differences), bool)
    for n in LOOKS:
        found |= (logs[:, n - 1] >= -math.log(LEVEL)) & (np.median(differences[:, :n], 1) < 0)
    return float(found.mean())


def choice_of_rates(draws: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield what the choice of the learning rates does at worst over the gaps, for each number of rates and noise."""
    rng = np.random.default_rng(3)
    for noise, others in itertools.product(NOISES, OTHERS):
        equal, at_first, sharp = {}, {}, {}
        for gap in GAPS:
            arm = Arm(others, gap, noise)
            (a, first_a), (b, first_b) = judged_losses(arm, draws, rng), judged_losses(arm, draws, rng)
            alone, _ = judged_losses(SHARP, draws, rng)
            equal[gap] = (finds_lower(a - b) + finds_lower(b - a)) / 2
            at_first[gap] = (finds_lower(first_a - first_b) + finds_lower(first_b - first_a)) / 2
            sharp[gap] = finds_lower(alone - a)
        most_equal = FALSE_DIFFERENCES.get((others, noise), MOST_FALSE_DIFFERENCES[noise])
        for name, shares, most in (
            ("one of two equal arms has a lower loss", equal, most_equal),
            ("for comparison, at the lowest chosen rate: one of two equal arms has a lower loss", at_first, 1.0),
            ("an arm has a higher loss than one of equal best loss", sharp, MOST_AGAINST_A_SHARP_ARM[noise]),
        ):
            gap = max(shares, key=shares.__getitem__)
            limit = most + 3 * math.sqrt(most * (1 - most) / draws)
            near = f"{others} near its best rate, {gap:g} standard deviations worse, {noise:g} times as noisy"
            yield f"{name} (at worst: {near})", shares[gap], 0, limit


def excludes_center(estimate: Estimate) -> bool:
    return excludes(estimate, CENTER)


def supports(criterion: Criterion, estimate: Estimate) -> bool:
    return criterion.verdict(estimate.interval) == "supported"


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
        tests: dict[str, Callable[[Estimate], bool]] = {"true typical value outside the interval": excludes_center}
        for criterion in (AtLeast(CENTER), Within(-CENTER, CENTER)):
            tests[f"false support by {type(criterion).__name__}"] = partial(supports, criterion)
        wrong = dict.fromkeys(tests, 0)
        for looks in centers(noise, CENTER, draws, 1):
            for name, is_wrong in tests.items():
                wrong[name] += any(map(is_wrong, looks))
        for name, count in wrong.items():
            yield f"{name} at any look, noise {noise}", count / draws, 0, limit
    for p in (0.05, 0.5, 0.9):
        wrong = ever(shares(p, draws, 2), lambda e, p=p: excludes(e, p))
        yield f"true share of {p:g} outside the interval at any look", wrong, 0, limit
    yield from rows_of_multipliers(draws // 5)
    yield from choice_of_rates(draws)
    rng = np.random.default_rng(8)
    losses = [deviation(each) for each in rng.normal(2.5, SD, (draws, 14)).tolist()]
    yield (
        "true standard deviation outside its interval, n=14",
        ever([[e] for e in losses], lambda e: excludes(e, SD)),
        0,
        limit,
    )
    for criterion, effect in ((AtLeast(0.05), 0.1), (AtLeast(0.05), 0.07), (Within(-0.02, 0.02), 0.0)):
        stated = simulated_power(effect, SD, criterion.limits, LEVEL * criterion.sides)
        low, high = stated - 0.05, stated + 0.05
        name = f"power of {criterion.text} at {effect:g}: stated {stated:.3f}"
        yield name, ever(centers("normal", effect, draws, 9), partial(supports, criterion)), low, high
        # Each look simulates the looks after it, which takes time.
        studies = list(centers("normal", effect, draws // 5, 9))
        supported = sum(is_supported_before_it_stops(criterion, looks) for looks in studies)
        yield f"{name}, of studies that stop where more seeds are futile", supported / len(studies), low, high


def rows_of_multipliers(draws: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield how often intervals exclude a true multiplier, and find one of 1.5, with the error of the law in them."""
    limit = 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    for multiplier, growth in ((1.0, 1.0), (1.5, 1.0), (1.5, 1.5)):
        of_multiplier, of_growth = zip(*multipliers(multiplier, growth, draws), strict=True)
        wrong = ever(of_multiplier, partial(excludes, truth=math.log(multiplier)))
        yield f"true multiplier of {multiplier:g} outside its interval at any look", wrong, 0, limit
        wrong = ever(of_growth, partial(excludes, truth=math.log(growth)))
        yield f"true growth of {growth:g} of this multiplier outside its interval at any look", wrong, 0, limit
        if multiplier > 1:
            found = ever(of_multiplier, partial(supports, AtLeast(0.0)))
            yield f"multiplier of {multiplier:g} found to be above 1", found, 0.8, 1


def is_supported_before_it_stops(criterion: Criterion, looks: Looks) -> bool:
    """Return whether a study supports a claim at the last look that it takes."""
    claim = Claim("claim", "It is.", difference("norm=rmsnorm", "norm=layernorm"), criterion)
    for estimate in looks:
        verdict = criterion.verdict(estimate.interval)
        if verdict != UNDECIDED or is_futile(claim, estimate, LOOKS[-1] - estimate.n):
            return verdict == SUPPORTED
    return False


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
