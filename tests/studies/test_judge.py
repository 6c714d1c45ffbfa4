"""Verdicts: what makes them void or undecided, controls, the power, and the hash of a criterion."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.arms import CHOOSING_SEEDS
from normlab.analysis.comparability import intact_runs
from normlab.analysis.intervals import Replicate
from normlab.analysis.sequences import typical_sequence, typical_value
from normlab.analysis.settings import setting
from normlab.config.compose import compose_run
from normlab.store.query import select_runs
from normlab.studies.base import LOOKS, AtLeast, AtMost, Claim, Grid, Study, Within
from normlab.studies.estimate import Estimate, Estimator, exponential, over_seeds, share
from normlab.studies.estimators import Contrast, Share, Slope, difference
from normlab.studies.evidence import verify_blocks
from normlab.studies.judge import AtBest, Judgement, is_futile, judge
from normlab.studies.over_grid import OverGrid
from normlab.studies.power import largest_deviation
from normlab.studies.report_format import as_row, from_row
from normlab.verify import selection
from normlab.verify.check import Check

RATES = (1e-3, 3e-3, 1e-2)
POST_MINUS_PRE = difference("placement=post", "placement=pre")
CLAIM = Claim("post", "Post-norm has a higher loss.", POST_MINUS_PRE, AtLeast(0.05), effect=0.1)
CONTROL = Claim("finite", "Pre-norm trains.", Share("placement=pre", lr="every"), AtMost(0.5))
STUDY = Study("made", "Is post-norm worse?", [Grid("all", "placement=pre,post")], [CLAIM], [CONTROL])


@pytest.fixture
def results(make_run, tmp_path):
    """Writes runs in which post-norm is worse by 0.1, at a best learning rate of 3e-3; returns their results."""

    def make(best=3e-3, gap=0.1, **runs):
        rng = np.random.default_rng(1)
        for placement, lr, seed in itertools.product(("pre", "post"), RATES, range(14)):
            loss = 2 + gap * (placement == "post") + 0.3 * (lr != best) + float(rng.normal(0, 0.01))
            options = {"placement": placement, "lr": lr, "seed": seed, **runs.get(placement, {})}
            make_run(f"{placement}-{lr}-{seed}", status={"val_loss": loss, "best_val_loss": loss}, **options)
        return intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]

    return make


def verdict(study, found, **more):
    (judgement,) = judge(study, found, unverified=more.pop("unverified", {}), **more).claims
    return judgement


def test_the_notes_name_a_resolved_setting_that_differs_between_the_arms(results):
    resolved = {name: {"run": {"resolved": {"init": init}}} for name, init in (("pre", "gpt2"), ("post", "xavier"))}
    line = "the cells also differ in init: xavier (post-norm), gpt2 (pre-norm)"
    assert line in judge(STUDY, results(**resolved), unverified={}).notes


def test_supported_and_refuted(results):
    found = results()
    assert verdict(STUDY, found).verdict == "supported"
    assert verdict(STUDY, found).sentence.startswith("supported: Post-norm has a higher loss. Estimate 0.0982 [0.0")
    swapped = dataclasses.replace(CLAIM, estimator=difference("placement=pre", "placement=post"))
    assert verdict(dataclasses.replace(STUDY, claims=[swapped]), found).verdict == "refuted"
    no_margin = dataclasses.replace(CLAIM, criterion=Within(0.0, 0.0))
    assert verdict(dataclasses.replace(STUDY, claims=[no_margin]), found).verdict == "refuted"


def test_the_arms_have_the_losses_of_the_judging_seeds_at_the_best_rate(results):
    found = results()
    pre, post = judge(STUDY, found, unverified={}).arms
    for arm, placement in ((post, "post"), (pre, "pre")):
        assert (arm.where, arm.rates, arm.chosen, arm.best) == (f"placement={placement}", [*RATES], [3e-3], 3e-3)
        runs = [run for run in found if run.config.placement.name == placement and run.lr == 3e-3]
        judged = {str(run.config.seed): run.loss for run in runs if run.config.seed >= CHOOSING_SEEDS}
        assert (arm.losses, arm.runs) == (judged, len(judged))
    choosing = [run for run in found if run.config.seed < CHOOSING_SEEDS]
    assert [arm.runs for arm in judge(STUDY, choosing, unverified={}).arms] == [CHOOSING_SEEDS] * 2


@pytest.mark.parametrize(
    ("verdict", "criterion", "low", "high", "there"),
    [
        ("supported", AtLeast(0.05), 0.06, 0.2, ""),
        ("supported", AtLeast(0.05), 0.01, 0.2, "undecided"),
        ("supported", AtLeast(0.05), -0.1, 0.04, "refuted"),
        ("refuted", AtMost(0.0), 0.01, 0.2, ""),
        ("refuted", AtMost(0.0), -0.01, 0.2, "undecided"),
        ("refuted", AtMost(0.0), -0.2, -0.01, "supported"),
        ("supported", Within(-0.1, 0.1), -0.09, 0.09, ""),
        ("supported", Within(-0.1, 0.1), -0.11, 0.09, "undecided"),
        ("undecided", AtMost(0.0), 0.01, 0.2, "refuted"),
        ("undecided", AtMost(0.0), -0.2, -0.01, "supported"),
        ("undecided", AtMost(0.0), -0.01, 0.2, ""),
        ("undecided", Within(-0.1, 0.1), -0.09, 0.09, "supported"),
        ("void", AtMost(0.0), 0.01, 0.2, ""),
    ],
)
def test_a_verdict_says_where_the_best_rates_alone_have_another_one(verdict, criterion, low, high, there):
    claim = dataclasses.replace(CLAIM, criterion=criterion)
    judgement = Judgement(claim, verdict, "", over_seeds({(0, 0): 0.1}), at_best=AtBest((low + high) / 2, low, high))
    words = f"{verdict}, but {there} at the best learning rates alone" if there else verdict
    assert judgement.verdict_in_words == words
    level = ", 90%" if criterion.sides > 1 else ""
    both = f"Estimate 0.1, at the best learning rates alone {(low + high) / 2:.3g} [{low:g}, {high:g}{level}] (n=1)"
    assert judgement.sentence.startswith(f"{words}: {claim.text} {both}; criterion: ")
    row = as_row(judgement)
    assert (row["verdict"], row["verdict_in_words"]) == (verdict, words)
    assert from_row(claim, row).sentence == judgement.sentence


@pytest.mark.parametrize(("low", "words"), [(0.06, "undecided"), (-0.1, "undecided, but supported at")])
def test_the_rates_do_not_explain_what_only_the_correction_leaves_undecided(low, words):
    """Without the correction for all claims, the interval over all chosen rates supports the first claim."""
    estimate = Estimate(0.1, lambda alpha: (low, 0.2), 8)
    judgement = Judgement(CLAIM, "undecided", "p=0.06, corrected", estimate, at_best=AtBest(0.1, 0.06, 0.2))
    assert judgement.verdict_in_words.startswith(words)
    assert ("but" in judgement.verdict_in_words) == ("but" in words)


@pytest.mark.parametrize(
    "estimator", [difference("model.depth=8", "model.depth=4"), Slope("", "model.depth", is_log=False)]
)
def test_the_estimate_at_the_best_rates_alone(make_run, tmp_path, estimator):
    """Depth 8 has two rates that the choosing seeds cannot tell apart, so that its loss is the mean over both."""
    rng, losses = np.random.default_rng(1), {}
    for depth, lr, seed in itertools.product((4, 8), (1e-3, 3e-3, 1e-2, 3e-2), range(CHOOSING_SEEDS + 8)):
        is_near = lr == 3e-3 or (lr == 1e-2 and depth == 8)
        loss = 2 + 0.3 * (depth == 8) + 0.3 * (not is_near) + float(rng.normal(0, 0.02))
        losses[depth, lr, seed] = loss
        make_run(
            f"{depth}-{lr}-{seed}", depth=depth, lr=lr, seed=seed, status={"val_loss": loss, "best_val_loss": loss}
        )
    found = intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]
    claim = dataclasses.replace(CLAIM, estimator=estimator)
    judgement = verdict(dataclasses.replace(STUDY, claims=[claim], controls=[]), found)
    rates = {arm: [*rates] for arm, rates in judgement.estimate.rates.items()}
    assert sorted(rates.values()) == [[3e-3], [3e-3, 1e-2]]
    scale = 1 if isinstance(estimator, Contrast) else 4
    best = {
        depth: [losses[depth, 3e-3, seed] for seed in range(CHOOSING_SEEDS, CHOOSING_SEEDS + 8)] for depth in (4, 8)
    }
    if np.mean([losses[8, 1e-2, seed] - losses[8, 3e-3, seed] for seed in range(CHOOSING_SEEDS)]) < 0:
        best[8] = [losses[8, 1e-2, seed] for seed in range(CHOOSING_SEEDS, CHOOSING_SEEDS + 8)]
    differences = [(deep - shallow) / scale for deep, shallow in zip(best[8], best[4], strict=True)]
    expected = (typical_value(differences), *typical_sequence(differences, 0.05))
    assert judgement.at_best is not None
    assert dataclasses.astuple(judgement.at_best) == pytest.approx(expected)
    assert judgement.at_best.estimate != pytest.approx(judgement.estimate.value)


def test_a_control_that_is_not_supported_makes_every_verdict_void(results):
    broken = dataclasses.replace(CONTROL, criterion=AtLeast(0.9))
    judgement = verdict(dataclasses.replace(STUDY, controls=[broken]), results())
    assert (judgement.verdict, judgement.reason) == ("void", "the control finite is refuted")


@pytest.mark.parametrize(("best", "side"), [(1e-3, "lowest"), (1e-2, "highest")])
def test_a_best_learning_rate_at_the_edge_of_its_grid_is_void(results, best, side):
    judgement = verdict(STUDY, results(best=best))
    assert judgement.verdict == "void"
    assert judgement.reason.endswith(f"{best:g}, is the {side} of its grid")


def test_a_block_that_verify_rejects_is_void(results):
    found = results()
    judgement = verdict(STUDY, found, unverified={"rmsnorm post gpt2_scaled": "FAIL block: formula"})
    assert judgement.verdict == "void"
    assert judgement.reason == "`normlab verify` fails for the block rmsnorm post gpt2_scaled: FAIL block: formula"
    assert verdict(STUDY, found, unverified={"dyt pre gpt2_scaled": "x"}).verdict == "supported"


def test_a_block_passes_only_with_all_options_of_its_runs(monkeypatch):
    def checks_of_run(config):
        yield Check("block", "formula", passed=config.norm.eps != 1e-5, result="")

    monkeypatch.setattr(selection, "checks_of_run", checks_of_run)
    composed = [([], compose_run(["norm=rmsnorm", f"norm.eps={eps}"])) for eps in (1e-6, 1e-5, 1e-6)]
    checks = verify_blocks(composed)
    assert (checks.checked, list(checks.failed)) == (["rmsnorm pre gpt2_scaled"], ["rmsnorm pre gpt2_scaled"])
    assert verify_blocks(composed[:1]).failed == {}


def test_an_arm_without_runs_and_runs_that_have_not_started_are_void(results):
    found = results()
    missing = dataclasses.replace(CLAIM, estimator=Contrast({"placement=peri": 1.0}))
    judgement = verdict(dataclasses.replace(STUDY, claims=[missing]), found)
    assert judgement.verdict == "void"
    assert judgement.reason.startswith("no estimate: arm placement=peri: no run matches")
    assert verdict(STUDY, found, missing=2).reason == "runs that have not started or cannot be read: 2"


def test_unfinished_runs_and_other_corpora_are_void(results, make_run, tmp_path):
    results()
    make_run("more", "interrupted", placement="pre", lr=3e-3, seed=99)
    found = intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]
    assert verdict(STUDY, found).reason == "unfinished runs of [placement=pre]: 1"
    make_run("other", placement="pre", lr=3e-3, seed=99, run={"corpus": {"name": "b", "sha256": "b" * 64}})
    found = intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]
    assert verdict(STUDY, found).reason.startswith("the runs differ in corpus b bbbbbbbb and stdlib")


NARROW, WIDE = {"width": 32}, {"width": 64}
TWO_WIDTHS = "the arms [{}] and [{}] differ in model.width 32 and 64, which no condition names"
POST_AND_PRE = TWO_WIDTHS.format("placement=post", "placement=pre")


@pytest.mark.parametrize("which", [0, 1])
def test_arms_of_other_sizes_that_no_condition_names_are_void(results, which):
    """A claim and a control, which makes every verdict void."""
    found = results(pre=WIDE, post=NARROW)
    study = dataclasses.replace(STUDY, **{("claims", "controls")[which]: [CLAIM]})
    verdicts = judge(study, found, unverified={})
    (judgement,) = (verdicts.claims, verdicts.controls)[which]
    assert (judgement.verdict, judgement.reason) == ("void", POST_AND_PRE)
    assert verdicts.claims[0].verdict == "void"


def test_arms_of_other_sizes_are_judged_if_a_condition_names_or_the_claim_intends_the_option(results):
    found = results(pre=WIDE, post=NARROW)
    named = dataclasses.replace(CLAIM, estimator=difference("placement=post", "placement=pre,width=64"))
    a_range = dataclasses.replace(CLAIM, estimator=difference("placement=post", "placement=pre,width>=32"))
    intended = dataclasses.replace(CLAIM, intended=["model.width"])
    claims = [named, a_range, intended, dataclasses.replace(CLAIM, intended=["model.depth"])]
    judged = [verdict(dataclasses.replace(STUDY, claims=[claim]), found) for claim in claims]
    assert [each.verdict for each in judged] == ["supported", "void", "supported", "void"]
    post_and_range = TWO_WIDTHS.format("placement=post", "placement=pre,width>=32")
    assert [each.reason for each in judged] == ["", post_and_range, "", POST_AND_PRE]


def test_an_option_that_one_arm_names_may_not_differ_between_two_others(results, make_run, tmp_path):
    results(pre=NARROW, post=WIDE)
    for lr, seed in itertools.product(RATES, range(14)):
        make_run(f"peri-{lr}-{seed}", placement="peri", lr=lr, seed=seed, width=48)
    found = intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]
    three = Contrast({"placement=peri,model.width=48": 1.0, "placement=post": -0.5, "placement=pre": -0.5})
    claim = dataclasses.replace(CLAIM, estimator=three)
    assert verdict(dataclasses.replace(STUDY, claims=[claim]), found).reason == POST_AND_PRE


def test_another_size_at_some_learning_rates_of_an_arm_is_void(results, make_run, tmp_path):
    results(pre=NARROW, post=NARROW)
    for placement, seed in itertools.product(("pre", "post"), range(14)):
        make_run(f"{placement}-wide-{seed}", placement=placement, lr=3e-2, seed=seed, width=64)
    found = intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]
    assert verdict(STUDY, found).reason == TWO_WIDTHS.format("placement=post", "placement=post")


def test_arms_with_the_same_mixture_of_sizes_are_judged(results, make_run, tmp_path):
    """Such as both widths: an estimate over all runs of a seed is then a mean over them."""
    results(pre=NARROW, post=NARROW)
    for placement, lr, seed in itertools.product(("pre", "post"), RATES, range(14)):
        make_run(f"{placement}-{lr}-wide-{seed}", placement=placement, lr=lr, seed=seed, width=64)
    claim = dataclasses.replace(CLAIM, estimator=OverGrid("sensitivity", "placement=post", "placement=pre"))
    study = dataclasses.replace(STUDY, claims=[claim])
    found = intact_runs(select_runs([str(tmp_path)], tmp_path).records)[0]
    assert verdict(study, found).verdict != "void"
    without = [run for run in found if setting(run, "model.width") == 32 or setting(run, "placement") == "pre"]
    assert verdict(study, without).reason == POST_AND_PRE


def test_power_is_that_of_the_deviation_of_the_choosing_seeds(results):
    found = results()
    claim = dataclasses.replace(CLAIM, criterion=AtLeast(0.09))
    power = verdict(dataclasses.replace(STUDY, claims=[claim]), found).power
    by = {(run.config.placement.name, run.config.seed): run.loss for run in found if run.lr == 3e-3}
    sd = np.std([by["post", seed] - by["pre", seed] for seed in range(CHOOSING_SEEDS)], ddof=1)
    low, high = (sd * np.sqrt((CHOOSING_SEEDS - 1) / stats.chi2.ppf(q, CHOOSING_SEEDS - 1)) for q in (0.1, 0.9))
    assert power is not None
    assert power.seeds == CHOOSING_SEEDS
    rng = np.random.default_rng(5)
    for stated, deviation in ((power.value, sd), (power.low, low), (power.high, high)):
        supported = [
            any(typical_sequence(values[:n].tolist(), 0.05)[0] >= 0.09 for n in LOOKS)
            for values in rng.normal(0.1, deviation, (250, LOOKS[-1]))
        ]
        assert stated == pytest.approx(np.mean(supported), abs=0.08)
    assert power.text.endswith(f"(sd from {CHOOSING_SEEDS} seeds)")
    at_one_rate = [run for run in found if run.lr == 3e-3]  # whose first seeds judge too
    assert verdict(dataclasses.replace(STUDY, claims=[claim]), at_one_rate).power == power


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("criterion", "effect", "alpha"),
    [(AtLeast(0.05), 0.1, 0.05), (AtMost(0.0), -0.02, 0.05), (Within(-0.1, 0.1), 0, 0.1)],
)
def test_the_largest_deviation_has_a_power_of_80_percent(criterion, effect, alpha):
    claim = dataclasses.replace(CLAIM, criterion=criterion, effect=effect)
    deviation = largest_deviation(claim, tests=3)
    assert deviation is not None
    rng, (least, most) = np.random.default_rng(5), criterion.limits
    supported = 0
    for values in rng.normal(effect, deviation, (400, LOOKS[-1])):
        sequences = (typical_sequence(values[:n].tolist(), alpha / 3) for n in LOOKS)
        supported += any(least <= low and high <= most for low, high in sequences)
    assert supported / 400 == pytest.approx(0.8, abs=0.06)


def test_a_claim_without_an_effect_or_within_no_reach_has_no_largest_deviation():
    for claim in (dataclasses.replace(CLAIM, effect=None), dataclasses.replace(CLAIM, effect=0.0), CONTROL):
        assert largest_deviation(claim, tests=1) is None


@pytest.mark.parametrize(
    ("criterion", "effect", "deviation"),
    [(AtLeast(0.0), 2.0, math.inf), (AtMost(1.0), 0.0, math.inf), (AtMost(0.0), 1.0, None)],
)
def test_a_ratio_with_a_limit_or_an_effect_of_zero_has_every_deviation_or_none(criterion, effect, deviation):
    ratio = dataclasses.replace(POST_MINUS_PRE, is_ratio=True)
    claim = dataclasses.replace(CLAIM, estimator=ratio, criterion=criterion, effect=effect)
    assert largest_deviation(claim, tests=1) == deviation


@dataclasses.dataclass(frozen=True, slots=True)
class BestLoss(Estimator):
    """The mean loss at the best learning rate."""

    where: str

    @property
    def text(self):
        return f"loss at the best learning rate: [{self.where}]"

    @property
    def quantity(self):
        return "loss, nats/token"

    def estimate(self, runs):
        arm = runs.arm(self.where)
        losses: dict[Replicate, float] = {run.replicate: run.loss for run in arm.judged() if run.lr == arm.best_lr}
        return dataclasses.replace(over_seeds(losses), rates={self.where: arm.chosen_lrs})


def test_an_estimator_is_a_text_a_quantity_and_an_estimate(results):
    claim = dataclasses.replace(CLAIM, estimator=BestLoss("placement=post"), criterion=Within(2.0, 2.2))
    judgement = verdict(dataclasses.replace(STUDY, claims=[claim]), results())
    assert judgement.verdict == "supported"
    assert (judgement.power, judgement.at_best, judgement.common) == (None, None, None)
    assert largest_deviation(claim, tests=1) is None


def test_verdicts_are_corrected_for_all_claims_of_the_study(results):
    found = results()
    found_alone = verdict(STUDY, found)
    same = [dataclasses.replace(CLAIM, name=f"claim_{number}") for number in range(4)]
    judged = judge(dataclasses.replace(STUDY, claims=same), found, unverified={}).claims
    assert [each.p for each in judged] == pytest.approx([4 * found_alone.p] * 4)
    estimate = found_alone.estimate
    assert estimate.deviation is not None
    close = dataclasses.replace(CLAIM, criterion=AtLeast(estimate.value - 1.75 * estimate.deviation))
    alone = verdict(dataclasses.replace(STUDY, claims=[close]), found)
    assert alone.verdict == "supported"
    several = [dataclasses.replace(close, name=f"claim_{number}") for number in range(5)]
    many = judge(dataclasses.replace(STUDY, claims=several), found, unverified={}).claims
    assert {(each.verdict, each.reason) for each in many} == {
        ("undecided", f"p={5 * alone.p:.2g}, corrected for 5 claims")
    }


@pytest.mark.parametrize(("bound", "is_open"), [(0.05, False), (0.0865, True)])
def test_a_claim_is_open_while_more_seeds_may_decide_it(results, bound, is_open):
    """Decided at 0.05."""
    found = results()
    claim = dataclasses.replace(CLAIM, criterion=AtLeast(bound))
    verdicts = judge(dataclasses.replace(STUDY, claims=[claim]), found, unverified={})
    assert (claim in verdicts.open_claims) == is_open


def test_a_claim_near_its_limit_is_open_while_seeds_are_left():
    values = np.random.default_rng(0).normal(0.0, 0.02, 26)
    values += 0.1 - typical_value(values.tolist())
    estimate = over_seeds({(k, k): value for k, value in enumerate(values.tolist())})
    low, _ = estimate.interval(0.05)
    claim = dataclasses.replace(CLAIM, criterion=AtLeast(low + 1e-4))
    assert [is_futile(claim, estimate, seeds_left) for seeds_left in (0, 4)] == [True, False]


def test_shares_use_all_seeds():
    """Also a difference of shares, whose n is the seeds of both arms together."""
    claim = dataclasses.replace(CLAIM, estimator=Share("placement=post"), criterion=AtLeast(0.1))
    for estimate in (share(9, 26), dataclasses.replace(share(5, 12), n=24)):
        assert [is_futile(claim, estimate, seeds_left) for seeds_left in (0, 4)] == [True, False]


def test_the_chance_to_decide_a_ratio_is_that_of_its_logarithm():
    """The limit is far from the values as a ratio, and near them as a logarithm."""
    values = np.random.default_rng(3).normal(math.log(0.8), 0.5, 12)
    estimate = exponential(over_seeds({(k, k): value for k, value in enumerate(values.tolist())}))
    criterion = AtMost(1.0)
    by_grid = OverGrid("highest_rate", "placement=post", "placement=pre")
    by_contrast = Contrast({"placement=post": 1.0, "placement=pre": -1.0}, is_ratio=True)
    answers = []
    for estimator in (by_grid, by_contrast):
        claim = dataclasses.replace(CLAIM, estimator=estimator, criterion=criterion)
        answers.append(is_futile(claim, estimate, 12))
    assert by_grid.on_symmetric_scale(2.0) == math.log(2.0)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("has_low", "has_high", "futile"), [(True, True, False), (True, False, True), (False, True, False)]
)
def test_more_seeds_are_futile_where_the_interval_lacks_the_end_that_decides(has_low, has_high, futile):
    """The values are around a number below the limit. Without an upper end no number of seeds shows it."""
    values = -0.1 + np.random.default_rng(5).normal(0, 0.1, 14)
    estimate = over_seeds({(k, k): value for k, value in enumerate(values.tolist())})

    def interval(alpha: float) -> tuple[float, float]:
        low, high = estimate.interval(alpha)
        return low if has_low else -math.inf, high if has_high else math.inf

    claim = dataclasses.replace(CLAIM, criterion=AtMost(-0.05))
    assert is_futile(claim, dataclasses.replace(estimate, interval=interval), 16) == futile


def test_the_seeds_that_are_left_are_those_of_the_blocks_of_the_study(results, monkeypatch):
    """The arms of a claim lack a block that was trained while only other claims were open."""
    questions: list[int] = []

    def record(claim: Claim, estimate: Estimate, seeds_left: int) -> bool:
        questions.append(seeds_left)
        return False

    found = results()
    early = [run for run in found if run.config.seed < 10]
    undecided = dataclasses.replace(CLAIM, criterion=AtLeast(verdict(STUDY, early).estimate.value))
    monkeypatch.setattr("normlab.studies.judge.is_futile", record)
    lacking = [run for run in found if run.config.seed < 10 or setting(run, "placement") == "post"]
    judge(dataclasses.replace(STUDY, claims=[undecided], controls=[]), lacking, unverified={})
    assert questions == [CHOOSING_SEEDS + LOOKS[-1] - 14]


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_claim_about_all_runs_of_each_seed_has_as_many_looks_as_another(results, monkeypatch, blocks):
    """Its choosing seeds judge too, so that it has six seeds more than a claim about the chosen rates."""
    questions: list[tuple[int, int]] = []

    def record(claim: Claim, estimate: Estimate, seeds_left: int) -> bool:
        questions.append((estimate.n, seeds_left))
        return False

    monkeypatch.setattr("normlab.studies.judge.is_futile", record)
    found = [run for run in results() if run.config.seed < 6 + 4 * blocks]
    undecided = []
    for estimator in (OverGrid("sensitivity", "placement=post"), POST_MINUS_PRE):
        claim = dataclasses.replace(CLAIM, estimator=estimator, criterion=AtLeast(0.0))
        middle = verdict(dataclasses.replace(STUDY, claims=[claim]), found).estimate.value
        undecided.append(dataclasses.replace(claim, name=estimator.text, criterion=AtLeast(middle)))
    questions.clear()
    judge(dataclasses.replace(STUDY, claims=undecided, controls=[]), found, unverified={})
    assert questions == [(6 + 4 * blocks, 24 - 4 * blocks), (4 * blocks, 24 - 4 * blocks)]


@pytest.mark.parametrize(
    ("criterion", "expected"), [(AtLeast(0.0), True), (Within(-0.004, 0.004), True), (AtLeast(-0.008), False)]
)
def test_more_seeds_are_futile_where_eight_more_would_not_decide(criterion, expected):
    """Sixteen seeds with a standard deviation of 0.014 about 0."""
    values = stats.norm.ppf((np.arange(16) + 0.5) / 16, scale=0.014)
    values = np.random.default_rng(1).permutation(values)
    estimate = over_seeds({(k, k): value for k, value in enumerate(values.tolist())})
    claim = dataclasses.replace(CLAIM, criterion=criterion)
    assert is_futile(claim, estimate, LOOKS[-1] - 16) == expected


@pytest.mark.parametrize(("left_out", "expected"), [(0, True), (3, True), (8, False)])
def test_seeds_without_the_quantity_count_as_judged(left_out, expected):
    """Of 24 seeds that were judged, three have none: no look is left. Of sixteen, eight more may decide the claim."""
    n = 24 - left_out if left_out < 8 else 8
    seeds_left = 24 - n - left_out
    values = 0.02 + np.random.default_rng(4).normal(0, 0.02, n)
    estimate = over_seeds({(k, k): value for k, value in enumerate(values.tolist())})
    estimate = dataclasses.replace(estimate, left_out=left_out)
    assert is_futile(dataclasses.replace(CLAIM, criterion=AtLeast(0.0)), estimate, seeds_left) == expected


@pytest.mark.exhaustive
def test_studies_that_stop_early_lose_no_power():
    """Of simulated studies that support a claim by 24 seeds, nearly all do so if they stop where more are futile."""
    claim = dataclasses.replace(CLAIM, criterion=Within(-0.02, 0.02))
    supported = stopped = 0
    for values in np.random.default_rng(2).normal(0.0, 0.02, (40, LOOKS[-1])):
        estimates = [over_seeds({(k, k): value for k, value in enumerate(values[:n].tolist())}) for n in LOOKS]
        verdicts = [claim.criterion.verdict(estimate.interval) for estimate in estimates]
        if "supported" in verdicts:
            supported += 1
            earlier = estimates[: verdicts.index("supported")]
            stopped += any(is_futile(claim, estimate, LOOKS[-1] - estimate.n) for estimate in earlier)
    assert supported > 30
    assert stopped <= 1


def test_the_hash_depends_on_what_decides_a_verdict_only():
    same = dataclasses.replace(STUDY, question="Other words?", limits="More.", pictures=[])
    assert same.criterion_hash() == STUDY.criterion_hash()
    for changed in (
        dataclasses.replace(STUDY, claims=[dataclasses.replace(CLAIM, criterion=AtLeast(0.04))]),
        dataclasses.replace(STUDY, claims=[dataclasses.replace(CLAIM, effect=0.2)]),
        dataclasses.replace(STUDY, claims=[dataclasses.replace(CLAIM, text="Post-norm has a lower loss.")]),
        dataclasses.replace(STUDY, controls=[]),
        dataclasses.replace(STUDY, grids=[Grid("all", "placement=pre,post seed=1")]),
    ):
        assert changed.criterion_hash() != STUDY.criterion_hash()
