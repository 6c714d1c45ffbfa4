"""The page of a study's report: README.md as Markdown, from the verdicts of its attempts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import fmean, stdev

from normlab.analysis.settings import format_setting
from normlab.base.errors import printable
from normlab.studies.base import AT_BEST, Study
from normlab.studies.index import command, plugins_argument, table_lines
from normlab.studies.judge import ArmSummary, Judgement
from normlab.studies.report_format import Tested
from normlab.studies.verdict_figure import CAPTION

COLUMNS = (
    "claim", "source", "verdict", "estimate [95% interval, or 90%]", AT_BEST, "criterion", "n", "left out", "bad",
    "p (Holm)", "power", "learning rates", "choosing seeds at a common rate",
)  # fmt: skip
ARM_COLUMNS = (
    "arm", "grid of learning rates", "chosen", "best", "loss at the best, nats/token", "sd over seeds", "have learned",
)  # fmt: skip
LIMITS = "More seeds, and larger models."
LEGEND = (
    "n: seeds in the estimate, or seeds of a share. left out: seeds without the quantity, because a run diverged or, "
    "for a loss, has not learned. bad: judged runs that have not learned; of a share, those that count. p: the "
    "smallest level at which the claim is decided, corrected for all claims of the study. power: the probability of "
    "the verdict supported, if the effect is the number behind it; with the standard deviation of the choosing seeds "
    "(with a single learning rate: of the first six), and at the ends of its interval of 80 %. learning rates: those "
    "of each arm whose loss is above that at the best one by at most one standard error of the choosing seeds; a "
    f"seed's value is its mean over them. {AT_BEST}: the same estimate with each arm at its best rate only. It is "
    "empty if each arm has one chosen rate. It is also empty if arms are not contrasted. Slopes in old reports do not "
    "have it. Its interval is not corrected for the number of claims, and decides no verdict. The table of arms has "
    "the judging seeds, or the choosing ones where no others were needed."
)
OUTCOMES = (
    "A run has learned if it finished with a loss below the band around the unigram entropy, the loss of a model that "
    "uses only the frequency of each token; stuck is one inside the band (5 %, `normlab list data`), regressed one "
    "that ended higher than it had been, diverged one whose loss is infinite or 1 nat/token above that of the start."
)


def page_blocks(study: Study, tested: Sequence[Tested], captions: Sequence[str]) -> Iterator[str]:
    """Yield the paragraphs of the page."""
    first = tested[0]
    # The verdicts, in sentences and as pictures.
    yield f"# {printable(study.question)}"
    yield _list(attempt.description for attempt in tested)
    yield _list(judgement.sentence for judgement in first.verdicts.claims)
    pictures = {f"figure-{index}": caption for index, caption in enumerate(captions, 1)}
    pictures["verdicts"] = CAPTION
    for name, caption in pictures.items():
        yield f"![{printable(caption)}]({name}.svg)\n\n*{printable(caption)}*"

    # The tables of each attempt, and how to read them.
    for attempt in tested:
        yield from _tables(attempt)
    yield LEGEND
    yield OUTCOMES
    shared = ", ".join(f"{name}={format_setting(value)}" for name, value in first.shared.items())
    yield printable(f"All runs of the first attempt have {shared}.")
    if study.controls:
        controls = ", ".join(control.name for control in study.controls)
        yield f"The last rows are controls ({controls}); one that is not supported makes every verdict void."

    # What was stated before the runs, and its changes.
    if study.background:
        yield "## What is known"
        yield printable(study.background)
    yield "## What would change the verdicts"
    yield printable(study.limits or LIMITS)
    if study.amendments:
        yield "## Amendments"
        yield _list(f"after the criterion {hash}: {reason}" for hash, reason in study.amendments.items())
    yield "## Estimators and criteria"
    yield _list(_methods(study, tested))

    # The same runs again with the same seeds, then with fresh ones, which are evidence of their own.
    yield "## Commands"
    plugins = plugins_argument(attempt.plugins for attempt in tested)
    commands = [
        command(study.name, first.setting, first.first_seed) + plugins,
        f"normlab study replicate {study.name} --seeds fresh{plugins}",
        "# its grids, with the choosing seeds",
    ]
    commands += [grid.command + plugins for grid in study.grids]
    yield "\n".join(["```sh", *map(printable, commands), "```"])


def _tables(attempt: Tested) -> Iterator[str]:
    verdicts = attempt.verdicts
    yield f"## Claims: {attempt.label}"
    if verdicts.notes:
        yield _list(verdicts.notes)
    judgements = (*verdicts.claims, *verdicts.controls)
    yield "\n".join(table_lines([COLUMNS, *map(_claim_row, judgements)]))
    if verdicts.arms:
        yield f"### Arms: {attempt.label}"
        yield "\n".join(table_lines([ARM_COLUMNS, *map(_arm_row, verdicts.arms)]))


def _methods(study: Study, tested: Sequence[Tested]) -> Iterator[str]:
    """Yield the estimator, the kind of interval and the criterion of each claim, as in the last attempt."""
    estimators: dict[str, str] = {}
    methods: dict[str, str] = {}
    for attempt in tested:
        for judgement in (*attempt.verdicts.claims, *attempt.verdicts.controls):
            estimators[judgement.claim.name] = judgement.estimator_text
            # An attempt whose verdict is void has no interval, while another attempt may have one.
            if judgement.estimate.method:
                methods[judgement.claim.name] = judgement.estimate.method
    for claim in (*study.claims, *study.controls):
        estimator, method = estimators[claim.name], methods.get(claim.name, "none")
        yield f"{claim.text} Estimator: {estimator}. Interval: {method}. Criterion: {claim.criterion.text}."


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {printable(item)}" for item in items)


def _claim_row(judgement: Judgement) -> Sequence[str]:
    claim, estimate = judgement.claim, judgement.estimate
    power = f"{judgement.power.text}, at {claim.effect:g}" if judgement.power else ""
    rates = sorted(set(chain(*estimate.rates.values())))
    common = ""
    if judgement.common is not None:
        value, rate = judgement.common
        common = f"{value:.3g} at {rate:g}"
    return (
        claim.text,
        claim.source,
        judgement.verdict_in_words + judgement.notes,
        judgement.interval,
        judgement.interval_at_best,
        claim.criterion.text,
        str(estimate.n),
        str(estimate.left_out),
        str(estimate.bad),
        f"{judgement.p:.2g}",
        power,
        ", ".join(map(format_setting, rates)),
        common,
    )


def _arm_row(arm: ArmSummary) -> Sequence[str]:
    losses = list(arm.losses.values())
    # Cells stay empty of an arm of which no run has learned, and of the deviation of a single loss.
    best = mean = deviation = ""
    if arm.best is not None:
        best = format_setting(arm.best)
    if losses:
        mean = f"{fmean(losses):.3f}"
    if len(losses) > 1:
        deviation = f"{stdev(losses):.3f}"
    return (
        arm.where,
        ", ".join(map(format_setting, arm.rates)),
        ", ".join(map(format_setting, arm.chosen)),
        best,
        mean,
        deviation,
        f"{len(losses)} of {arm.runs}",
    )
