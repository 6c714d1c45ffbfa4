"""The verdicts of a study, from the records of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from normlab.analysis.arms import CHOOSING_SEEDS, Arm, StudyRuns
from normlab.analysis.cells import group_cells, resolved_differences
from normlab.analysis.comparability import comparability_warnings, reason_not_comparable
from normlab.analysis.factors import distinguishing_options
from normlab.analysis.intervals import holm
from normlab.analysis.sequences import half_width, level_of
from normlab.analysis.settings import format_setting
from normlab.base.errors import ConfigError, StoreError, counted
from normlab.store.record import RunRecord
from normlab.studies.base import AT_BEST, LEVEL, LOOKS, SUPPORTED, UNDECIDED, VOID, Claim, Criterion, Study
from normlab.studies.estimators import Contrast, Estimate, Slope
from normlab.studies.run import Attempt, Evidence, block_of_run, read_evidence

DRAWS = 2000
"""Simulated studies for a power."""
GOOD_POWER = 0.8
SMALLEST_DEVIATION = 1e-4
"""No smaller standard deviation between seeds is looked for, nats/token."""


@dataclass(frozen=True, slots=True)
class AtBest:
    """An estimate with each arm at its best learning rate alone, with the interval of the level that a page shows."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Judgement:
    claim: Claim
    verdict: str
    reason: str
    """Why the verdict is void or undecided; empty otherwise."""
    estimate: Estimate
    p: float = 1.0
    """The smallest significance level at which the claim is decided, corrected by Holm's method over the study."""
    is_open: bool = False
    """Whether more seeds may decide the claim."""
    power: Power | None = None
    at_best: AtBest | None = None
    """The same contrast with each arm at its best learning rate alone; None if that is the same."""
    common: tuple[float, float] | None = None
    """The same contrast of the choosing seeds with all arms at a common learning rate, and that rate."""

    @property
    def notes(self) -> str:
        """Why the verdict is void or undecided, in parentheses after a space; empty otherwise."""
        return f" ({self.reason})" if self.reason else ""

    @property
    def verdict_in_words(self) -> str:
        """The verdict, followed by the verdict at the best rates alone, if it differs.

        The interval at the best rates is shown without the correction for all claims, which would make it wider.
        """
        if self.at_best is None or self.verdict == VOID:
            return self.verdict
        criterion, at_best = self.claim.criterion, (self.at_best.low, self.at_best.high)
        there = criterion.verdict(lambda alpha: at_best)
        shown = self.estimate.interval(shown_level(criterion))
        # If the interval over all chosen rates decides it too, only the correction leaves the claim undecided.
        is_by_correction = self.verdict == UNDECIDED and there == criterion.verdict(lambda alpha: shown)
        return self.verdict if there == self.verdict or is_by_correction else f"{self.verdict}, but {there} {AT_BEST}"

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the estimate, its interval and the number of seeds."""
        value = "No estimate" if math.isnan(self.estimate.value) else f"Estimate {self.both} (n={self.estimate.n})"
        criterion = self.claim.criterion.text
        return f"{self.verdict_in_words}{self.notes}: {self.claim.text} {value}; criterion: {criterion}."

    @property
    def interval(self) -> str:
        low, high = self.estimate.interval(shown_level(self.claim.criterion))
        return interval_text(self.estimate.value, low, high, self.claim.criterion)

    @property
    def interval_at_best(self) -> str:
        best = self.at_best
        return "" if best is None else interval_text(best.estimate, best.low, best.high, self.claim.criterion)

    @property
    def both(self) -> str:
        """The estimate and the one at the best learning rates alone, each with its interval."""
        at_best = f", {AT_BEST} {self.interval_at_best}" if self.interval_at_best else ""
        return f"{self.interval}{at_best}"


def shown_level(criterion: Criterion) -> float:
    """Return the significance level of the intervals that pages show: 0.1 for two one-sided tests, else 0.05."""
    return LEVEL * criterion.sides


def interval_text(estimate: float, low: float, high: float, criterion: Criterion) -> str:
    """Return an estimate and its interval as text; empty if there is no estimate."""
    if math.isnan(estimate):
        return ""
    level = ", 90%" if criterion.sides > 1 else ""
    return f"{estimate:.3g}" + ("" if low == -high == -math.inf else f" [{low:.3g}, {high:.3g}{level}]")


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What an arm of a claim has reached, at the learning rate that is best for the choosing seeds."""

    where: str
    rates: Sequence[float]
    """The learning rates of its grid."""
    chosen: Sequence[float]
    best: float | None
    losses: Mapping[str, float]
    """The final losses of the runs that have learned, nats/token: of judging seeds, or else of choosing ones."""
    runs: int


