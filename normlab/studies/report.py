"""The report of a study: report.json and figures from the records of its runs, a Markdown page from report.json.

Equal records give equal files, byte for byte: nothing here depends on the time or the machine.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from normlab.analysis.settings import format_setting, setting, settings_of
from normlab.analysis.table import summarize_by
from normlab.base.errors import StoreError, counted, printable, warn
from normlab.report.figure_data import make_figure
from normlab.report.figure_draw import SETTINGS as STYLE
from normlab.report.figure_draw import render_figure, write_figure
from normlab.report.pages.shell import write_output
from normlab.store.files import check_links
from normlab.store.format import REPORT_FILE, with_checksum
from normlab.store.reading import damaged
from normlab.store.record import RunRecord
from normlab.studies.base import AT_BEST, SETTINGS, Picture, Study
from normlab.studies.index import as_text, command, plugins_argument, table_lines, write_index
from normlab.studies.judge import LEVELS, ArmSummary, Judgement, Verdicts, as_row, from_row, judge
from normlab.studies.report_format import read_stored_report
from normlab.studies.run import Attempt, Evidence

FORMATS = ("svg", "pdf")
SETTING_ORDER = list(SETTINGS)
COLOURS = {"supported": "#1f7a3d", "refuted": "#b3261e", "undecided": "#8a6d00", "void": "#5a6472"}
COLUMNS = (
    "claim", "source", "verdict", "estimate [95% interval, or 90%]", AT_BEST, "criterion", "n", "left out", "bad",
    "p (Holm)", "power", "learning rates", "choosing seeds at a common rate",
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


@dataclass(frozen=True, slots=True)
class Tested:
    """The verdicts of an attempt, and what a report keeps of its runs."""

    setting: str
    first_seed: int
    verdicts: Verdicts
    runs: int
    tokens: float
    devices: Sequence[str]
    corpora: Sequence[str]
    plugins: Sequence[str]
    shared: Mapping[str, Any]
    """The options of model and training that all runs share."""

    @property
    def label(self) -> str:
        return f"{self.setting}, seeds from {self.first_seed} on"


FACTS = ("setting", "first_seed", "runs", "tokens", "devices", "corpora", "plugins", "shared")
SHARED = (
    "model.width", "model.heads", "model.context", "train.batch_size", "optim", "optim.schedule", "optim.warmup_steps",
    "optim.weight_decay", "optim.clip", "norm",
)  # fmt: skip
"""The options of which a report names those that all runs share."""


def folder_of(results_dir: str, study: Study) -> Path:
    return Path(results_dir) / "studies" / study.name


def write_report(study: Study, attempts: Sequence[tuple[Attempt, Evidence]], folder: Path) -> tuple[list[Tested], Path]:
    """Write the report of a study and the table of all reports; return its verdicts and the report's page.

    Attempts without records here, such as those of somebody else whose verdicts are repeated, stay as they are in
    report.json. The figures are those of the first attempt.

    Raises:
        StoreError: There is no attempt, a file cannot be read or written, or a link leads out of the folder.
    """
    check_links(folder)
    stored, captions = read_report(study, folder)
    tested = {_place(each): each for each in stored}
    for attempt, evidence in attempts:
        verdicts = judge(
            study, evidence.results,
            unverified=evidence.unverified, missing=evidence.missing, notes=evidence.notes,
        )  # fmt: skip
        tested[_place(attempt)] = _tested(attempt, verdicts, evidence.results)
        if _place(attempt) == min(tested):
            captions = [_draw(picture, index, evidence, folder) for index, picture in enumerate(study.pictures, 1)]
    if not tested:
        raise StoreError(f"study {study.name}: has no runs; train them with `normlab study run {study.arguments}`")
    in_order = [tested[key] for key in sorted(tested)]
    return in_order, _write(study, in_order, captions, folder)


def _place(attempt: Attempt | Tested) -> tuple[int, int]:
    """Return the place of an attempt in a report: those of the small setting first, the others never replace these."""
    return SETTING_ORDER.index(attempt.setting), attempt.first_seed


def _draw(picture: Picture, index: int, evidence: Evidence, folder: Path) -> str:
    """Write a picture in each of `FORMATS`; return its caption."""
    table = summarize_by(evidence.selection, picture.by, where=[picture.where] if picture.where else [])
    figure = make_figure(picture.kind, table, **picture.options)  # pyright: ignore[reportArgumentType]
    for format in FORMATS:
        write_figure(figure, folder / f"figure-{index}.{format}")
    return figure.caption


def _tested(attempt: Attempt, verdicts: Verdicts, runs: Sequence[RunRecord]) -> Tested:
    return Tested(
        attempt.setting, attempt.first_seed, verdicts, len(runs), math.fsum(run.status.tokens for run in runs),
        sorted({str(settings_of(run)["device"]) for run in runs}),
        sorted({str(settings_of(run)["corpus"]) for run in runs}),
        list(dict.fromkeys(name for run in runs for name in run.config.plugins)),
        {name: values.pop() for name in SHARED if len(values := {setting(run, name) for run in runs}) == 1},
    )  # fmt: skip


def read_report(study: Study, folder: Path) -> tuple[list[Tested], list[str]]:
    """Return the attempts and the captions of a report that has been written; none if its criterion is another one.

    Raises:
        StoreError: The file cannot be read, or is damaged.
    """
    path, now = folder / REPORT_FILE, study.criterion_hash()
    if not path.exists():
        return [], []
    try:
        report = read_stored_report(path)
        if (criterion := report["criterion"]) != now:
            warn(f"{path}: was judged by criterion {criterion}, now {now}; its attempts without runs here are left out")
            return [], []
        tested = []
        for row in report["attempts"]:
            arms = [ArmSummary(**arm) for arm in row["arms"]]
            claims, controls = (
                [from_row(claim, each) for claim, each in zip(claims, row[kind], strict=True)]
                for kind, claims in (("claims", study.claims), ("controls", study.controls))
            )
            verdicts = Verdicts(study, claims, controls, row["notes"], arms)
            tested.append(Tested(verdicts=verdicts, **{name: row[name] for name in FACTS}))
        return tested, report["captions"]
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, repr(error)) from error


def _write(study: Study, tested: Sequence[Tested], captions: Sequence[str], folder: Path) -> Path:
    data = {
        "study": study.name,
        "question": study.question,
        "limits": study.limits or LIMITS,
        "criterion": study.criterion_hash(),
        "grids": {grid.name: grid.overrides for grid in study.grids},
        "attempts": [
            {
                **{name: getattr(each, name) for name in FACTS},
                "claims": [as_row(claim) for claim in each.verdicts.claims],
                "controls": [as_row(claim) for claim in each.verdicts.controls],
                "notes": list(each.verdicts.notes),
                "arms": [asdict(arm) for arm in each.verdicts.arms],
            }
            for each in tested
        ],
        "captions": list(captions),
        **({"amendments": dict(study.amendments)} if study.amendments else {}),
    }
    first = tested[0].verdicts
    forest = draw_verdicts([*first.claims, *first.controls])
    for format in FORMATS:
        write_output(folder / f"verdicts.{format}", forest[format])
    page = folder / "README.md"
    write_output(page, as_text("\n\n".join(_blocks(study, tested, captions)) + "\n").encode())
    write_output(folder / REPORT_FILE, with_checksum(data))
    write_index(folder.parent)
    return page


def _blocks(study: Study, tested: Sequence[Tested], captions: Sequence[str]) -> Iterator[str]:
    yield f"# {printable(study.question)}"
    yield _list(
        f"{each.label}: {counted(each.runs, 'run')}, {each.tokens:,.0f} tokens, on {', '.join(each.devices)}; corpus "
        f"{', '.join(each.corpora)}."
        for each in tested
    )
    yield _list(each.sentence for each in tested[0].verdicts.claims)
    pictures = {f"figure-{index}": caption for index, caption in enumerate(captions, 1)}
    pictures["verdicts"] = (
        "Each estimate with its 95% interval (thick: 90%). The criterion is the shaded range. Open circle: the same "
        f"{AT_BEST}, where that is another number; with its 95% interval (90% for two one-sided tests)."
    )
    for name, caption in pictures.items():
        yield f"![{printable(caption)}]({name}.svg)\n\n*{printable(caption)}*"
    for each in tested:
        yield f"## Claims: {each.label}"
        if each.verdicts.notes:
            yield _list(each.verdicts.notes)
        yield _table([*each.verdicts.claims, *each.verdicts.controls])
        if each.verdicts.arms:
            yield f"### Arms: {each.label}"
            yield "\n".join(table_lines([ARM_COLUMNS, *map(_arm_row, each.verdicts.arms)]))
    controls = ", ".join(claim.name for claim in study.controls)
    yield LEGEND
    yield OUTCOMES
    shared = ", ".join(f"{name}={format_setting(value)}" for name, value in tested[0].shared.items())
    yield printable(f"All runs of the first attempt have {shared}.")
    if controls:
        yield f"The last rows are controls ({controls}); one that is not supported makes every verdict void."
    if study.background:
        yield "## What is known"
        yield printable(study.background)
    yield "## What would change the verdicts"
    yield printable(study.limits or LIMITS)
    if study.amendments:
        yield "## Amendments"
        yield _list(f"after the criterion {hash}: {reason}" for hash, reason in study.amendments.items())
    yield "## Estimators and criteria"
    claims = (*study.claims, *study.controls)
    judged = [row for each in tested for row in (*each.verdicts.claims, *each.verdicts.controls)]
    methods = {row.claim.name: row.estimate.method for row in judged if row.estimate.method}
    yield _list(
        f"{c.text} Estimator: {c.estimator.text}. Interval: {methods.get(c.name) or 'none'}. Criterion: "
        f"{c.criterion.text}."
        for c in claims
    )
    yield "## Commands"
    more = plugins_argument(each.plugins for each in tested)
    first = command(study.name, tested[0].setting, tested[0].first_seed)
    commands = [first + more, f"normlab study replicate {study.name} --seeds fresh{more}"]
    commands += ["# its grids, with the choosing seeds", *(grid.command + more for grid in study.grids)]
    yield "\n".join(["```sh", *map(printable, commands), "```"])


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {printable(item)}" for item in items)


def _table(judgements: Sequence[Judgement]) -> str:
    rows: list[Sequence[str]] = [COLUMNS]
    for each in judgements:
        e, claim = each.estimate, each.claim
        rates = sorted({rate for rates in e.rates.values() for rate in rates})
        power = f"{each.power.text}, at {claim.effect:g}" if each.power else ""
        rows.append(
            (
                claim.text, claim.source, each.verdict_in_words + each.notes, each.interval, each.interval_at_best,
                claim.criterion.text, str(e.n), str(e.left_out), str(e.bad), f"{each.p:.2g}", power,
                ", ".join(map(format_setting, rates)),
                "" if each.common is None else f"{each.common[0]:.3g} at {each.common[1]:g}",
            )
        )  # fmt: skip
    return "\n".join(table_lines(rows))


ARM_COLUMNS = (
    "arm", "grid of learning rates", "chosen", "best", "loss at the best, nats/token", "sd over seeds", "have learned",
)  # fmt: skip


def _arm_row(arm: ArmSummary) -> Sequence[str]:
    losses = list(arm.losses.values())
    return (
        arm.where, ", ".join(map(format_setting, arm.rates)), ", ".join(map(format_setting, arm.chosen)),
        "" if arm.best is None else format_setting(arm.best), f"{fmean(losses):.3f}" if losses else "",
        f"{stdev(losses):.3f}" if len(losses) > 1 else "", f"{len(losses)} of {arm.runs}",
    )  # fmt: skip


# The picture


def draw_verdicts(judgements: Sequence[Judgement]) -> dict[str, bytes]:
    """Return the picture of all estimates, one row for each claim with its own scale, in each of `FORMATS`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        titles = [textwrap.fill(f"{each.verdict_in_words}: {each.claim.text}", 130) for each in judgements]
        lines = sum(title.count("\n") for title in titles)
        canvas = Figure(figsize=(7.0, 0.3 + 0.8 * len(judgements) + 0.12 * lines), layout="constrained")
        axes = canvas.subplots(len(judgements), 1, squeeze=False)[:, 0]
        for axis, each, title in zip(axes, judgements, titles, strict=True):
            _draw_verdict(axis, each)
            axis.set_title(title, loc="left", fontsize=7, pad=2)
            axis.set_xlabel(each.claim.estimator.quantity, fontsize=6, labelpad=1)
        return {format: render_figure(canvas, format) for format in FORMATS}


