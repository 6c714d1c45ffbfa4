"""Tests over the factors of a table: interactions, trends, and counts of bad outcomes.

Interactions and trends are contrasts (`contrasts`) of the final validation losses:

- interaction of m factors: the weight is the product over the factors of +1 at a level and -1 at the baseline, which
  for two factors is a difference of differences;
- trend over a numeric factor t: the weights (t_c - mean(t)) / sum((t - mean(t))^2), the least-squares slope.

The sensitivity to the learning rate and the range of rates that train are means over seeds of `rate_range`'s numbers.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import stdev
from typing import Any

from normlab.analysis.best_rate import best_rate
from normlab.analysis.cells import Cell, count_bad, reason_cells_not_comparable, resolved_differences
from normlab.analysis.contrasts import Key, Pool, contrast, fisher_p, pool_cells, slope_weights, weighted_sums
from normlab.analysis.factors import Factor, label, level_label
from normlab.analysis.intervals import LEVEL, Interval, PairedTest, Replicate, holm, mean_interval, paired_test
from normlab.analysis.rate_range import HIGHEST, SENSITIVITY, WIDTH, RateNumber, by_seed, complete_seeds, has_gap
from normlab.analysis.sequences import level_of, mean_sequence
from normlab.analysis.settings import LR, format_setting, parse_conditions, resolve_options, sort_key
from normlab.base.errors import ConfigError, unknown
from normlab.catalogue import entries as catalogue
from normlab.config.option_names import meanings
from normlab.store.record import Setting

Row = dict[str, Any]
Values = dict[Replicate, float]
"""A number of each seed."""
LOGARITHMIC = ("model.depth", "model.width", "model.context", "train.batch_size", "train.steps", LR)
"""Options whose trend is over the natural logarithm of their value."""


@dataclass(frozen=True)
class Question:
    cells: Sequence[Cell]
    factors: Sequence[Factor]
    over: Sequence[Factor]
    baselines: Mapping[str, Setting]

    def groups(self, over: Sequence[Factor]) -> Iterator[tuple[str, dict[Key, Cell]]]:
        """Yield the cells of each group with equal levels outside `over`: the group's label, and cells by level."""
        inside = [factor.option for factor in over]
        groups: dict[str, dict[Key, Cell]] = {}
        for cell in self.cells:
            fixed = {option: level for option, level in cell.levels.items() if option not in inside}
            group = groups.setdefault(label(fixed, fixed.values()), {})
            group[tuple(cell.levels[option] for option in inside)] = cell
        yield from groups.items()

    @cached_property
    def pool(self) -> Pool | None:
        return pool_cells(self.cells)

    def contrast(self, cells: Iterable[Cell], weights: Iterable[float], **labels: str) -> Row:
        terms = list(zip(cells, weights, strict=True))
        result = contrast(terms, self.pool)
        rates = {cell.best_lr for cell, _ in terms}
        runs = [run for cell, _ in terms for run in cell.runs_at(cell.best_lr)]
        return labels | {
            "estimate": result and result.estimate,
            "low": result and result.low,
            "high": result and result.high,
            "n": result.design.n if result else 0,
            "n_crossed": result and result.design.crossing,
            "p": result and result.p,
            "method": result and result.test,
            "lr": rates.pop() if len(rates) == 1 else None,
            "bad": count_bad(runs),
            "runs": len(runs),
        }

    def changes(self, factors: Sequence[Factor]) -> Iterator[tuple[str, list[tuple[Setting, Setting]], list[Cell]]]:
        """Yield each change of some factors from their baselines that a group has all cells of, if they are comparable.

        It is the group's label, the new level and the baseline of each factor, and the cells of all combinations of
        these, in the order of `itertools.product`.
        """
        levels = [
            [
                (level, self.baselines[factor.option])
                for level in factor.levels
                if level != self.baselines[factor.option]
            ]
            for factor in factors
        ]
        for where, group in self.groups(factors):
            for change in itertools.product(*levels):
                corners = list(itertools.product(*change))
                cells = [group[corner] for corner in corners if corner in group]
                if len(cells) == len(corners) and not reason_cells_not_comparable(cells):
                    yield where, list(change), cells


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
    options = resolve_options(over, [run for cell in cells for run in cell.runs], "--over")
    if missing := [option for option in options if option not in by_option]:
        raise ConfigError(f"--over {missing[0]}: is not one of the factors {', '.join(by_option)}; add it to --by")
    baselines = {option: factor.levels[0] for option, factor in by_option.items()}
    if against is None:
        against = _baseline_of_sweep(cells, by_option)
    baselines |= baseline_levels(cells, list(by_option), against) if against else {}
    rows = list(TESTS[name](Question(cells, factors, [by_option[option] for option in options], baselines)))
    if not rows and (reason := reason_cells_not_comparable(cells)):
        raise ConfigError(f"--test {name}: {reason}; add these options to --by")
    if not rows:
        raise ConfigError(f"--test {name}: no group of cells has the levels to compare; see `normlab summarize`")
    differences = resolved_differences(cells)
    corrected = holm([row["p"] for row in rows])
    for row in rows:
        if row["estimate"] is not None:
            row.pop("missing", None)
    return [row | {"p_holm": p, "resolved_differences": differences} for row, p in zip(rows, corrected, strict=True)]


