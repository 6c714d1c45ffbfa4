"""Outcomes: the edges of each rule, exclusive and exhaustive."""

import itertools
import math
from dataclasses import replace

import pytest

from normlab.store.outcome import OUTCOMES, References, explain_loss, final_losses, outcome
from normlab.store.status import Status, StepNumbers

STDLIB = References(uniform=math.log(257), unigram=3.24, bigram=2.43, initial=5.6)
"""The band is 3.078 to 3.402, the start 5.6."""


@pytest.mark.parametrize(
    ("final", "best", "expected"),
    [
        (2.43, 2.43, "finished"),
        (3.077, 3.077, "finished"),
        (3.079, 3.079, "stuck"),
        (3.401, 3.079, "stuck"),
        (3.2, 3.07, "regressed"),
        (3.5, 3.2, "regressed"),
        (4.93, 2.4, "regressed"),
        (4.93, 4.93, "finished"),  # a short run whose loss still falls
        (5.5, 3.5, "finished"),
        (5.61, 5.6, "finished"),  # no worse than the untrained model, but for noise
        (5.87, 5.6, "finished"),
        (5.89, 5.6, "regressed"),  # worse than the untrained model
        (6.59, 5.6, "regressed"),
        (6.61, 5.6, "diverged"),
        (2.3e9, 5.4, "diverged"),
        (math.inf, 5.4, "diverged"),
        (math.nan, 2.0, "diverged"),
    ],
)
def test_rules(final: float, best: float, expected: str) -> None:
    assert outcome(final, best, STDLIB) == expected
    assert outcome(final, best, STDLIB, finite=False) == "diverged"


def test_rules_are_exclusive_and_exhaustive() -> None:
    """Exactly one of four rules, written out here independently, holds for any final and best loss."""
    losses = [0.5 + 0.05 * step for step in range(140)]
    outcomes = set()
    for best, final in itertools.combinations_with_replacement(losses, 2):
        diverged = final > 6.6
        lost = (best < 3.078 <= final) or (best <= 3.402 < final) or (best <= 5.88 < final)
        holding = {
            "diverged": diverged,
            "regressed": lost and not diverged,
            "stuck": best >= 3.078 and final <= 3.402,
            "finished": final < 3.078 or (best > 3.402 and final <= 5.88) or (best > 5.88 and not diverged),
        }
        (only,) = [name for name, holds in holding.items() if holds]
        assert outcome(final, best, STDLIB) == only
        outcomes.add(only)
    assert outcomes == set(OUTCOMES)


@pytest.mark.parametrize(
    ("unigram", "bigram", "low"),
    [
        (3.24, 2.43, 0.95 * 3.24),
        (3.24, 3.2, (3.24 + 3.2) / 2),  # close: 5 % below would count a run at the bigram entropy as stuck
        (11.2, 11.7, 11.2),  # a corpus so small that the bigram is worse
    ],
)
def test_band(unigram: float, bigram: float, low: float) -> None:
    result = References(5.5, unigram, bigram).band
    assert result == pytest.approx((low, 1.05 * unigram))


def test_initial_loss_raises_the_limit_and_never_lowers_it() -> None:
    deep = References(math.log(257), 3.24, 2.43, initial=40.0)
    assert outcome(30.0, 30.0, deep) == "finished"
    assert outcome(41.1, 40.0, deep) == "diverged"
    lucky = References(math.log(257), 3.24, 2.43, initial=4.0)
    assert outcome(math.log(257) + 0.99, 4.0, lucky) == "regressed"


def completed(
    val_loss: float, best: float, initial: float, last: StepNumbers | None = None, state: str = "finished"
) -> tuple[Status, Status]:
    """Return a status, and the last one that a run with it writes."""
    before = Status(state, step=60, steps=60, train_loss=7.0, val_loss=val_loss, best_val_loss=best)
    return before, before.completed(References(5.55, 3.24, 2.43, initial), last)


def test_last_status_of_a_run_whose_final_loss_is_a_divergence() -> None:
    last = StepNumbers(59, 7.0, 3.0)
    _, result = completed(2.3e9, 5.4, 5.62, last)
    assert (result.state, result.outcome, result.initial_val_loss) == ("diverged", "diverged", 5.62)
    diverged = result.diverged
    assert diverged is not None
    assert (diverged.step, diverged.loss, result.val_loss, diverged.last_finite) == (60, 7.0, 2.3e9, last)
    assert str(diverged) == (
        "its final validation loss is 2.3e+09, more than 1 nat above ln V 5.5500 and the initial loss 5.6200: "
        "worse than a uniform guess; last finite at step 59: loss 7.0000, gradient norm 3"
    )
    assert final_losses(result.state, result.val_loss) == (None, 2.3e9)


def test_every_other_last_status_has_its_outcome() -> None:
    before, result = completed(3.2, 3.2, 5.6)
    assert result == replace(before, initial_val_loss=5.6, outcome="stuck")
    before, result = completed(3.2, 3.2, 5.6, state="interrupted")
    assert result == before
    _, result = completed(math.nan, 2.0, math.nan)
    assert result.diverged is not None
    assert (result.state, result.diverged.reason) == ("diverged", "its final validation loss is nan")


@pytest.mark.parametrize(
    ("bigram", "text"), [(2.5, "0.5000 below bigram 2.5000"), (3.5, "1.2000 below unigram 3.2000")]
)
def test_a_loss_is_compared_with_the_better_baseline(bigram: float, text: str) -> None:
    """A bigram model of little text is worse than the unigram model."""
    assert explain_loss("finished", 2.0, 2.0, References(5.5, 3.2, bigram)) == text
