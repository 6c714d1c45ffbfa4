"""The report of a study: report.json and figures from the records of its runs, a Markdown page from report.json.

Equal records give equal files, byte for byte: nothing here depends on the time or the machine.
"""

import json
import math
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.analysis.phrases import counted
from normlab.analysis.settings import format_setting, settings_of
from normlab.analysis.table import summarize_by
from normlab.errors import StoreError, printable
from normlab.report.figure_data import make_figure
from normlab.report.figure_draw import SETTINGS, render_figure, write_figure
from normlab.report.pages.shell import write_output
from normlab.store.files import check_links
from normlab.store.format import RECORD_VERSION, decode, to_json
from normlab.store.reading import check_format
from normlab.studies.base import VOID, Study
from normlab.studies.estimators import Estimate
from normlab.studies.index import as_text, table_lines, write_index
from normlab.studies.judge import Judgement, Verdicts, as_row, from_row
from normlab.studies.run import Evidence

FORMATS = ("svg", "pdf")
DATA = "report.json"
FACTS = ("runs", "tokens", "devices", "corpora", "plugins", "captions")
"""What a report has of its runs besides the verdicts."""
COLOURS = {"supported": "#1f7a3d", "refuted": "#b3261e", "undecided": "#8a6d00", "void": "#5a6472"}
COLUMNS = (
    "claim", "source", "verdict", "criterion", "estimate [95% interval, or 90%]", "n", "diverged", "bad", "power",
    "learning rates", "at a common rate",
)  # fmt: skip


def folder_of(results_dir: str, study: Study) -> Path:
    return Path(results_dir) / "studies" / study.name


def write_report(verdicts: Verdicts, evidence: Evidence, folder: Path) -> Path:
    """Write the report of a study and the table of all reports; return the report's page.

    Raises:
        StoreError: A file cannot be written, or a link leads out of the folder.
    """
    check_links(folder)
    runs, captions = evidence.results, []
    for index, picture in enumerate(verdicts.study.pictures, 1):
        table = summarize_by(evidence.selection, picture.by, where=[picture.where] if picture.where else [])
        figure = make_figure(picture.kind, table, **picture.options)  # pyright: ignore[reportArgumentType]
        for format in FORMATS:
            write_figure(figure, folder / f"figure-{index}.{format}")
        captions.append(figure.caption)
    facts = {
        "runs": len(runs),
        "tokens": math.fsum(run.status.tokens for run in runs),
        "devices": sorted({str(settings_of(run)["device"]) for run in runs}),
        "corpora": sorted({str(settings_of(run)["corpus"]) for run in runs}),
        "plugins": list(dict.fromkeys(name for run in runs for name in run.config.plugins)),
        "captions": captions,
    }
    return _write(verdicts, facts, folder)


def rewrite_report(study: Study, folder: Path) -> tuple[Verdicts, Path]:
    """Write the page of a report again, from its report.json and figures; return the verdicts and the page.

    Raises:
        StoreError: A file cannot be read or written, or the criterion has changed since the runs were judged.
    """
    path, now = folder / DATA, study.criterion_hash()
    train = f"train its runs with `normlab study run {study.name}`"
    try:
        report = decode(json.loads(path.read_bytes()))
        check_format(path, report["version"])
        if (criterion := report["criterion"]) != now:
            raise StoreError(f"{path}: was judged by criterion {criterion} of study {study.name}, now {now}; {train}")
        claims, controls = (
            [from_row(claim, row) for claim, row in zip(claims, report[kind], strict=True)]
            for kind, claims in (("claims", study.claims), ("controls", study.controls))
        )
        verdicts = Verdicts(study, claims, controls, report["notes"])
        facts = {name: report[name] for name in FACTS}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path}: cannot be read ({error!r}); {train}") from error
    return verdicts, _write(verdicts, facts, folder)


def _write(verdicts: Verdicts, facts: Mapping[str, Any], folder: Path) -> Path:
    study = verdicts.study
    data = {
        "version": RECORD_VERSION,
        "study": study.name,
        "question": study.question,
        "criterion": study.criterion_hash(),
        "grids": {grid.name: grid.overrides for grid in study.grids},
        **facts,
        "claims": [as_row(each) for each in verdicts.claims],
        "controls": [as_row(each) for each in verdicts.controls],
        "notes": list(verdicts.notes),
        **({"amendments": dict(study.amendments)} if study.amendments else {}),
    }
    forest = draw_verdicts([*verdicts.claims, *verdicts.controls])
    for format in FORMATS:
        write_output(folder / f"verdicts.{format}", forest[format])
    page = folder / "README.md"
    write_output(page, as_text("\n\n".join(_blocks(verdicts, facts)) + "\n").encode())
    write_output(folder / DATA, to_json(data, indent=2))
    write_index(folder.parent)
    return page