def _draw_verdict(axis: Any, each: Judgement) -> None:
    e, limits = each.estimate, each.claim.criterion.limits
    intervals = [e.interval(alpha) for alpha in LEVELS]
    best = each.at_best
    values = [e.value, *intervals[0], *limits]
    if best is not None:
        values += [best.estimate, best.low, best.high]
    drawn = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *drawn]), max([0.0, *drawn])
    room = 0.08 * (high - low or 1.0)
    low, high = low - room, high + room
    axis.axvspan(max(limits[0], low), min(limits[1], high), color="#e3e7ec", linewidth=0)
    axis.axvline(0, color="#9aa4b1", linewidth=0.6)
    colour = COLOURS[each.verdict]
    for (bottom, top), width in zip(intervals, (1.2, 3.0), strict=True):
        axis.plot([max(bottom, low), min(top, high)], [0, 0], color=colour, linewidth=width, solid_capstyle="butt")
    if math.isfinite(e.value):
        axis.plot([e.value], [0], marker="o", color=colour)
    if best is not None and math.isfinite(best.estimate):
        axis.plot([max(best.low, low), min(best.high, high)], [-0.6, -0.6], color=colour, linewidth=0.8)
        axis.plot([best.estimate], [-0.6], marker="o", color=colour, markerfacecolor="white")
    axis.set_xlim(low, high)
    axis.set_ylim(-1, 1)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