def summary_of(arm: Arm) -> ArmSummary:
    runs = [run for run in arm.judged() or arm.choice.runs if run.lr == arm.best_lr and run.has_loss]
    losses = {str(run.replicate[0]): run.loss for run in runs if run.has_learned}
    return ArmSummary(arm.where, arm.learning_rates, arm.chosen_lrs, arm.best_lr, losses, len(runs))


@dataclass(frozen=True, slots=True)
class Verdicts:
    study: Study
    claims: Sequence[Judgement]
    controls: Sequence[Judgement]
    notes: Sequence[str]
    """Notes on the whole study: an amended criterion, unfinished runs."""
    arms: Sequence[ArmSummary] = ()
    """The arms with several learning rates."""

    @property
    def open_claims(self) -> list[Claim]:
        """The claims and controls that more seeds may decide."""
        return [each.claim for each in (*self.claims, *self.controls) if each.is_open]


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
    arms: dict[str, Arm] = {}
    reason = f"runs that have not started or cannot be read: {missing}" if missing else reason_not_comparable([results])
    controls = [each for claim in study.controls for each in _judge_all([claim], results, unverified, reason, arms)]
    claims = _judge_all(study.claims, results, unverified, reason, arms)
    if failed := [each for each in controls if each.verdict != SUPPORTED]:
        control = f"the control {failed[0].claim.name} is {failed[0].verdict}"
        claims = [each if each.verdict == VOID else replace(each, verdict=VOID, reason=control) for each in claims]
    unfinished = sum(not run.has_loss for run in results)
    more = [
        *comparability_warnings(results),
        *resolved_differences(group_cells(results, distinguishing_options(results))),
        *([f"runs without an outcome: {unfinished} of {len(results)}"] if unfinished else []),
    ]
    grids = [arm for arm in arms.values() if len(arm.learning_rates) > 1 and arm.is_one_configuration]
    return Verdicts(study, claims, controls, [*notes, *more], [summary_of(arm) for arm in grids])


def open_claims(attempt: Attempt, evidence: Evidence, block: range) -> list[Claim]:
    """Return the claims and controls that more seeds may decide, by the runs of the seeds up to those of a block."""
    results = [run for run in evidence.results if run.config.seed < block.stop]
    return judge(attempt.study, results, unverified=evidence.unverified).open_claims


def is_finished(attempt: Attempt) -> bool:
    """Whether an attempt has no run left to train."""
    try:
        evidence = read_evidence(attempt)
    except StoreError:  # no run of a sweep has started
        return False
    if evidence.missing or not all(run.has_loss for run in evidence.results):
        return False
    for block in attempt.blocks:
        if not any(run.config.seed in block for run in evidence.results):
            return False
        if not open_claims(attempt, evidence, block):
            break
    return True


def _judge_all(
    claims: Sequence[Claim],
    results: Sequence[RunRecord],
    unverified: Mapping[str, str],
    reason: str,
    arms: dict[str, Arm],
) -> list[Judgement]:
    """Return the judgements of claims, with p-values corrected for all of them, and add the arms that they use.

    A claim is open if it is undecided and more seeds may decide it.
    """
    found, lasts = [], []
    for claim in claims:
        runs = StudyRuns(results)
        found.append(_judge(claim, runs, unverified, reason, len(claims)))
        arms |= runs.used
        has_one_rate = all(len(arm.learning_rates) == 1 for arm in runs.used.values())
        lasts.append(LOOKS[-1] + (CHOOSING_SEEDS if has_one_rate else 0))
    corrected = holm([None if each.verdict == VOID else each.p for each in found])
    for index, p in enumerate(corrected):
        if p is None:
            continue
        each = replace(found[index], p=p)
        if p > LEVEL:
            tests = counted(len(corrected) - corrected.count(None), "claim")
            is_open = not is_futile(each.claim, each.estimate, lasts[index])
            stop = "" if is_open else "; more seeds are not expected to decide it"
            text = f"p={p:.2g}, corrected for {tests}{stop}"
            if math.isnan(each.estimate.value):
                text = f"not defined for its {counted(each.estimate.n, 'seed')}"
            each = replace(each, verdict=UNDECIDED, reason=text, is_open=is_open)
        found[index] = each
    return found


