"""Run a test over the factors of a table, with the baselines of the factors."""

from collections.abc import Collection, Sequence

from normlab.analysis.baselines import baseline_levels
from normlab.analysis.cell_differences import resolved_differences
from normlab.analysis.cells import Cell, reason_cells_not_comparable, runs_of
from normlab.analysis.factor_tests.anytime import Anytime
from normlab.analysis.factor_tests.base import FactorTest, Question, TestRow
from normlab.analysis.factor_tests.contrasts_of_losses import Interaction, Trend
from normlab.analysis.factor_tests.counts import Counts
from normlab.analysis.factor_tests.optimum import Optimum
from normlab.analysis.factor_tests.rate_tests import RateRange, Sensitivity
from normlab.analysis.factor_tests.scaling import Scaling
from normlab.analysis.factors import Factor
from normlab.analysis.paired_tests import holm
from normlab.analysis.settings import resolve_options
from normlab.base.errors import ConfigError, unknown
from normlab.store.record import Setting

_CLASSES: Sequence[type[FactorTest]] = (Interaction, Trend, Counts, Sensitivity, RateRange, Optimum, Scaling, Anytime)
TESTS: dict[str, FactorTest] = {test.name: test() for test in _CLASSES}
"""The tests by name, in the order of the help."""


def run_test(
    name: str,
    cells: Sequence[Cell],
    factors: Sequence[Factor],
    *,
    over: Sequence[str] = (),
    against: str | None = None,
) -> list[TestRow]:
    """Return the rows of a test: an estimate with its interval, n and p, with Holm's correction over the rows.

    `over` has the options of the test. interaction: all of them together; by default each pair of factors. trend: each
    numeric option; by default each numeric factor. counts: each option; by default each factor. `against` has the
    baseline levels, such as `placement=pre`; by default the baseline named in `seed=until(...)`; for factors that it
    does not name, the first level.

    Raises:
        ConfigError: The test or an option is unknown, or the test does not fit the factors.
    """
    if name not in TESTS:
        raise ConfigError(f"--test {name}: " + unknown("test", name, TESTS))
    by_option: dict[str, Factor] = {}
    baselines: dict[str, Setting] = {}
    for factor in factors:
        by_option[factor.option] = factor
        baselines[factor.option] = factor.levels[0]
    over_factors: list[Factor] = []
    for option in resolve_options(over, runs_of(cells), "--over"):
        if option not in by_option:
            raise ConfigError(f"--over {option}: is not one of the factors {', '.join(by_option)}; add it to --by")
        # The same rows again would count twice in Holm's correction.
        if by_option[option] in over_factors:
            raise ConfigError(f"--over {','.join(over)}: names {option} twice; name each option once")
        over_factors.append(by_option[option])
    if against is None:
        against = _baseline_of_sweep(cells, by_option)
    if against:
        baselines |= baseline_levels(cells, list(by_option), against)
    question = Question(cells, factors, over_factors, baselines)
    rows = list(TESTS[name].rows(question))
    if not rows:
        reason = reason_cells_not_comparable(cells)
        if reason:
            raise ConfigError(f"--test {name}: {reason}; add these options to --by")
        raise ConfigError(f"--test {name}: no group of cells has the levels to compare; see `normlab summarize`")
    differences = resolved_differences(cells)
    # All rows are one family, so that any false rejection in the table is at most as probable as the level.
    p_values = [row["p"] for row in rows]
    for row, p_holm in zip(rows, holm(p_values), strict=True):
        # A reason why an estimate is missing would mislead beside an estimate.
        if row["estimate"] is not None:
            row.pop("missing", None)
        row |= {"p_holm": p_holm, "resolved_differences": differences}
    return rows


def _baseline_of_sweep(cells: Sequence[Cell], by: Collection[str]) -> str | None:
    """Return the baseline for which the sweep of some cells has added seeds, if its options are factors; else None."""
    # Several sweeps may have added seeds for different baselines, and a sweep without `until` has none.
    baselines = {run.design.baseline for run in runs_of(cells)}
    if len(baselines) != 1:
        return None
    [baseline] = baselines
    if not baseline:
        return None
    try:
        baseline_levels(cells, list(by), baseline)
    except ConfigError:  # another --by, or conditions that leave it out
        return None
    return baseline
