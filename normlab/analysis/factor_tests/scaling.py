"""How the loss of each arm falls with compute, and how much compute a level saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from normlab.analysis.cells import reason_cells_not_comparable
from normlab.analysis.columns import Definition, format_p
from normlab.analysis.comparability import SIZE_OPTIONS
from normlab.analysis.factor_tests.base import (
    FactorTest,
    Question,
    TestRow,
    baseline_note,
    change_text,
    holm_note,
    values_of,
)
from normlab.analysis.factors import Factor
from normlab.analysis.intervals import LEVEL
from normlab.base.errors import ConfigError
from normlab.store.record import RunRecord, Setting

if TYPE_CHECKING:
    from normlab.analysis.ladders import SizedArm
    from normlab.analysis.scaling_laws import Estimated, Laws

BEYOND = 10, 100
"""The multiples of the compute of an arm's largest size for which a multiplier is forecast."""
FORMATS = {"exponent": ".3f", "nats/token": ".4f", "ratio": "#.3g"}
"""The format of an estimate by its unit."""
FORECAST_ERROR, MULTIPLIER, REGRET, VOID_REGRET = "seen - forecast", "multiplier", "regret", "regret, void"
"""What rows estimate: the first words of their contrasts. `VOID_REGRET` begins with `REGRET`, which notes look for."""


