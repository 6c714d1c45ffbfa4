"""Arms: runs that meet some conditions. The learning rates are chosen on the first seeds and judged on the others."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from statistics import fmean, stdev

from normlab.analysis.cells import Cell
from normlab.analysis.comparability import differences, obstacles
from normlab.analysis.conditions import parse_conditions, select_where
from normlab.analysis.learning_rates import Losses, Ranking, shared_lr
from normlab.analysis.settings import resolve_options, setting, sort_key
from normlab.base.errors import ConfigError
from normlab.store.record import RunRecord, Setting

CHOOSING_SEEDS = 6
"""The first seeds of a grid, on which the learning rates of an arm are chosen; the others judge it.

`studies/simulations.py` has the share of studies that call one of two equal arms lower, which is larger for arms with
other rates near their best one, and for noisier rates."""


@dataclass(frozen=True, eq=False)
class Arm:
    """The runs of one configuration, at all learning rates and seeds."""

    where: str
    runs: Sequence[RunRecord]
    seeds: Sequence[Setting]
    """The seeds of the runs, the choosing ones first."""

    @cached_property
    def learning_rates(self) -> list[float]:
        return sorted({run.lr for run in self.runs})

    @cached_property
    def choice(self) -> Cell:
        choosing_seeds = self.seeds[:CHOOSING_SEEDS]
        runs: list[RunRecord] = []
        for run in self.runs:
            seed, _ = run.replicate
            if seed in choosing_seeds:
                runs.append(run)
        return Cell((), (), runs)

    @property
    def best_lr(self) -> float | None:
        """The learning rate with the lowest loss of the choosing seeds; None before any of their runs has ended."""
        return self.choice.best_lr

    @cached_property
    def chosen_lrs(self) -> list[float]:
        """The learning rates at which the arm is judged (`chosen_lrs`)."""
        if self.best_lr is None:
            return []
        return chosen_lrs(self.best_lr, self.choice.losses, self.choice.bad_lrs)

    @property
    def is_one_configuration(self) -> bool:
        """Whether its runs differ in learning rate and seeds only."""
        rates_and_seeds = {(run.lr, run.replicate) for run in self.runs}
        return len(rates_and_seeds) == len(self.runs)

    @property
    def has_best_at_edge(self) -> bool:
        """Whether the best learning rate is the lowest or highest of its grid, so that a better one may be outside.

        An arm that learns at no learning rate has no best one.
        """
        if len(self.learning_rates) < 2 or self.best_lr in self.choice.bad_lrs:
            return False
        return self.best_lr in (self.learning_rates[0], self.learning_rates[-1])

    def judged(self) -> list[RunRecord]:
        """Return the completed runs of the judging seeds at the chosen rates: of all seeds if the grid has one rate."""
        # With one rate nothing was chosen, so that no seed is spent on the choice.
        choosing_seeds: Sequence[Setting] = ()
        if len(self.learning_rates) > 1:
            choosing_seeds = self.seeds[:CHOOSING_SEEDS]
        judged: list[RunRecord] = []
        for run in self.runs:
            seed, _ = run.replicate
            if seed not in choosing_seeds and run.lr in self.chosen_lrs and run.has_loss:
                judged.append(run)
        return judged


def chosen_lrs(best: float, losses: Losses, bad: Collection[float]) -> list[float]:
    """Return the learning rates that the choosing seeds cannot tell from the best one, in order.

    Those are the rates whose loss is above that at the best one by at most one standard error of the mean of the
    differences, seed by seed. An arm is judged by its mean over these rates. If it were judged at the best one
    alone, one of two equal arms would have the lower loss more often: choosing seeds may call a worse rate the best.

    Source: the one-standard-error rule of Breiman et al. 1984, Classification and Regression Trees, section 3.4.3.
    """
    chosen = [best]
    for lr in losses.keys() - {best, *bad}:
        # Paired by seed: what a seed adds to the loss at both rates says nothing of the rates.
        common_seeds = losses[lr].keys() & losses[best].keys()
        differences_of_seeds = [losses[lr][seed] - losses[best][seed] for seed in common_seeds]
        # One difference has no standard error, and a diverged seed has no finite difference.
        if len(differences_of_seeds) < 2 or not all(map(math.isfinite, differences_of_seeds)):
            continue
        standard_error = stdev(differences_of_seeds) / math.sqrt(len(differences_of_seeds))
        if fmean(differences_of_seeds) <= standard_error:
            chosen.append(lr)
    return sorted(chosen)


class StudyRuns:
    """The runs of a study, from which the estimators take arms; records the arms that were used."""

    def __init__(self, results: Sequence[RunRecord]) -> None:
        self.results = list(results)
        self.used: dict[str, Arm] = {}
        self.chosen_only: set[str] = set()
        """The conditions of the used arms of which only the choosing seeds are needed."""

    def arm(self, where: str) -> Arm:
        """Return the runs that meet conditions such as `placement=post,model.depth=8`, of one configuration.

        Raises:
            ConfigError: A condition is invalid, no run meets all of them, or two runs with the same learning rate and
                seeds differ in an option that the conditions leave free.
        """
        return _of_one_configuration(self.arm_of_grid(where))

    def arm_to_choose(self, where: str) -> Arm:
        """Return an arm as `arm` does, of which only the choosing seeds are needed."""
        if where not in self.used:
            self.chosen_only.add(where)
        return _of_one_configuration(self._used_arm(where))

    def arm_of_grid(self, where: str) -> Arm:
        """Return the runs that meet conditions; those of a seed may differ in any option.

        Raises:
            ConfigError: A condition is invalid, or no run meets all of them.
        """
        self.chosen_only.discard(where)
        return self._used_arm(where)

    def _used_arm(self, where: str) -> Arm:
        if where not in self.used:
            runs = self._select(where)
            seeds = sorted({run.replicate[0] for run in runs}, key=sort_key)
            self.used[where] = Arm(where, runs, seeds)
        return self.used[where]

    def _select(self, where: str) -> list[RunRecord]:
        return select_where(self.results, [where] if where else [], "arm")

    def levels(self, where: str, option: str) -> list[float]:
        """Return the values of a numeric option among the runs that meet the conditions.

        Raises:
            ConfigError: A value is not a number.
        """
        values = {setting(run, option) for run in self._select(where)}
        numbers: list[float] = []
        for value in values:
            if not isinstance(value, int | float):
                texts = ", ".join(map(str, values))
                raise ConfigError(f"slope over {option}: needs numbers, and the runs have {texts}")
            numbers.append(float(value))
        return sorted(numbers)

    def reason_not_comparable(self, intended: Sequence[str] = ()) -> str:
        """Return why the arms that were used must not be compared, or an empty text.

        Two arms may differ in compute or data only by options that one of them names in a condition with `=`, or that
        are `intended`.

        Raises:
            ConfigError: No run has an intended option.
        """
        intended = resolve_options(intended, self.results, "intended")
        # An arm is paired with itself, too: it may have another size at some of its learning rates.
        for first, second in combinations_with_replacement(self.used.values(), 2):
            factors = [*self._named_options(first), *self._named_options(second), *intended]
            groups = [*_runs_by_rate(first), *_runs_by_rate(second)]
            different = "; ".join(map(str, obstacles(groups, factors)))
            if different:
                return f"the arms [{first.where}] and [{second.where}] differ in {different}, which no condition names"
        return ""

    def _named_options(self, arm: Arm) -> list[str]:
        """Return the options that the conditions of an arm give one value."""
        if not arm.where:
            return []
        options: list[str] = []
        for condition in parse_conditions([arm.where], "arm"):
            # `model.depth>=8` names no single depth, so that it explains no difference in depth.
            if condition.sign in ("=", "=="):
                options.append(condition.option)
        return resolve_options(options, self.results, "arm")

    def common_lr(self, arms: Sequence[Arm]) -> float | None:
        """Return the learning rate with the best mean rank over the arms, on the choosing seeds."""
        rankings: list[Ranking] = []
        for arm in arms:
            if arm.choice.losses:
                rankings.append(arm.choice.ranking)
        return shared_lr(rankings)


def _of_one_configuration(arm: Arm) -> Arm:
    """Return an arm, or raise ConfigError if its runs differ in more than learning rate and seeds."""
    if not arm.is_one_configuration:
        different = ", ".join(map(str, differences(arm.runs)))
        raise ConfigError(f"arm {arm.where}: its runs differ in {different}; choose one")
    return arm


def _runs_by_rate(arm: Arm) -> list[list[RunRecord]]:
    """Return the runs of an arm at each learning rate."""
    by_rate: dict[float, list[RunRecord]] = {lr: [] for lr in arm.learning_rates}
    for run in arm.runs:
        by_rate[run.lr].append(run)
    return list(by_rate.values())