def _blocks(verdicts: Verdicts, facts: Mapping[str, Any]) -> Iterator[str]:
    study = verdicts.study
    yield f"# {printable(study.question)}"
    yield printable(
        f"Study {study.name}: {counted(facts['runs'], 'run')}, {facts['tokens']:,.0f} tokens, on "
        f"{', '.join(facts['devices'])}; corpus {', '.join(facts['corpora'])}."
    )
    yield _list(each.sentence for each in verdicts.claims)
    if verdicts.notes:
        yield _list(verdicts.notes)
    pictures = {f"figure-{index}": caption for index, caption in enumerate(facts["captions"], 1)}
    pictures["verdicts"] = "Each estimate with its 95% interval (thick: 90%). The criterion is the shaded range."
    for name, caption in pictures.items():
        yield f"![{printable(caption)}]({name}.svg)\n\n*{printable(caption)}*"
    yield "## Claims"
    yield _table(verdicts.claims)
    yield (
        "n: judged seeds, or runs of a share. bad: judged runs that diverged, stayed at the unigram loss or regressed "
        "to it. power: the probability of the verdict supported if the effect is as stated in the study."
    )
    if verdicts.controls:
        yield "## Controls"
        yield "A control is a claim whose outcome is known. One that is not supported makes every verdict void."
        yield _table(verdicts.controls)
    if study.background:
        yield "## What is known"
        yield printable(study.background)
    yield "## What would change the verdicts"
    yield printable(study.limits or "More seeds, and larger models.")
    if study.amendments:
        yield "## Amendments"
        yield _list(f"after the criterion {hash}: {reason}" for hash, reason in study.amendments.items())
    yield "## Estimators and criteria"
    claims = (*study.claims, *study.controls)
    yield _list(f"{c.text} Estimator: {c.estimator.text}. Criterion: {c.criterion.text}." for c in claims)
    yield "## Commands"
    more = " " + shlex.quote(f"plugins=[{','.join(facts['plugins'])}]") if facts["plugins"] else ""
    commands = [f"normlab study run {study.name}{more}", f"normlab study report {study.name}{more}", "# its grids"]
    commands += [grid.command + more for grid in study.grids]
    yield "\n".join(["```sh", *map(printable, commands), "```"])


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {printable(item)}" for item in items)


def _table(judgements: Sequence[Judgement]) -> str:
    rows: list[Sequence[str]] = [COLUMNS]
    for each in judgements:
        e, claim, common = each.estimate, each.claim, each.common
        rates = sorted({rate for rate in e.rates.values() if rate is not None})
        rows.append(
            (
                claim.text, claim.source, each.verdict_text + each.notes,
                claim.criterion.text, each.interval, str(e.n), str(e.diverged), str(e.bad),
                "" if each.power is None else f"{each.power:.0%}", ", ".join(map(format_setting, rates)),
                "" if common is None else f"{_estimate(common)} at {next(iter(common.rates.values()), None)}",
            )
        )  # fmt: skip
    return "\n".join(table_lines(rows))


def _estimate(e: Estimate) -> str:
    value, low, high = ("" if each is None or math.isnan(each) else f"{each:.3g}" for each in (e.value, e.low, e.high))
    return value if e.low is None else f"{value} [{low}, {high}]"


# The picture


def draw_verdicts(judgements: Sequence[Judgement]) -> dict[str, bytes]:
    """Return the picture of all estimates, one row for each claim with its own scale, in each of `FORMATS`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):  # pyright: ignore[reportArgumentType]
        titles = [textwrap.fill(f"{each.verdict_text}: {each.claim.text}", 130) for each in judgements]
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
    drawn = [value for value in (e.value, e.low, e.high, *limits) if value is not None and math.isfinite(value)]
    low, high = min([0.0, *drawn]), max([0.0, *drawn])
    room = 0.08 * (high - low or 1.0)
    low, high = low - room, high + room
    axis.axvspan(max(limits[0], low), min(limits[1], high), color="#e3e7ec", linewidth=0)
    axis.axvline(0, color="#9aa4b1", linewidth=0.6)
    colour = COLOURS[VOID if each.claim.under_review else each.verdict]
    for bottom, top, width in ((e.low, e.high, 1.2), (e.low90, e.high90, 3.0)):
        if bottom is not None and top is not None:
            axis.plot([max(bottom, low), min(top, high)], [0, 0], color=colour, linewidth=width, solid_capstyle="butt")
    if math.isfinite(e.value):
        axis.plot([e.value], [0], marker="o", color=colour)
    axis.set_xlim(low, high)
    axis.set_ylim(-1, 1)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
