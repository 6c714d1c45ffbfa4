"""Estimators over models of several sizes: the compute that an arm saves, and whether a law forecasts the largest size.

The law of an arm is L(C) = E + A C^-alpha, with the FLOPs of training C (`analysis/scaling_laws.py`). It is fitted to
the choosing seeds only, so that each judging seed has a number of its own that depends on no other judging seed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from normlab.analysis.arms import Arm, StudyRuns
from normlab.analysis.contrasts import weighted_sums
from normlab.analysis.intervals import Replicate
from normlab.analysis.ladders import FEWEST_SIZES
from normlab.analysis.scaling_laws import Ladder, Laws, fit_laws
from normlab.base.errors import ConfigError
from normlab.store.record import RunRecord
from normlab.studies.estimate import (
    Estimate,
    Estimator,
    contrast,
    exponential,
    ln_of_ratio,
    mean_over_rates,
    outcomes,
)
from normlab.studies.measures import FINAL_LOSS


@dataclass(frozen=True, slots=True)
class Multiplier(Estimator):
    """The compute multiplier of an arm against a baseline at the largest size, as a typical value over seeds.

    A multiplier of 1.2 means that the baseline needs 1.2 times the compute for the same loss. With the losses L_g of
    the arm and L_b of the baseline of the same seed, and their compute C_g and C_b,

        ln m = (ln(L_b - E) - ln(L_g - E)) / alpha + ln(C_b / C_g)

    where E and alpha are those of the baseline's law, fitted to the choosing seeds. A loss is the mean over the chosen
    learning rates of a size. Seeds are left out of which a run has not learned, or whose loss is E or less. The
    interval does not have the error of E and alpha; that changes no sign where the arms have equal compute. With
    `growth`, the multiplier at the largest size over that at the smallest.
    """

    where: str
    baseline: str
    over: str = "model.width"
    """The full name of the option that sets the size."""
    growth: bool = False

    @property
    def text(self) -> str:
        return f"{self.quantity}, typical value over seeds: [{self.where}] against [{self.baseline}]"

    @property
    def quantity(self) -> str:
        if self.growth:
            return f"compute multiplier at the largest {self.over} over that at the smallest"
        return f"compute multiplier at the largest {self.over}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        pairs = self._pairs(runs)
        arms = [*chain.from_iterable(pairs)]
        rates = {arm.where: arm.chosen_lrs for arm in arms}
        law = self._law(runs)
        if law is None:
            return Estimate(math.nan, rates=rates)
        estimate = contrast(_log_multipliers(pairs, law, Arm.judged), self._weights)
        judged = [*chain.from_iterable(arm.judged() for arm in arms)]
        return exponential(replace(estimate, rates=rates, **outcomes(judged)))

    @property
    def has_power(self) -> bool:
        return True

    def pilot(self, runs: StudyRuns) -> list[float]:
        law = self._law(runs)
        if law is None:
            return []
        return [*weighted_sums(self._weights, _log_multipliers(self._pairs(runs), law, _choosing_runs)).values()]

    def on_symmetric_scale(self, value: float) -> float:
        return ln_of_ratio(value)

    @property
    def _weights(self) -> list[float]:
        return [1.0, -1.0] if self.growth else [1.0]

    def _pairs(self, runs: StudyRuns) -> list[tuple[Arm, Arm]]:
        """Return the arm and the baseline at the largest size, with `growth` also at the smallest."""
        sizes, baseline_sizes = _sizes(runs, self.where, self.over), _sizes(runs, self.baseline, self.over)
        pairs = [(runs.arm(sizes[-1]), runs.arm(baseline_sizes[-1]))]
        if self.growth:
            pairs.append((runs.arm(sizes[0]), runs.arm(baseline_sizes[0])))
        return pairs

    def _law(self, runs: StudyRuns) -> Laws | None:
        return _law([runs.arm_to_choose(size) for size in _sizes(runs, self.baseline, self.over)])


@dataclass(frozen=True, slots=True)
class ForecastError(Estimator):
    """The loss of an arm at its largest size minus its forecast by a law, as a typical value over seeds.

    The law is fitted to the choosing seeds of the smaller sizes: the forecast is one number, which is known before a
    judging seed is trained. The estimate is of the error of this forecast.
    """

    where: str
    over: str = "model.width"
    """The full name of the option that sets the size."""

    @property
    def text(self) -> str:
        return f"{self.quantity}, typical value over seeds: [{self.where}]"

    @property
    def quantity(self) -> str:
        return f"loss at the largest {self.over} minus its forecast from the smaller ones, nats/token"

    def estimate(self, runs: StudyRuns) -> Estimate:
        *smaller, largest = _sizes(runs, self.where, self.over)
        arm = runs.arm(largest)
        rates = {arm.where: arm.chosen_lrs}
        law = _law([runs.arm_to_choose(size) for size in smaller])
        judged = arm.judged()
        if law is None or not judged:
            return Estimate(math.nan, rates=rates)
        forecast = law.loss(0, _compute(judged)).value
        losses = mean_over_rates(FINAL_LOSS, judged)
        errors = {seed: loss - forecast for seed, loss in losses.items()}
        return replace(contrast([errors], [1.0]), rates=rates, **outcomes(judged))


def _sizes(runs: StudyRuns, where: str, over: str) -> list[str]:
    """Return the conditions of an arm at each size, the smallest first.

    Raises:
        ConfigError: There are too few sizes for a law with one size held out.
    """
    levels = runs.levels(where, over)
    if len(levels) <= FEWEST_SIZES:
        raise ConfigError(f"a law of the arm {where} needs more than {FEWEST_SIZES} values of {over}; add one")
    sizes: list[str] = []
    for level in levels:
        # All digits: the condition must select the level exactly.
        size = f"{over}={level:.17g}"
        sizes.append(f"{where},{size}" if where else size)
    return sizes


def _law(arms: Sequence[Arm]) -> Laws | None:
    """Return the law of the choosing seeds of an arm, given at each size; None before they are trained.

    Raises:
        ConfigError: No choosing seed of a size has learned, or their losses determine no law.
    """
    tables: list[dict[Replicate, float]] = []
    log_compute: list[float] = []
    for arm in arms:
        runs = _choosing_runs(arm)
        losses: dict[Replicate, float] = {}
        for seed, loss in mean_over_rates(FINAL_LOSS, runs).items():
            if math.isfinite(loss):
                losses[seed] = loss
        if not runs:
            return None
        if not losses:
            raise ConfigError(f"no choosing seed of [{arm.where}] has learned")
        tables.append(losses)
        log_compute.append(math.log(_compute(runs)))
    seeds = sorted(set().union(*tables))
    losses_KS = [[losses.get(seed, math.nan) for seed in seeds] for losses in tables]
    laws = fit_laws(Ladder(np.array([losses_KS]), np.array([log_compute])))
    if not all(laws.is_determined_G):
        raise ConfigError(f"the choosing seeds of [{arms[0].where}] and larger ones determine no law")
    return laws


def _choosing_runs(arm: Arm) -> list[RunRecord]:
    """Return the runs of the choosing seeds at the chosen learning rates."""
    runs: list[RunRecord] = []
    for lr in arm.chosen_lrs:
        runs += arm.choice.runs_at(lr)
    return runs


def _log_multipliers(
    pairs: Sequence[tuple[Arm, Arm]], law: Laws, runs_of: Callable[[Arm], Sequence[RunRecord]]
) -> list[dict[Replicate, float]]:
    """Return ln of the compute multiplier of each seed for pairs of an arm and its baseline.

    `runs_of` selects the runs of an arm: those of the judging seeds, or of the choosing ones.
    """
    tables: list[dict[Replicate, float]] = []
    for pair in pairs:
        runs, baseline_runs = map(runs_of, pair)
        # Nothing has been judged yet.
        if not runs or not baseline_runs:
            return [{} for _ in pairs]
        losses = mean_over_rates(FINAL_LOSS, runs), mean_over_rates(FINAL_LOSS, baseline_runs)
        log_cost = math.log(_compute(baseline_runs) / _compute(runs))
        tables.append(log_multipliers(*losses, law, log_cost))
    return tables


def log_multipliers(
    losses: Mapping[Replicate, float], baseline_losses: Mapping[Replicate, float], law: Laws, log_cost: float = 0.0
) -> dict[Replicate, float]:
    """Return ln of the compute multiplier of each seed; infinite where it is not defined.

    Args:
        losses: The loss of each seed of the arm; infinite for one that has not learned.
        baseline_losses: The same of the baseline.
        law: The law of the baseline.
        log_cost: ln of the baseline's compute over that of the arm.
    """
    [e], [alpha] = law.of_e(), law.of_alpha()
    multipliers: dict[Replicate, float] = {}
    for seed in sorted(losses.keys() & baseline_losses.keys()):
        above, baseline_above = losses[seed] - e.value, baseline_losses[seed] - e.value
        if min(above, baseline_above) <= 0 or math.isinf(max(above, baseline_above)):
            multipliers[seed] = math.inf
        else:
            multipliers[seed] = math.log(baseline_above / above) / alpha.value + log_cost
    return multipliers


def _compute(runs: Sequence[RunRecord]) -> float:
    """Return the FLOPs of training a run, the most of these: one that diverged has fewer."""
    return max(run.run.flops_per_token * run.status.tokens for run in runs)
