"""Run a test over the factors of a table, with the baselines of the factors."""

from collections.abc import Collection, Sequence

from normlab.analysis.baselines import baseline_levels
from normlab.analysis.cells import Cell, reason_cells_not_comparable, resolved_differences, runs_of
from normlab.analysis.factor_tests.anytime import Anytime
from normlab.analysis.factor_tests.base import FactorTest, Question, Row
from normlab.analysis.factor_tests.contrasts_of_losses import Interaction, Trend
from normlab.analysis.factor_tests.counts import Counts
from normlab.analysis.factor_tests.optimum import Optimum
from normlab.analysis.factor_tests.rate_tests import Range, Sensitivity
from normlab.analysis.factors import Factor
from normlab.analysis.intervals import holm
from normlab.analysis.settings import resolve_options
from normlab.base.errors import ConfigError, unknown

_CLASSES: Sequence[type[FactorTest]] = (Interaction, Trend, Counts, Sensitivity, Range, Optimum, Anytime)
TESTS: dict[str, FactorTest] = {test.name: test() for test in _CLASSES}
"""The tests by name, in the order of the help."""


def run_test(
    name: str,
    cells: Sequence[Cell],
    factors: Sequence[Factor],
    *,
    over: Sequence[str] = (),
    against: str | None = None,
) -> list[Row]:
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
    by_option = {factor.option: factor for factor in factors}
    options = resolve_options(over, runs_of(cells), "--over")
    for option in options:
        if option not in by_option:
            raise ConfigError(f"--over {option}: is not one of the factors {', '.join(by_option)}; add it to --by")
    baselines = {option: factor.levels[0] for option, factor in by_option.items()}
    if against is None:
        against = _baseline_of_sweep(cells, by_option)
    if against:
        baselines |= baseline_levels(cells, list(by_option), against)
    question = Question(cells, factors, [by_option[option] for option in options], baselines)
    rows = list(TESTS[name].rows(question))
    if not rows:
        reason = reason_cells_not_comparable(cells)
        if reason:
            raise ConfigError(f"--test {name}: {reason}; add these options to --by")
        raise ConfigError(f"--test {name}: no group of cells has the levels to compare; see `normlab summarize`")
    differences = resolved_differences(cells)
    corrected = holm([row["p"] for row in rows])
    for row, p in zip(rows, corrected, strict=True):
        # A reason why an estimate is missing would mislead beside an estimate.
        if row["estimate"] is not None:
            row.pop("missing", None)
        row.update(p_holm=p, resolved_differences=differences)
    return rows


def _baseline_of_sweep(cells: Sequence[Cell], by: Collection[str]) -> str | None:
    """Return the baseline for which the sweep of some cells has added seeds, if its options are factors; else None."""
    baselines = {run.design.baseline for run in runs_of(cells)}
    if len(baselines) > 1 or baselines <= {""}:
        return None
    [baseline] = baselines
    try:
        baseline_levels(cells, list(by), baseline)
    except ConfigError:  # another --by, or conditions that leave it out
        return None
    return baseline