class Scaling(FactorTest):
    """Laws of the loss over compute, and the compute multipliers that follow from them."""

    name = "scaling"
    summary = "how the loss falls with the compute of larger models, and how much compute a level saves"

    def rows(self, question: Question) -> Iterator[TestRow]:
        """Yield the law of each arm, its error at the largest size, and the multipliers of each level.

        Raises:
            ConfigError: No arm has `FEWEST_SIZES`, or seeds are crossed.
        """
        if reason_cells_not_comparable(question.cells):
            return
        # Imported here, because every `normlab summarize --test` imports this file, and these import numpy and scipy.
        from normlab.analysis.ladders import FEWEST_SIZES, fit_arms
        from normlab.analysis.scaling_laws import Estimated, forecast_errors

        for factor in question.over:
            if factor.option in SIZE_OPTIONS:
                raise ConfigError(
                    f"--test {self.name}: --over {factor.option}: laws are fitted over the size; name another factor"
                )
        try:
            fitted = fit_arms(question.cells)
        except ConfigError as error:
            raise ConfigError(f"--test {self.name}: {error}") from None
        arms = fitted.arms
        yield from self._laws(arms, fitted.laws)
        if all(len(arm.cells) > FEWEST_SIZES for arm in arms):
            for arm, error in zip(arms, forecast_errors(fitted.laws.ladder), strict=True):
                largest = max(arm.cells, key=arm.compute_at)
                contrast = f"{FORECAST_ERROR}: {arm.label}, {arm.label_of_size(largest)}"
                yield self._row("", contrast, "nats/token", [arm], error)
        for factor in question.compared_factors:
            if factor.option not in SIZE_OPTIONS:
                yield from self._multipliers(arms, fitted.laws, factor, question.baselines[factor.option])
        for regret in fitted.regrets:
            name = VOID_REGRET if regret.is_void else REGRET
            contrast = f"{name}: {regret.arm.label}, {regret.arm.label_of_size(regret.size)}"
            estimate = Estimated(regret.value, None, None, None)
            if regret.half is not None:
                estimate = Estimated(regret.value, regret.value - regret.half, regret.value + regret.half, None)
            row = self._row("", contrast, "nats/token", [regret.arm], estimate)
            yield row | {"n": regret.n, "lr": regret.lr}
        reasons = {
            f"fewer than {FEWEST_SIZES} sizes at which runs have learned": fitted.too_few,
            "no law: the losses fall too little, or not as a law": fitted.undetermined,
        }
        for missing, arms_without in reasons.items():
            for arm in arms_without:
                yield self._row("", f"exponent: {arm.label}", "exponent", [arm]) | {"missing": missing}

    def _laws(self, arms: Sequence[SizedArm], laws: Laws) -> Iterator[TestRow]:
        """Yield the loss that no compute removes, and the exponent of each arm."""
        fit: TestRow = {"has_own_e": laws.has_own_e, "p_form": laws.p_form, "spread": laws.spread}
        if laws.has_own_e or len(arms) == 1:
            for arm, estimate in zip(arms, laws.of_e(), strict=True):
                yield self._row("", f"E: {arm.label}", "nats/token", [arm], estimate) | fit
        else:
            [estimate] = laws.of_e()
            yield self._row("", "E: all arms", "nats/token", arms, estimate) | fit
        for arm, estimate in zip(arms, laws.of_alpha(), strict=True):
            yield self._row("", f"exponent: {arm.label}", "exponent", [arm], estimate) | fit

    def _multipliers(
        self, arms: Sequence[SizedArm], laws: Laws, factor: Factor, baseline_level: Setting
    ) -> Iterator[TestRow]:
        """Yield the multipliers of each level of a factor: at each size, how they grow, and beyond the sizes."""
        for arm in arms:
            baseline = arm.among(arms, factor.option, baseline_level)
            if baseline is None or baseline is arm:
                continue
            pair = arms.index(arm), arms.index(baseline)
            where = arm.label_without(factor.option)
            ratio = change_text(factor, (arm.levels[factor.option], baseline_level), " / ")
            sizes = sorted(arm.cells, key=arm.compute_at)
            largest = arm.compute_at(sizes[-1])
            points = [(arm.label_of_size(size), arm.compute_at(size)) for size in sizes]
            points += [(f"forecast for {multiple} times the largest", multiple * largest) for multiple in BEYOND]
            for text, compute in points:
                estimate = laws.multiplier(*pair, compute)
                row = self._row(where, f"{MULTIPLIER}, {text}: {ratio}", "ratio", [arm, baseline], estimate)
                row["compute"] = compute
                # Multipliers at neighbouring sizes say nearly the same: one of them is tested.
                if compute == largest:
                    row["p"] = estimate.p
                yield row
            growth = laws.growth(*pair)
            row = self._row(where, f"growth of the {MULTIPLIER}: {ratio}", "ratio", [arm, baseline], growth)
            yield row | {"p": growth.p}

    def _row(
        self, where: str, contrast: str, unit: str, arms: Sequence[SizedArm], estimate: Estimated | None = None
    ) -> TestRow:
        row = self.labels(where, contrast, unit) | dict.fromkeys(("estimate", "low", "high", "p", "lr", "compute"))
        if estimate is not None:
            row |= {"estimate": estimate.value, "low": estimate.low, "high": estimate.high}
        runs: list[RunRecord] = []
        for arm in arms:
            runs += arm.runs
        learned = sum(run.has_learned for run in runs)
        row |= {"n": learned, "n_crossed": None, "method": None}
        return row | {"bad": len(runs) - learned, "runs": len(runs)}

    def notes(self, rows: Sequence[TestRow]) -> list[str]:
        from normlab.analysis.scaling_laws import REJECTED

        [fit, *_] = (row for row in rows if "p_form" in row)
        e = "one E for all arms"
        if fit["has_own_e"]:
            e = f"an E for each arm, since an F test rejects a shared one (p < {REJECTED:g})"
        laws = (
            "laws: loss = E + A C^-exponent, with the FLOPs of training C, fitted to the n runs that have learned at "
            f"the learning rate of each cell with the most seeds (of several such rates, at the best); {e}"
        )
        lines: list[str] = [Definition(laws)]
        contrasts = values_of(rows, "contrast")
        has_multipliers = any(text.startswith(MULTIPLIER) for text in contrasts)
        if has_multipliers:
            multiplier = (
                "multiplier 1.2: the baseline needs 1.2 times the compute for the same loss; an interval that holds 1 "
                "cannot tell which needs less"
            )
            lines.append(Definition(multiplier))
        if any(text.startswith(FORECAST_ERROR) for text in contrasts):
            error = (
                f"{FORECAST_ERROR}: the loss at the largest size minus that of laws fitted to the other sizes; the "
                "forecast was right within its interval where that holds 0"
            )
            lines.append(Definition(error))
        if any(text.startswith(REGRET) for text in contrasts):
            regret = (
                f"{REGRET}: the loss at the learning rate of the law, the one with the most seeds, minus that at the "
                f"best of the rates with fewer; {VOID_REGRET}: a rate is better by more than its noise (the best such "
                "rate is shown), and the laws leave this size out"
            )
            lines.append(Definition(regret))
        if fit["p_form"] is not None and fit["p_form"] < REJECTED:
            p = format_p(fit["p_form"])
            if not p.startswith("<"):
                p = f"= {p}"
            lines.append(
                f"the sizes do not lie on such laws (F test, p {p}), so that intervals are "
                f"{fit['spread']:.1f} times wider; are some sizes trained less well than others?"
            )
        if fit["low"] is None:
            lines.append("no intervals: they need two seeds at some size of each arm")
        else:
            lines.append(Definition(f"intervals: of {LEVEL:.0%}, by a parametric bootstrap over seeds"))
        if any(p is not None for p in values_of(rows, "p")):
            lines.append(Definition(f"p: that the ratio is 1, {holm_note(rows)}"))
        if any(values_of(rows, "bad")):
            lines.append(Definition("bad: runs that have not learned; no law has them"))
        if has_multipliers:
            lines.append(baseline_note("A / B"))
        return lines

    def number_text(self, row: TestRow) -> str:
        if row["estimate"] is None:
            return super().number_text(row)
        return format(row["estimate"], FORMATS[row["unit"]])

    def bound_text(self, row: TestRow, bound: str) -> str:
        if row[bound] is None:
            return ""
        return format(row[bound], FORMATS[row["unit"]])
