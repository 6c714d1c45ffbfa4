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

RunsOf = Callable[[Arm], Sequence[RunRecord]]
"""The runs of an arm that an estimate is from: those of the judging seeds, or of the choosing ones."""


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
        arms, baselines = self._arms(runs)
        rates = {arm.where: arm.chosen_lrs for arm in (*arms, *baselines)}
        law = _law(baselines)
        if law is None:
            return Estimate(math.nan, rates=rates)
        estimate = contrast(self._tables(arms, baselines, law, Arm.judged), self._weights)
        judged = [*chain.from_iterable(arm.judged() for arm in (*arms, *self._compared(baselines)))]
        return exponential(replace(estimate, rates=rates, **outcomes(judged)))

    @property
    def has_power(self) -> bool:
        return True

    def pilot(self, runs: StudyRuns) -> list[float]:
        arms, baselines = self._arms(runs)
        law = _law(baselines)
        if law is None:
            return []
        return [*weighted_sums(self._weights, self._tables(arms, baselines, law, _choosing_runs)).values()]

    def on_symmetric_scale(self, value: float) -> float:
        return ln_of_ratio(value)

    @property
    def _weights(self) -> list[float]:
        return [-1.0, 1.0] if self.growth else [1.0]

    def _arms(self, runs: StudyRuns) -> tuple[list[Arm], list[Arm]]:
        """Return the arm at the sizes that are compared, and the baseline at all sizes, which its law needs."""
        return self._compared(_arms_by_size(runs, self.where, self.over)), _arms_by_size(runs, self.baseline, self.over)

    def _compared(self, arms: Sequence[Arm]) -> list[Arm]:
        return [arms[0], arms[-1]] if self.growth else [arms[-1]]

    def _tables(
        self, arms: Sequence[Arm], baselines: Sequence[Arm], law: Laws, runs_of: RunsOf
    ) -> list[dict[Replicate, float]]:
        """Return ln of the multiplier of each seed, at each size that is compared."""
        tables: list[dict[Replicate, float]] = []
        for arm, baseline in zip(arms, self._compared(baselines), strict=True):
            runs, baseline_runs = runs_of(arm), runs_of(baseline)
            # Nothing has been judged yet.
            if not runs or not baseline_runs:
                return [{}]
            losses = mean_over_rates(FINAL_LOSS, runs), mean_over_rates(FINAL_LOSS, baseline_runs)
            log_cost = math.log(_compute(baseline_runs) / _compute(runs))
            tables.append(log_multipliers(*losses, law, log_cost))
        return tables


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
        arms = _arms_by_size(runs, self.where, self.over)
        rates = {arm.where: arm.chosen_lrs for arm in arms}
        law = _law(arms[:-1])
        judged = arms[-1].judged()
        if law is None or not judged:
            return Estimate(math.nan, rates=rates)
        forecast = law.loss(0, _compute(judged)).value
        losses = mean_over_rates(FINAL_LOSS, judged)
        errors = {seed: loss - forecast for seed, loss in losses.items()}
        return replace(contrast([errors], [1.0]), rates=rates, **outcomes(judged))


def _arms_by_size(runs: StudyRuns, where: str, over: str) -> list[Arm]:
    """Return the arm of each size, the smallest first.

    Raises:
        ConfigError: There are too few sizes for a law with one size held out.
    """
    levels = runs.levels(where, over)
    if len(levels) <= FEWEST_SIZES:
        raise ConfigError(f"a law of the arm {where} needs more than {FEWEST_SIZES} values of {over}; add one")
    arms: list[Arm] = []
    for level in levels:
        # All digits: the condition must select the level exactly.
        size = f"{over}={level:.17g}"
        arms.append(runs.arm(f"{where},{size}" if where else size))
    return arms


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