def _judge(claim: Claim, runs: StudyRuns, unverified: Mapping[str, str], reason: str, tests: int) -> Judgement:
    """Return the judgement of a claim as if it were the only one; `tests` are those that its power is corrected for."""
    estimator = claim.estimator
    try:
        estimate = estimator.estimate(runs)
        reason = reason or runs.reason_not_comparable(claim.intended)
    except ConfigError as error:
        return Judgement(claim, VOID, reason or f"no estimate: {error}", Estimate(math.nan))
    found = Judgement(claim, UNDECIDED, "", estimate, power=power_of(claim, runs, tests))
    if isinstance(estimator, Contrast | Slope) and any(len(rates) > 1 for rates in estimate.rates.values()):
        best = estimator.estimate(runs, best_only=True)
        found = replace(found, at_best=AtBest(best.value, *best.interval(shown_level(claim.criterion))))
    if isinstance(estimator, Contrast):
        found = replace(found, common=estimator.at_a_common_rate(runs))
    if void := reason or _reason_void(runs, estimate, unverified):
        return replace(found, verdict=VOID, reason=void)
    criterion = claim.criterion
    return replace(found, verdict=criterion.verdict(estimate.interval), p=criterion.p_value(estimate))


def is_futile(claim: Claim, estimate: Estimate, last: int) -> bool:
    """Return whether the `last` number of seeds would not decide a claim, if they are like those judged so far.

    The interval at that number is predicted: with the spread of now, and narrower by one standard error of the estimate
    of now. The answer is no for shares, and with fewer than eight seeds; it is yes where eight seeds have been judged
    and fewer than four of them have the quantity.
    """
    n = estimate.n
    if n < LOOKS[1]:
        return n < LOOKS[0] and n + estimate.left_out >= LOOKS[1]
    if estimate.deviation is None or n >= last:
        return n >= last

    def at_last(alpha: float) -> tuple[float, float]:
        return estimate.interval(level_of(n, half_width(last, alpha) - 1 / math.sqrt(n)))

    return claim.criterion.verdict(at_last) == UNDECIDED


def _reason_void(runs: StudyRuns, estimate: Estimate, unverified: Mapping[str, str]) -> str:
    for arm in runs.used.values():
        if unfinished := sum(not run.has_loss for run in arm.runs):
            return f"unfinished runs of [{arm.where}]: {unfinished}"
        if arm.has_best_at_edge:
            side = "lowest" if arm.best_lr == arm.learning_rates[0] else "highest"
            return f"the best learning rate of [{arm.where}], {format_setting(arm.best_lr)}, is the {side} of its grid"
        for block in map(block_of_run, arm.runs):
            if block in unverified:
                return f"`normlab verify` fails for the block {block}: {unverified[block]}"
    if estimate.undefined:
        return f"seeds without the quantity, because a run lacks it: {estimate.undefined}"
    return ""


# Power


@dataclass(frozen=True, slots=True)
class Power:
    """The probability that a claim is supported within the seeds of a study, if its stated effect is true."""

    value: float
    low: float
    high: float
    """With the standard deviation at the ends of its interval of 80 %."""
    seeds: int
    """The number of seeds from which the standard deviation is known (`Contrast.pilot`)."""

    @property
    def text(self) -> str:
        few = f" (sd from {self.seeds} seeds)" if self.seeds < 8 else ""
        return f"{self.value:.0%}, {self.low:.0%} to {self.high:.0%}{few}"


