"""Estimators of the noise over seeds, which says what a size can decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.report.intervals import Replicate
from normlab.report.results import RunResult
from normlab.studies.arms import CHOOSING_SEEDS, Arm, StudyRuns
from normlab.studies.estimators import Estimate, binomial, over_seeds

ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Deviation:
    """The standard deviation over seeds of the final loss at the best learning rate, with the chi-squared interval."""

    where: str

    chooses_rate = True

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"standard deviation over seeds of the final validation loss, nats/token: [{self.where}]"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate."""
        from scipy.stats import chi2

        arm = runs.arm(self.where)
        losses = [run.loss for run in arm.judged(arm.best_lr)]
        n, rates = len(losses), {self.where: arm.best_lr}
        if n < 2 or not all(map(math.isfinite, losses)):
            return Estimate(math.nan, n=n, rates=rates)
        sd = float(np.std(losses, ddof=1))
        low, low90, high90, high = (sd * math.sqrt((n - 1) / chi2.ppf(q, n - 1)) for q in (0.975, 0.95, 0.05, 0.025))
        return Estimate(sd, low, high, low90, high90, n, method="chi-squared", rates=rates)


@dataclass(frozen=True, slots=True)
class FalsePositives:
    """How often the whole procedure finds a difference between an arm and itself.

    The seeds are split at random into two groups. Each group chooses its learning rate on its first seeds and is judged
    on the others, as two arms would be; the paired t test rejects at 5 %. The interval is binomial, for the draws.
    """

    where: str
    draws: int = 1000

    chooses_rate = False

    @property
    def text(self) -> str:
        """What is estimated."""
        return f"share of {self.draws} random splits of the seeds of [{self.where}] into two arms with p < {ALPHA:g}"

    def estimate(self, runs: StudyRuns) -> Estimate:
        """Return the estimate; NaN with fewer than two judging seeds in a group."""
        arm = runs.arm(self.where)
        half = len(arm.seeds) // 2
        if half < CHOOSING_SEEDS + 2:
            return Estimate(math.nan)
        rng = np.random.default_rng(0)
        rejected = 0
        for _ in range(self.draws):
            order = rng.permutation(len(arm.seeds)).tolist()
            first, second = (self._losses(arm, order[start : start + half]) for start in (0, half))
            differences: dict[Replicate, float] = {
                (pair, pair): a - b for pair, (a, b) in enumerate(zip(first, second, strict=True))
            }
            p = over_seeds(differences).p
            rejected += p is not None and p < ALPHA
        return binomial(rejected, self.draws)

    def _losses(self, arm: Arm, members: Sequence[int]) -> list[float]:
        """Return the losses of a group's judging seeds at the learning rate that its choosing seeds prefer."""
        by_seed: dict[object, list[RunResult]] = {}
        for run in arm.runs:
            by_seed.setdefault(run.replicate[0], []).append(run)
        seeds = [arm.seeds[index] for index in members]
        choice = Arm(arm.where, [run for seed in seeds[:CHOOSING_SEEDS] for run in by_seed[seed]])
        return [run.loss for seed in seeds[CHOOSING_SEEDS:] for run in by_seed[seed] if run.lr == choice.best_lr]
