"""The verdicts of a study, from the records of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from normlab.analysis.arms import CHOOSING_SEEDS, Arm, StudyRuns
from normlab.analysis.cell_differences import resolved_differences
from normlab.analysis.cells import group_cells
from normlab.analysis.comparability import comparability_warnings, reason_not_comparable
from normlab.analysis.factors import distinguishing_options
from normlab.analysis.paired_tests import holm
from normlab.analysis.settings import format_setting
from normlab.base.errors import ConfigError, StoreError, counted
from normlab.store.record import RunRecord
from normlab.studies.base import AT_BEST, LEVEL, LOOKS, SUPPORTED, UNDECIDED, VOID, Claim, Criterion, Study
from normlab.studies.estimate import SIGNED_RANKS, Estimate
from normlab.studies.evidence import Evidence, block_of_run, read_evidence
from normlab.studies.power import Power, chance_to_decide, power_of
from normlab.studies.run import Attempt

FUTILE = 0.02
"""The smallest chance to decide a claim for which more seeds are trained."""


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
    recorded_estimator: str = ""
    """What was estimated, of a verdict from a report: an earlier protocol may have estimated something else."""

    @property
    def notes(self) -> str:
        """Why the verdict is void or undecided, in parentheses after a space; empty otherwise."""
        return f" ({self.reason})" if self.reason else ""

    @property
    def estimator_text(self) -> str:
        return self.recorded_estimator or self.claim.estimator.text

    @property
    def verdict_in_words(self) -> str:
        """The verdict, followed by the verdict at the best rates alone, if it differs.

        The interval at the best rates is shown without the correction for all claims, which would make it wider.
        """
        if self.at_best is None or self.verdict == VOID:
            return self.verdict
        criterion, at_best = self.claim.criterion, (self.at_best.low, self.at_best.high)
        verdict_at_best = criterion.verdict(lambda alpha: at_best)
        shown = self.estimate.interval(shown_level(criterion))
        # If the interval over all chosen rates decides it too, only the correction leaves the claim undecided.
        is_by_correction = self.verdict == UNDECIDED and verdict_at_best == criterion.verdict(lambda alpha: shown)
        if verdict_at_best == self.verdict or is_by_correction:
            return self.verdict
        return f"{self.verdict}, but {verdict_at_best} {AT_BEST}"

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
        if best is None:
            return ""
        return interval_text(best.estimate, best.low, best.high, self.claim.criterion)

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
    if low == -math.inf and high == math.inf:
        return f"{estimate:.3g}"
    level = ", 90%" if criterion.sides > 1 else ""
    return f"{estimate:.3g} [{low:.3g}, {high:.3g}{level}]"


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
    # Where the choosing seeds decide a claim, no other seed has been trained.
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
        return [judgement.claim for judgement in (*self.claims, *self.controls) if judgement.is_open]


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
    reason = reason_not_comparable([results])
    if missing:
        reason = f"runs that have not started or cannot be read: {missing}"
    # Each control is judged alone: corrected for their number, more of them would stay undecided and void the study.
    controls: list[Judgement] = []
    for control in study.controls:
        controls += _judge_all([control], results, unverified, reason, arms)
    claims = _judge_all(study.claims, results, unverified, reason, arms)
    failed = [control for control in controls if control.verdict != SUPPORTED]
    if failed:
        control_failed = f"the control {failed[0].claim.name} is {failed[0].verdict}"
        claims = [_made_void(judgement, control_failed) for judgement in claims]
    all_notes = [
        *notes,
        *comparability_warnings(results),
        *resolved_differences(group_cells(results, distinguishing_options(results))),
    ]
    unfinished = sum(not run.has_loss for run in results)
    if unfinished:
        all_notes.append(f"runs without an outcome: {unfinished} of {len(results)}")
    grids = [arm for arm in arms.values() if len(arm.learning_rates) > 1 and arm.is_one_configuration]
    return Verdicts(study, claims, controls, all_notes, [summary_of(arm) for arm in grids])


def _made_void(judgement: Judgement, reason: str) -> Judgement:
    """Return a judgement made void; one that is void already keeps its own reason."""
    if judgement.verdict == VOID:
        return judgement
    return replace(judgement, verdict=VOID, reason=reason)


def open_claims(study: Study, evidence: Evidence) -> list[Claim]:
    """Return the claims and controls that more seeds may decide."""
    return judge(study, evidence.results, unverified=evidence.unverified).open_claims


def is_finished(attempt: Attempt) -> bool:
    """Whether an attempt has no run left to train."""
    try:
        evidence = read_evidence(attempt)
    except StoreError:  # no run of a sweep has started
        return False
    if evidence.missing or not all(run.has_loss for run in evidence.results):
        return False
    # As the study goes on: a block of seeds is trained only while a claim is open after those before it.
    for block in attempt.blocks:
        if not any(run.config.seed in block for run in evidence.results):
            return False
        if not open_claims(attempt.study, read_evidence(attempt, block)):
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
    judgements: list[Judgement] = []
    # Of the whole study: the arms of a claim lack a block that was trained while only other claims were open.
    seeds = {run.replicate[0] for run in results}
    seeds_left = CHOOSING_SEEDS + LOOKS[-1] - len(seeds)
    for claim in claims:
        runs = StudyRuns(results)
        judgements.append(_judge(claim, runs, unverified, reason, len(claims)))
        arms |= runs.used
    # A void claim is not tested, so that the others are not corrected for it.
    p_values: list[float | None] = []
    for judgement in judgements:
        p_values.append(judgement.p if judgement.verdict != VOID else None)
    corrected = holm(p_values)
    tests = counted(len(corrected) - corrected.count(None), "claim")
    for index, p in enumerate(corrected):
        if p is not None:
            judgements[index] = _corrected(replace(judgements[index], p=p), tests, seeds_left)
    return judgements


def _corrected(judgement: Judgement, tests: str, seeds_left: int) -> Judgement:
    """Return a judgement with the verdict of its corrected p-value; `seeds_left` may still be trained."""
    if judgement.p <= LEVEL:
        return judgement
    estimate = judgement.estimate
    is_open = not is_futile(judgement.claim, estimate, seeds_left)
    reason = f"p={judgement.p:.2g}, corrected for {tests}"
    if not is_open:
        reason += "; more seeds are not expected to decide it"
    if math.isnan(estimate.value):
        reason = f"not defined for its {counted(estimate.n, 'seed')}"
    return replace(judgement, verdict=UNDECIDED, reason=reason, is_open=is_open)


def _judge(claim: Claim, runs: StudyRuns, unverified: Mapping[str, str], reason: str, tests: int) -> Judgement:
    """Return the judgement of a claim as if it were the only one; `tests` are those that its power is corrected for."""
    estimator = claim.estimator
    try:
        estimate = estimator.estimate(runs)
        reason = reason or runs.reason_not_comparable(claim.intended)
    except ConfigError as error:
        return Judgement(claim, VOID, reason or f"no estimate: {error}", Estimate(math.nan))
    judgement = Judgement(
        claim,
        UNDECIDED,
        reason="",
        estimate=estimate,
        power=power_of(claim, runs, tests),
        at_best=_at_best(claim, runs, estimate),
        common=estimator.at_a_common_rate(runs),
    )
    reason = reason or _reason_void(runs, estimate, unverified)
    if reason:
        return replace(judgement, verdict=VOID, reason=reason)
    criterion = claim.criterion
    return replace(judgement, verdict=criterion.verdict(estimate.interval), p=criterion.p_value(estimate))


def _at_best(claim: Claim, runs: StudyRuns, estimate: Estimate) -> AtBest | None:
    # With one chosen rate in each arm it would be the same estimate again.
    if not any(len(rates) > 1 for rates in estimate.rates.values()):
        return None
    best = claim.estimator.estimate_at_best(runs)
    if best is None:
        return None
    low, high = best.interval(shown_level(claim.criterion))
    return AtBest(best.value, low, high)


def is_futile(claim: Claim, estimate: Estimate, seeds_left: int) -> bool:
    """Return whether more seeds are not expected to decide a claim; `seeds_left` is the largest number of them.

    From the eighth seed of an estimate on, that is where they would decide the claim with a probability of less than
    `FUTILE`, if they are like those so far. That is known of a typical value only: other claims, such as those about
    shares, use all seeds.
    """
    if seeds_left <= 0 or estimate.stays_undefined:
        return True
    # Most seeds are left out, because a run diverged or has not learned, and so will be most later ones.
    if estimate.n < LOOKS[0] and estimate.n + estimate.left_out >= LOOKS[1]:
        return True
    # Fewer seeds say too little of later ones.
    if estimate.n < LOOKS[1] or estimate.method != SIGNED_RANKS:
        return False
    scaled = claim.estimator.on_symmetric_scale
    values = [scaled(value) for value in estimate.seeds.values()]
    least, most = map(scaled, claim.criterion.limits)
    # An interval of nearly no confidence lacks a bound only if no number of seeds gives it one.
    low, high = map(scaled, estimate.interval(0.99))
    ends = math.isfinite(low), math.isfinite(high)
    return chance_to_decide(values, (least, most), claim.criterion.sides, seeds_left, ends) < FUTILE


def _reason_void(runs: StudyRuns, estimate: Estimate, unverified: Mapping[str, str]) -> str:
    for arm in runs.used.values():
        unfinished = sum(not run.has_loss for run in arm.runs)
        if unfinished:
            return f"unfinished runs of [{arm.where}]: {unfinished}"
        # A better rate may lie outside the grid, at which the arm would have another value.
        if arm.has_best_at_edge:
            side = "lowest" if arm.best_lr == arm.learning_rates[0] else "highest"
            return f"the best learning rate of [{arm.where}], {format_setting(arm.best_lr)}, is the {side} of its grid"
        for block in map(block_of_run, arm.runs):
            if block in unverified:
                return f"`normlab verify` fails for the block {block}: {unverified[block]}"
    if estimate.undefined:
        return f"seeds without the quantity, because a run lacks it: {estimate.undefined}"
    return ""
