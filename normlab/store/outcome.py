"""The outcome of a completed run: finished, stuck, regressed or diverged. Training and reports use the same rules.

A validation loss (nats/token) has a level, which shows what the model has learned:

| level | losses | such a model |
| --- | --- | --- |
| 0 | below the band | uses the context |
| 1 | in the band around the unigram entropy U | predicts about as well as the frequencies of tokens alone |
| 2 | above the band, up to 5 % above the start: max(ln V, initial loss) | has not learned how often tokens occur |
| 3 | more than 5 % above the start | is worse than a uniform guess (ln V) and than the untrained model |

The band is U +- 5 %. If the bigram entropy is close to U, the lower edge is halfway between the two. If the bigram
entropy is above U (a very small corpus), the lower edge is U. The outcome is the first rule that holds:

| outcome | rule | reason |
| --- | --- | --- |
| diverged | loss or gradient NaN or infinite, or final loss > start + 1 | perplexity e times the start's |
| regressed | the final loss has a higher level than the best loss | the run lost what it had learned |
| stuck | the final loss is in the band | the run hardly uses the context, or has only begun to |
| finished | every other run | the final loss is below the band, or the run ended before it reached the band |

A uniform guess has the loss ln V, so a diverged run is at least 1 nat/token worse than both a guess and the untrained
model. A short run that ends above the band is finished: it has learned little and lost nothing. A run without
steps (train.steps=0) is never stuck.
"""

import math
from dataclasses import dataclass

from normlab.store.format import DIVERGED, FINISHED

STUCK = "stuck"
REGRESSED = "regressed"
OUTCOMES = (FINISHED, STUCK, REGRESSED, DIVERGED)

BAND = 0.05
"""Half the width of the band relative to U, and the margin of level 3 relative to the start."""
MARGIN = 1.0
"""A final loss more than this many nats/token above the start is a divergence."""
LARGEST_LOSS = 3.5e38
"""Just above the largest float32; training in float32 cannot produce a larger finite loss."""

DESCRIPTIONS = {
    STUCK: f"the final loss is within {BAND:.0%} of the unigram entropy, the loss of a model that knows only how often "
    "tokens occur",
    REGRESSED: "the final loss has a worse level than the best loss: the run lost what it had learned",
    DIVERGED: "the loss or gradient was NaN or infinite, or the final loss is more than "
    f"{MARGIN:g} nat/token above both ln V and the initial loss",
}
"""The outcomes in short, for notes below tables; the table above has the complete rules."""


@dataclass(frozen=True, slots=True)
class References:
    """Reference losses of a run, in nats/token."""

    uniform: float
    """ln V."""
    unigram: float
    bigram: float
    initial: float | None = None
    """Validation loss before the first update; None if it was not measured yet."""

    @property
    def start(self) -> float:
        """The larger of ln V and the initial loss."""
        if self.initial is None:
            return self.uniform
        return max(self.uniform, self.initial)

    @property
    def band(self) -> tuple[float, float]:
        # Where the bigram entropy is close to U, the band ends halfway: a lower loss is nearer to the bigram model's.
        halfway = (self.unigram + self.bigram) / 2
        low = max((1 - BAND) * self.unigram, min(halfway, self.unigram))
        return low, (1 + BAND) * self.unigram

    def level(self, loss: float) -> int:
        """Return the level of a loss, 0 (uses the context) to 3 (worse than no training)."""
        low, high = self.band
        if loss < low:
            return 0
        if loss <= high:
            return 1
        if loss <= (1 + BAND) * self.start:
            return 2
        return 3


def outcome(final: float, best: float, references: References, *, finite: bool = True) -> str:
    """Return the outcome of a completed run, by the rules of this module's docstring.

    Args:
        final: Last validation loss.
        best: Lowest validation loss of any evaluation.
        references: The run's reference losses.
        finite: Whether every training loss and gradient was finite.
    """
    if not finite or not math.isfinite(final) or final > references.start + MARGIN:
        return DIVERGED
    level = references.level(final)
    if references.level(best) < level:
        return REGRESSED
    return STUCK if level == 1 else FINISHED


def final_losses(outcome: str | None, loss: float | None) -> tuple[float | None, float | None]:
    """Return the final validation loss, and the last finite loss of a diverged run.

    The final loss of a diverged run is None. The last finite loss of any other run is None, and that of a diverged run
    is None too if the loss of its status is not finite.

    Args:
        outcome: The outcome or the state.
        loss: The validation loss of the status.
    """
    if outcome != DIVERGED:
        return loss, None
    if loss is None or not math.isfinite(loss):
        return None, None
    return None, loss


def explain_loss(outcome: str | None, final: float, best: float | None, references: References) -> str:
    """Return a validation loss compared with its baselines, as text.

    Args:
        outcome: The outcome; None for a run that is not completed.
        final: The loss.
        best: The lowest loss of any evaluation.
        references: The run's reference losses.
    """
    level = references.level(final)
    if outcome == REGRESSED and best is not None:
        reason = "it lost what it had learned"
        if level == 3:
            reason = "worse than the untrained model"
        return f"up from a best of {best:.4f}: {reason}"
    # On little text the bigram model is worse than the unigram model, so that being below it says nothing.
    name, baseline = "unigram", references.unigram
    if level == 0 and references.bigram < references.unigram:
        name, baseline = "bigram", references.bigram
    side = "below" if final < baseline else "above"
    text = f"{abs(final - baseline):.4f} {side} {name} {baseline:.4f}"
    if level and outcome == STUCK:
        return f"{text}: about that of a model that knows only how often tokens occur"
    if level > 1:
        return f"{text}: it has not yet learned how often tokens occur"
    return text


def format_loss(loss: float | None, sign: str = "") -> str:
    """Return a loss as text: four decimals, four digits from 1e5 on, `?` for None.

    Args:
        loss: The loss, nats/token.
        sign: `+` to write the sign of a positive number too.
    """
    if loss is None:
        return "?"
    digits = ".4f" if abs(loss) < 1e5 else ".4g"
    if math.isnan(loss):  # it has no sign
        return format(loss, digits)
    return format(loss, sign + digits)