def power_of(claim: Claim, runs: StudyRuns, tests: int = 1) -> Power | None:
    """Return the power of a claim about a contrast; None for others, and for a claim without a stated effect.

    The quantity of a seed is normal, with the standard deviation of the choosing seeds at the chosen learning rates.
    The significance level is that of the smallest p-value of `tests` claims, LEVEL / tests.
    """
    from scipy.stats import chi2

    if not isinstance(claim.estimator, Contrast):
        return None
    pilot = claim.estimator.pilot(runs)
    if claim.effect is None or len(pilot) < 2 or not all(map(math.isfinite, pilot)):
        return None
    n, sd = len(pilot), float(np.std(pilot, ddof=1))
    sds = [sd, *(sd * math.sqrt((n - 1) / float(chi2.ppf(q, n - 1))) for q in (0.1, 0.9))]
    value, low, high = (_power_at(claim, claim.effect, each, tests) for each in sds)
    return Power(value, low, high, n)


def largest_deviation(claim: Claim, tests: int) -> float | None:
    """Return the largest standard deviation between seeds with which a claim has a power of `GOOD_POWER`.

    That of a ratio is of logarithms. None for claims whose power is not known (`power_of`).
    """
    if claim.effect is None or not isinstance(claim.estimator, Contrast):
        return None
    low, high = 0.0, SMALLEST_DEVIATION
    while _power_at(claim, claim.effect, high, tests) >= GOOD_POWER:
        low, high = high, 2 * high
    while low and high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if _power_at(claim, claim.effect, middle, tests) >= GOOD_POWER else (low, middle)
    return low or None


def _power_at(claim: Claim, effect: float, sd: float, tests: int) -> float:
    """Return the power of a claim at an effect; `sd` is of logarithms if its estimator is a ratio."""
    least, most = claim.criterion.limits
    if isinstance(claim.estimator, Contrast) and claim.estimator.is_ratio:
        effect, least, most = (math.log(each) if each > 0 else -math.inf for each in (effect, least, most))
    return simulated_power(effect, sd, (least, most), LEVEL / tests * claim.criterion.sides)


def simulated_power(effect: float, sd: float, limits: tuple[float, float], alpha: float) -> float:
    """Return the share of simulated studies whose interval is within limits at one of the looks."""
    values = np.random.default_rng(0).normal(effect, sd, (DRAWS, LOOKS[-1]))
    supported = np.zeros(DRAWS, bool)
    for n in LOOKS:
        mean, half = values[:, :n].mean(1), values[:, :n].std(1, ddof=1) * half_width(n, alpha)
        supported |= (mean - half >= limits[0]) & (mean + half <= limits[1])
    return float(supported.mean())


# As data

FIELDS = ("n", "method", "deviation", "seeds", "diverged", "bad", "left_out", "rates")
"""The fields of an estimate that a report keeps, besides the value and the intervals."""
LEVELS = (0.05, 0.10)
"""Significance levels of the intervals in a report."""


def as_row(judgement: Judgement) -> dict[str, Any]:
    e, claim = judgement.estimate, judgement.claim
    return {
        "claim": claim.name, "text": claim.text, "source": claim.source, "verdict": judgement.verdict,
        "verdict_in_words": judgement.verdict_in_words, "reason": judgement.reason, "interval": judgement.interval,
        "interval_at_best": judgement.interval_at_best,
        "estimator": claim.estimator.text, "criterion": claim.criterion.text, "estimate": e.value,
        "intervals": [list(e.interval(alpha)) for alpha in LEVELS],
        **{name: getattr(e, name) for name in FIELDS}, "effect": claim.effect, "p": judgement.p,
        "power": judgement.power and asdict(judgement.power),
        "at_best": judgement.at_best and asdict(judgement.at_best),
        "at_common_rate": judgement.common and list(judgement.common),
    }  # fmt: skip


def from_row(claim: Claim, row: Mapping[str, Any]) -> Judgement:
    """Return the verdict of a claim from its row in a report: the inverse of `as_row`."""
    intervals = {alpha: (low, high) for alpha, (low, high) in zip(LEVELS, row["intervals"], strict=True)}
    estimate = Estimate(row["estimate"], intervals.__getitem__, **{name: row[name] for name in FIELDS})
    power = Power(**row["power"]) if row["power"] else None
    at_best = AtBest(**row["at_best"]) if row["at_best"] else None
    common = tuple(row["at_common_rate"]) if row["at_common_rate"] else None
    return Judgement(
        claim, row["verdict"], row["reason"], estimate, row["p"], power=power, at_best=at_best, common=common
    )