def _baseline_of_sweep(cells: Sequence[Cell], by: Collection[str]) -> str | None:
    """Return the baseline for which the sweep of some cells has added seeds, if its options are factors; else None."""
    baselines = {run.design.baseline for cell in cells for run in cell.runs}
    if len(baselines) > 1 or baselines <= {""}:
        return None
    [baseline] = baselines
    try:
        baseline_levels(cells, list(by), baseline)
    except ConfigError:  # another --by, or conditions that leave it out
        return None
    return baseline


def baseline_levels(cells: Sequence[Cell], by: Sequence[str], against: str) -> dict[str, Setting]:
    """Return the levels that `--against` names, by option.

    Raises:
        ConfigError: An option is not in `by`, or no cell has such a level.
    """
    levels: dict[str, Setting] = {}
    for condition in parse_conditions([against], "--against", signs=("=",)):
        options = meanings(condition.option, by)
        if len(options) != 1:
            raise ConfigError(f"--against {against}: {condition.option} is not in --by {','.join(by)}; add it there")
        known = sorted({cell.levels[options[0]] for cell in cells}, key=sort_key)
        matches = list(filter(condition.accepts, known))
        if not matches:
            texts = map(format_setting, known)
            titles = catalogue.titles(options[0])
            raise ConfigError(f"--against {against}: " + unknown(options[0], condition.value, texts, titles=titles))
        levels[options[0]] = matches[0]
    return levels


def _interactions(question: Question) -> Iterator[Row]:
    """Yield the interactions: differences of differences of the losses."""
    sets = [tuple(question.over)] if question.over else list(itertools.combinations(question.factors, 2))
    if any(len(factors) < 2 for factors in sets) or not sets:
        raise ConfigError("--test interaction: needs two factors or more; name them in --by, or in --over")
    for factors in sets:
        weights = [math.prod(signs) for signs in itertools.product(*[(1.0, -1.0)] * len(factors))]
        for where, change, cells in question.changes(factors):
            text = " x ".join(f"({_difference(*each)})" for each in zip(factors, change, strict=True))
            labels = {"test": "interaction", "where": where, "contrast": text, "unit": "nats/token"}
            yield question.contrast(cells, weights, **labels)


def _difference(factor: Factor, levels: tuple[Setting, Setting], sign: str = " - ") -> str:
    return sign.join(level_label(factor.option, level) for level in levels)


def _trends(question: Question) -> Iterator[Row]:
    factors = question.over or [factor for factor in question.factors if factor.is_numeric]
    if not factors or not all(factor.is_numeric for factor in factors):
        named = " or ".join(factor.option for factor in question.over or question.factors)
        raise ConfigError(f"--test trend: needs a numeric factor, such as model.depth, and {named} is not numeric")
    for factor in factors:
        is_log = factor.option in LOGARITHMIC and all(float(level or 0) > 0 for level in factor.levels)
        text = f"slope over ln({factor.name})" if is_log else f"slope over {factor.name}"
        unit = f"nats/token per {'e-fold' if is_log else 'unit'}"
        for where, group in question.groups([factor]):
            at = [math.log(float(level)) if is_log else float(level) for (level,) in group]  # pyright: ignore
            if len(set(at)) > 1 and not reason_cells_not_comparable(list(group.values())):
                labels = {"test": "trend", "where": where, "contrast": text, "unit": unit}
                yield question.contrast(group.values(), slope_weights(at), **labels)


