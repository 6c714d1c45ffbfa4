"""The verdicts of a study, from the records of its runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normlab.analysis.arms import StudyRuns
from normlab.analysis.cells import group_cells, resolved_differences
from normlab.analysis.comparability import comparability_warnings, reason_not_comparable
from normlab.analysis.factors import distinguishing_options
from normlab.analysis.settings import format_setting
from normlab.errors import ConfigError
from normlab.store.record import RunRecord
from normlab.studies.base import SUPPORTED, UNDECIDED, VOID, Claim, Study, Within
from normlab.studies.estimators import BOUNDS, Contrast, Estimate
from normlab.studies.run import block_of_run

DRAWS = 20_000
"""Simulated studies for the power of two one-sided tests."""


@dataclass(frozen=True, slots=True)
class Judgement:
    claim: Claim
    verdict: str
    reason: str
    """Why the verdict is void or undecided; empty otherwise."""
    estimate: Estimate
    power: float | None
    """The probability that the claim is supported if its stated effect is true; None if it states none."""
    common: Estimate | None = None
    """The same contrast with all arms at a common learning rate, for a contrast at the best ones."""

    @property
    def verdict_text(self) -> str:
        return f"{self.verdict}, under review" if self.claim.under_review else self.verdict

    @property
    def notes(self) -> str:
        """Why the verdict is void, undecided or under review, in parentheses after a space; empty otherwise."""
        notes = "; ".join(filter(None, [self.reason, self.claim.under_review]))
        return f" ({notes})" if notes else ""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the estimate, its interval and the number of seeds."""
        value = "No estimate" if math.isnan(self.estimate.value) else f"Estimate {self.interval} (n={self.estimate.n})"
        return f"{self.verdict_text}{self.notes}: {self.claim.text} {value}; criterion: {self.claim.criterion.text}."

    @property
    def interval(self) -> str:
        """The estimate and its interval as text: of 90 % for two one-sided tests, else of 95 %."""
        low, high = (getattr(self.estimate, name) for name in self.claim.criterion.supporting)
        if math.isnan(self.estimate.value):
            return ""
        level = ", 90%" if isinstance(self.claim.criterion, Within) else ""
        return f"{self.estimate.value:.3g}" + ("" if low is None else f" [{low:.3g}, {high:.3g}{level}]")


@dataclass(frozen=True, slots=True)
class Verdicts:
    study: Study
    claims: Sequence[Judgement]
    controls: Sequence[Judgement]
    notes: Sequence[str]
    """Notes on the whole study: an amended criterion, unfinished runs."""


def judge(
    study: Study,
    results: Sequence[RunRecord],
    *,
    unverified: Mapping[str, str],
    missing: int = 0,
    notes: Sequence[str] = (),
) -> Verdicts:
    """Return the verdicts of a study.

    A control that is not supported makes every verdict void, and so do runs that are not comparable, `missing` runs,
    which have not started or cannot be read, and `unverified` blocks: the failed check of `normlab verify` by block.
    """
    reason = f"runs that have not started or cannot be read: {missing}" if missing else reason_not_comparable(results)
    controls = [_judge(claim, results, unverified, reason) for claim in study.controls]
    failed = [each for each in controls if each.verdict != SUPPORTED]
    control = f"the control {failed[0].claim.name} is {failed[0].verdict}" if failed else ""
    claims = [_judge(claim, results, unverified, reason, control) for claim in study.claims]
    unfinished = sum(not run.has_loss for run in results)
    more = [
        *comparability_warnings(results),
        *resolved_differences(group_cells(results, distinguishing_options(results))),
        *([f"runs without an outcome: {unfinished} of {len(results)}"] if unfinished else []),
    ]
    return Verdicts(study, claims, controls, [*notes, *more])


def _judge(
    claim: Claim, results: Sequence[RunRecord], unverified: Mapping[str, str], reason: str, control: str = ""
) -> Judgement:
    runs, common = StudyRuns(results), None
    try:
        estimate = claim.estimator.estimate(runs)
    except ConfigError as error:
        return Judgement(claim, VOID, reason or f"no estimate: {error}", Estimate(math.nan), None)
    power = power_of(claim, estimate)
    verdict = claim.criterion.judge(estimate)
    reason = reason or _reason_void(claim, runs, estimate, unverified) or control
    if reason:
        verdict = VOID
    elif claim.needs_large:
        verdict, reason = UNDECIDED, "small models cannot decide it"
    elif verdict == UNDECIDED:
        reason = "at this size" if power is None else f"power {power:.0%} for a true value of {claim.effect:g}"
    contrast = claim.estimator
    if isinstance(contrast, Contrast) and contrast.chooses_rate and len(contrast.weights) > 1:
        common = replace(contrast, lr="common").estimate(runs)
    return Judgement(claim, verdict, reason, estimate, power, common)


