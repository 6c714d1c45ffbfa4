"""Arms: runs that meet some conditions. The learning rate is chosen on the first seeds and judged on the others."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from normlab.analysis.cells import Cell
from normlab.analysis.comparability import mixed_settings
from normlab.analysis.learning_rates import Losses, shared_lr
from normlab.analysis.settings import select_where, setting, sort_key
from normlab.errors import ConfigError
from normlab.store.record import RunRecord, Setting

CHOOSING_SEEDS = 2
"""The first seeds of a grid, on which the learning rate of an arm is chosen; the others judge it."""
WORSE = 0.1
"""Level of the one-sided paired t test by which a learning rate is worse than the best one."""


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
        return Cell((), (), [run for run in self.runs if run.replicate[0] in self.seeds[:CHOOSING_SEEDS]])

    @property
    def best_lr(self) -> float | None:
        """The best learning rate on the choosing seeds; None before any of their runs has ended."""
        return self.choice.best_lr

    @cached_property
    def plausible_lrs(self) -> list[float]:
        """The best learning rate, and those that all seeds together cannot tell from it; as `plausible_lrs`."""
        cell = Cell((), (), self.runs)
        return [] if self.best_lr is None else plausible_lrs(self.best_lr, cell.losses, cell.bad_lrs)

    @property
    def has_best_at_edge(self) -> bool:
        """Whether the best learning rate is the lowest or highest of its grid, so that a better one may be outside."""
        return len(self.learning_rates) > 1 and self.best_lr in (self.learning_rates[0], self.learning_rates[-1])

    def judged(self, lr: float | None) -> list[RunRecord]:
        """Return the completed runs of the judging seeds at a learning rate: of all seeds if there is one rate."""
        choosing = self.seeds[:CHOOSING_SEEDS] if len(self.learning_rates) > 1 else ()
        return [run for run in self.runs if run.lr == lr and run.has_loss and run.replicate[0] not in choosing]


def plausible_lrs(best: float, losses: Losses, bad: Collection[float]) -> list[float]:
    """Return the best learning rate, and the others that are neither bad nor worse than it.

    A learning rate is worse if a one-sided paired t test at level `WORSE` finds a higher loss.

    The choice on two seeds is noisy. The interval of a contrast is therefore the union of its intervals at all of these
    learning rates. Without the union an arm differs from itself in up to 10 % of the splits of study `noise`.
    """
    from scipy.stats import ttest_rel

    found = [best]
    for lr, by_replicate in losses.items():
        common = sorted(by_replicate.keys() & losses[best].keys(), key=str)
        if lr == best or lr in bad or len(common) < 2:
            continue
        values, at_best = ([each[replicate] for replicate in common] for each in (by_replicate, losses[best]))
        # Where a run at the best learning rate diverged, a rate whose runs all ended finite is not worse.
        has_diverged = not all(map(math.isfinite, at_best))
        if has_diverged or ttest_rel(values, at_best, alternative="greater").pvalue > WORSE:  # pyright: ignore[reportAttributeAccessIssue]
            found.append(lr)
    return found


class StudyRuns:
    """The runs of a study, from which the estimators take arms; records the arms that were used."""

    def __init__(self, results: Sequence[RunRecord]) -> None:
        self.results = list(results)
        self.used: dict[str, Arm] = {}

    def arm(self, where: str) -> Arm:
        """Return the runs that meet conditions such as `placement=post,model.depth=8`, of one configuration.

        Raises:
            ConfigError: A condition is invalid, no run meets all of them, or two runs with the same learning rate and
                seeds differ in an option that the conditions leave free.
        """
        arm = self.arm_of_grid(where)
        if len({(run.lr, run.replicate) for run in arm.runs}) < len(arm.runs):
            different = ", ".join(mixed_settings(arm.runs).values())
            raise ConfigError(f"arm {where}: its runs differ in {different}; choose one")
        return arm

    def arm_of_grid(self, where: str) -> Arm:
        """Return the runs that meet conditions; those of a seed may differ in any option.

        Raises:
            ConfigError: A condition is invalid, or no run meets all of them.
        """
        if where not in self.used:
            runs = self._select(where)
            self.used[where] = Arm(where, runs, sorted({run.replicate[0] for run in runs}, key=sort_key))
        return self.used[where]

    def _select(self, where: str) -> list[RunRecord]:
        return select_where(self.results, [where] if where else [], "arm")

    def levels(self, where: str, option: str) -> list[float]:
        """Return the values of a numeric option among the runs that meet the conditions.

        Raises:
            ConfigError: A value is not a number.
        """
        values = {setting(run, option) for run in self._select(where)}
        if not all(isinstance(value, int | float) for value in values):
            raise ConfigError(f"slope over {option}: needs numbers, and the runs have {', '.join(map(str, values))}")
        return sorted(float(value) for value in values)  # pyright: ignore

    def rate_of(self, arms: Sequence[Arm], lr: str) -> dict[str, float | None]:
        """Return the learning rate of each arm: its best one, or the common one with the best mean rank."""
        if lr == "best":
            return {arm.where: arm.best_lr for arm in arms}
        common = shared_lr([arm.choice.ranking for arm in arms if arm.choice.losses])
        return {arm.where: common for arm in arms}