def _counts(question: Question) -> Iterator[Row]:
    """Yield Fisher's exact tests of the counts of bad outcomes, over all learning rates of a cell."""
    for factor in question.over or question.factors:
        for where, [change], cells in question.changes([factor]):
            ended = [[run for run in cell.runs if run.has_loss] for cell in cells]
            (bad, runs), (other_bad, others) = ((count_bad(each), len(each)) for each in ended)
            yield {
                "test": "counts",
                "where": where,
                "contrast": _difference(factor, change),
                "unit": "share of runs",
                "estimate": bad / runs - other_bad / others if runs and others else None,
                "bad": bad,
                "runs": runs,
                "baseline_bad": other_bad,
                "baseline_runs": others,
                "p": fisher_p(bad, runs, other_bad, others) if runs and others else None,
                "method": "Fisher's exact test",
            }


FEWEST_RATES = 3
"""The fewest learning rates of a grid whose numbers are shown without being asked for."""
RATE_TESTS = {"sensitivity": (SENSITIVITY,), "range": (HIGHEST, WIDTH)}
"""The numbers of the tests about learning rates."""


def _rate_rows(question: Question, test: str) -> Iterator[Row]:
    """Yield each number of each cell, then of each level minus its baseline, or over it if the number is a ratio."""
    if all(len(cell.losses) < 2 for cell in question.cells):
        raise ConfigError(f"--test {test}: needs several learning rates; sweep them, such as optim.lr=1e-3,3e-3,1e-2")
    for number in RATE_TESTS[test]:
        numbers_of = _numbers_of(number, question.cells)
        for cell in question.cells:
            labels = {"test": test, "where": "", "contrast": f"{number.title}: {cell.label}", "unit": number.unit}
            yield labels | _rate_row(number, partial(mean_interval, least=number.least), numbers_of[cell.key], [cell])
        sign, unit = (" / ", "ratio") if number.is_log else (" - ", number.unit)
        for factor in question.over or question.factors:
            for where, [change], cells in question.changes([factor]):
                comparable = number is HIGHEST or len({tuple(cell.losses) for cell in cells}) == 1
                pairs = weighted_sums((1.0, -1.0), [numbers_of[cell.key] for cell in cells])
                values = pairs if comparable else {}  # S and the band depend on the grid
                contrast = f"{number.title}: {_difference(factor, change, sign)}"
                labels = {"test": test, "where": where, "contrast": contrast, "unit": unit}
                row = labels | _rate_row(number, paired_test, values, cells)
                if all(numbers_of[cell.key] for cell in cells):
                    row["missing"] = "no common seed" if comparable else "other learning rates"
                yield row


def _anytime(question: Question) -> Iterator[Row]:
    """Yield the difference of each level from its baseline, with an interval that holds at every number of seeds."""
    for factor in question.over or question.factors:
        for where, [change], cells in question.changes([factor]):
            runs = [run for cell in cells for run in cell.runs_at(cell.best_lr)]
            values = list(weighted_sums((1.0, -1.0), [cell.final.losses for cell in cells]).values())
            has_one_rate, n = all(len(cell.losses) == 1 for cell in cells), len(values)
            is_known = has_one_rate and n > 1 and all(map(math.isfinite, values))
            row: Row = dict.fromkeys(("estimate", "low", "high", "p", "n_crossed", "lr"))
            if is_known:
                mean, (low, high) = math.fsum(values) / n, mean_sequence(values, 1 - LEVEL)
                bounds = (low, high) if math.isfinite(low) else (None, None)
                deviation = stdev(values)
                p = min(1.0, level_of(n, abs(mean) / deviation)) if deviation else float(mean == 0)
                row |= {"estimate": mean, "low": bounds[0], "high": bounds[1], "p": p}
            yield row | {
                "test": "anytime",
                "where": where,
                "contrast": _difference(factor, change),
                "unit": "nats/token",
                "missing": "several learning rates"
                if not has_one_rate
                else "a seed diverged"
                if n
                else "no common seed",
                "n": n,
                "method": "confidence sequence of the mean",
                "bad": count_bad(runs),
                "runs": len(runs),
            }