def _reason_void(claim: Claim, runs: StudyRuns, estimate: Estimate, unverified: Mapping[str, str]) -> str:
    for arm in runs.used.values():
        if unfinished := sum(not run.has_loss for run in arm.runs):
            return f"unfinished runs of [{arm.where}]: {unfinished}"
        if claim.estimator.chooses_rate and arm.has_best_at_edge:
            side = "lowest" if arm.best_lr == arm.learning_rates[0] else "highest"
            return f"the best learning rate of [{arm.where}], {format_setting(arm.best_lr)}, is the {side} of its grid"
        for block in map(block_of_run, arm.runs):
            if block in unverified:
                return f"`normlab verify` fails for the block {block}: {unverified[block]}"
    if estimate.undefined:
        return f"seeds without the quantity, because a run lacks it or diverged on both sides: {estimate.undefined}"
    return ""


# Power


def power_of(claim: Claim, estimate: Estimate) -> float | None:
    """Return the probability of the verdict supported if the claim's stated effect is true.

    The quantity of a seed is normal, with the standard deviation that was observed. An interval bound against a
    criterion is a one-sided t test at 2.5 %; `Within` is two one-sided t tests at 5 %, whose power is simulated.
    Where the interval is a union over learning rates, the number is approximate: in simulations with four to six judged
    seeds it is up to 20 points too high.
    """
    sd, n, (least, most) = estimate.deviation, estimate.n, claim.criterion.limits
    if claim.effect is None or sd is None or n < 2:
        return None
    if isinstance(claim.criterion, Within):
        return _power_within(claim.criterion, claim.effect, sd, n)
    from statsmodels.stats.power import TTestPower

    distance = claim.effect - least if math.isinf(most) else most - claim.effect
    return float(TTestPower().power(distance / sd, n, 0.025, alternative="larger")) if sd else float(distance > 0)


def _power_within(criterion: Within, effect: float, sd: float, n: int) -> float:
    from scipy.special import stdtrit

    rng = np.random.default_rng(0)
    mean = rng.normal(effect, sd / math.sqrt(n), DRAWS)
    error = np.sqrt(rng.chisquare(n - 1, DRAWS) / (n - 1)) * sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.95)) * error
    return float(np.mean((mean - half >= criterion.low) & (mean + half <= criterion.high)))


# As data

FIELDS = (*BOUNDS, "n", "p", "method", "deviation", "seeds", "diverged", "bad", "rates")
"""The fields of an estimate that a report keeps, besides the value."""


def as_row(judgement: Judgement) -> dict[str, Any]:
    e, claim, common = judgement.estimate, judgement.claim, judgement.common
    return {
        "claim": claim.name, "text": claim.text, "source": claim.source, "verdict": judgement.verdict,
        "reason": judgement.reason, "under_review": claim.under_review, "interval": judgement.interval,
        "estimator": claim.estimator.text, "criterion": claim.criterion.text, "estimate": e.value,
        **{name: getattr(e, name) for name in FIELDS}, "effect": claim.effect, "power": judgement.power,
        "at_common_rate": common and {
            "lr": next(iter(common.rates.values()), None), "estimate": common.value, "low": common.low,
            "high": common.high, "n": common.n,
        },
    }  # fmt: skip


def from_row(claim: Claim, row: Mapping[str, Any]) -> Judgement:
    """Return the verdict of a claim from its row in a report: the inverse of `as_row`."""
    estimate = Estimate(row["estimate"], **{name: row[name] for name in FIELDS})
    if common := row["at_common_rate"]:
        bounds = {name: common[name] for name in ("low", "high", "n")}
        common = Estimate(common["estimate"], **bounds, rates={"all arms": common["lr"]})
    return Judgement(claim, row["verdict"], row["reason"], estimate, row["power"], common)