def _optima(question: Question) -> Iterator[Row]:
    """Yield the best learning rate of each cell, and what its runs have cost."""
    for cell in question.cells:
        found, runs = best_rate(cell.runs), [run for run in cell.runs if run.has_loss]
        yield {
            "test": "optimum",
            "where": "",
            "contrast": f"optimum: {cell.label}",
            "unit": "learning rate",
            "estimate": found and found.estimate,
            "low": found and found.low,
            "high": found and found.high,
            "missing": "fewer than 4 losses near the lowest, or no minimum",
            "n": found.n if found else 0,
            "n_crossed": None,
            "p": None,
            "method": None,
            "lr": None,
            "bad": count_bad(runs),
            "runs": len(runs),
            "tokens": sum(run.status.tokens for run in runs),
        }


def rate_numbers(cells: Sequence[Cell], number: RateNumber) -> list[tuple[Cell, Row]]:
    """Return the cells with a grid of `FEWEST_RATES`, each with its row of `RATE_TESTS` for one of the numbers."""
    numbers_of, interval_of = _numbers_of(number, cells), partial(mean_interval, least=number.least)
    [test] = [test for test, numbers in RATE_TESTS.items() if number in numbers]
    found = []
    for cell in cells:
        if len(cell.losses) >= FEWEST_RATES:
            found.append((cell, {"test": test} | _rate_row(number, interval_of, numbers_of[cell.key], [cell])))
    return found


def _numbers_of(number: RateNumber, cells: Sequence[Cell]) -> dict[Key, Values]:
    """Return for each cell the number of each seed with every learning rate.

    None if no run of the cell has learned, or if it has several runs of a seed at one learning rate.
    """
    everything = by_seed([run for cell in cells for run in cell.runs if run.has_loss])
    numbers: dict[Key, Values] = {}
    for cell in cells:
        seeds = complete_seeds(cell.runs) if any(run.has_learned for run in cell.runs) else {}
        seeds = {} if any(len(runs) > len(cell.losses) for runs in seeds.values()) else seeds
        found = {seed: number.of(runs, everything[seed]) for seed, runs in seeds.items()}
        numbers[cell.key] = {seed: value for seed, value in found.items() if not math.isnan(value)}
    return numbers


def _rate_row(
    number: RateNumber,
    interval_of: Callable[[Values], Interval | PairedTest],
    values: Values,
    cells: Sequence[Cell],
) -> Row:
    """Return the mean over seeds; if the grid cuts a number off, without the bound on that side and without p."""
    runs = [run for cell in cells for run in cell.runs if run.has_loss]
    result = interval_of(values) if values else None
    estimate, low, high = (result.estimate, result.low, result.high) if result else (None, None, None)
    above, below = zip(*(number.cut_off(complete_seeds(cell.runs).values()) for cell in cells), strict=True)
    is_open = {"below": below[0] or any(above[1:]), "above": above[0] or any(below[1:])}
    # Where every seed is cut off at the end of the grid, their equal numbers say nothing of the noise.
    is_cut_off = low is not None and low == high
    low, high = (None if is_open[side] or is_cut_off else end for side, end in (("below", low), ("above", high)))
    if number.is_log:
        estimate, low, high = (None if each is None else math.exp(each) for each in (estimate, low, high))
    return {
        "estimate": estimate,
        "low": low,
        "high": high,
        "missing": "several runs at one rate"
        if all(any(run.has_learned for run in cell.runs) for cell in cells)
        else "no seed that trains",
        "gaps": sum(map(has_gap, complete_seeds(cells[0].runs).values()))
        if number is HIGHEST and len(cells) == 1
        else 0,
        "beyond_grid": [side for side, open_there in is_open.items() if open_there],
        "n": len(values),
        "n_crossed": result and result.design.crossing,
        "p": result.p if isinstance(result, PairedTest) and not any(is_open.values()) else None,
        "method": result.test if isinstance(result, PairedTest) else None,
        "lr": None,
        "bad": count_bad(runs),
        "runs": len(runs),
    }


TESTS = {
    "interaction": _interactions,
    "trend": _trends,
    "counts": _counts,
    "anytime": _anytime,
    "optimum": _optima,
    **{name: partial(_rate_rows, test=name) for name in RATE_TESTS},
}
