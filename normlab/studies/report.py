"""The report of a study: report.json and figures from the records of its runs, pages from report.json.

Equal records give equal files, byte for byte: nothing here depends on the time or the machine.
"""

from __future__ import annotations

import base64
import html
import json
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.analysis.phrases import counted
from normlab.analysis.settings import format_setting
from normlab.analysis.table import summarize_by
from normlab.errors import StoreError, printable
from normlab.report.figure_data import make_figure
from normlab.report.figure_draw import SETTINGS, render_figure, write_figure
from normlab.report.pages.shell import page, write_output
from normlab.store.files import check_links
from normlab.store.format import RECORD_VERSION, decode, to_json
from normlab.store.reading import check_format
from normlab.studies.base import SIZES, VOID, Study
from normlab.studies.estimators import Estimate
from normlab.studies.index import as_text, write_index
from normlab.studies.judge import Judgement, Verdicts, as_row, from_row
from normlab.studies.run import Evidence

FORMATS = ("svg", "pdf")
DATA = "report.json"
FACTS = ("runs", "tokens", "devices", "corpora", "plugins", "captions")
"""What a report has of its runs besides the verdicts."""
COLOURS = {"supported": "#1f7a3d", "refuted": "#b3261e", "undecided": "#8a6d00", "void": "#5a6472"}
CSS = """\
.verdict { font-weight: 600; } .report img { max-width: 100%; background: #fff; }
.report table { margin: 1rem 0; } .report th { white-space: normal; } .report pre { white-space: pre-wrap; }
.report td:first-child, .report td:nth-child(3) { min-width: 10em; }
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the report: a heading, a paragraph, a list, a table, a picture or a command."""

    kind: str
    content: Any


def folder_of(results_dir: str, study: Study, size: str) -> Path:
    """Return the folder of a report."""
    return Path(results_dir) / "studies" / (study.name if size == SIZES[0] else f"{study.name}-{size}")


def write_report(verdicts: Verdicts, evidence: Evidence, folder: Path) -> Path:
    """Write the report of a study and the table of all reports; return the report's Markdown page.

    Raises:
        StoreError: A file cannot be written, or a link leads out of the folder.
    """
    check_links(folder)
    runs, captions = evidence.results, []
    for index, picture in enumerate(verdicts.study.pictures, 1):
        table = summarize_by(evidence.selection, picture.by, where=[picture.where] if picture.where else [])
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in picture.options.items()}
        figure = make_figure(picture.kind, table, **options)  # pyright: ignore[reportArgumentType]
        for format in FORMATS:
            write_figure(figure, folder / f"figure-{index}.{format}")
        captions.append(figure.caption)
    facts = {
        "runs": len(runs),
        "tokens": math.fsum(run.record.status.tokens for run in runs),
        "devices": sorted({str(run.settings["device"]) for run in runs}),
        "corpora": sorted({str(run.settings["corpus"]) for run in runs}),
        "plugins": list(dict.fromkeys(name for run in runs for name in run.record.config.plugins)),
        "captions": captions,
    }
    return _write(verdicts, facts, folder)


def rewrite_report(study: Study, size: str, folder: Path) -> tuple[Verdicts, Path]:
    """Write the pages of a report again, from its report.json and figures; return the verdicts and the Markdown page.

    Raises:
        StoreError: A file cannot be read or written, or the criterion has changed since the runs were judged.
    """
    path = folder / DATA
    now = study.criterion_hash(size)
    train = f"train its runs with `normlab study run {study.name}`"
    try:
        report = decode(json.loads(path.read_bytes()))
        check_format(path, report["version"])
        criterion, facts = report["criterion"], {name: report[name] for name in FACTS}
        if criterion != now:
            raise StoreError(f"{path}: was judged by criterion {criterion} of study {study.name}, now {now}; {train}")
        claims, controls = (
            [from_row(claim, row) for claim, row in zip(claims, report[kind], strict=True)]
            for kind, claims in (("claims", study.claims), ("controls", study.controls))
        )
        verdicts = Verdicts(study, size, claims, controls, report["notes"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path}: cannot be read ({error!r}); {train}") from error
    return verdicts, _write(verdicts, facts, folder)


def _write(verdicts: Verdicts, facts: Mapping[str, Any], folder: Path) -> Path:
    forest = draw_verdicts([*verdicts.claims, *verdicts.controls])
    for format in FORMATS:
        write_output(folder / f"verdicts.{format}", forest[format])
    blocks = list(_blocks(verdicts, facts))
    write_output(folder / "README.md", as_markdown(blocks).encode())
    write_output(folder / "report.html", as_page(verdicts.study, blocks, folder).encode())
    write_output(folder / DATA, to_json(_data(verdicts, facts), indent=2))
    write_index(folder.parent)
    return folder / "README.md"


def _data(verdicts: Verdicts, facts: Mapping[str, Any]) -> dict[str, Any]:
    study = verdicts.study
    return {
        "version": RECORD_VERSION,
        "study": study.name,
        "question": study.question,
        "size": verdicts.size,
        "criterion": study.criterion_hash(verdicts.size),
        "grids": {grid.name: grid.overrides for grid in study.grids_of(verdicts.size)},
        **facts,
        "claims": [as_row(each) for each in verdicts.claims],
        "controls": [as_row(each) for each in verdicts.controls],
        "notes": list(verdicts.notes),
        **({"amendments": dict(study.amendments)} if study.amendments else {}),
    }


def _blocks(verdicts: Verdicts, facts: Mapping[str, Any]) -> Iterator[Block]:
    study = verdicts.study
    yield Block("title", study.question)
    yield Block(
        "text",
        f"Study {study.name}, size {verdicts.size}: {counted(facts['runs'], 'run')}, {facts['tokens']:,.0f} tokens, on "
        f"{', '.join(facts['devices'])}; corpus {', '.join(facts['corpora'])}.",
    )
    yield Block("list", [each.sentence for each in verdicts.claims])
    if verdicts.notes:
        yield Block("list", list(verdicts.notes))
    for index, caption in enumerate(facts["captions"], 1):
        yield Block("picture", (f"figure-{index}", caption))
    yield Block(
        "picture", ("verdicts", "Each estimate with its 95% interval (thick: 90%). The criterion is the shaded range.")
    )
    yield Block("heading", "Claims")
    yield Block("table", _table(verdicts.claims))
    yield Block(
        "text",
        "n: judged seeds, or runs of a share. bad: judged runs that diverged, stayed at the unigram loss or regressed "
        "to it. power: the probability of the verdict supported if the effect is as stated in the study.",
    )
    if verdicts.controls:
        yield Block("heading", "Controls")
        yield Block(
            "text", "A control is a claim whose outcome is known. One that is not supported makes every verdict void."
        )
        yield Block("table", _table(verdicts.controls))
    if study.background:
        yield Block("heading", "What is known")
        yield Block("text", study.background)
    yield Block("heading", "What would change the verdicts")
    yield Block("text", study.limits or "More seeds, and a larger size.")
    if study.amendments:
        yield Block("heading", "Amendments")
        yield Block("list", [f"after the criterion {hash}: {reason}" for hash, reason in study.amendments.items()])
    yield Block("heading", "Estimators and criteria")
    claims = (*study.claims, *study.controls)
    yield Block("list", [f"{c.text} Estimator: {c.estimator.text}. Criterion: {c.criterion.text}." for c in claims])
    yield Block("heading", "Commands")
    size = "" if verdicts.size == SIZES[0] else f" --size {verdicts.size}"
    more = " " + shlex.quote(f"plugins=[{','.join(facts['plugins'])}]") if facts["plugins"] else ""
    commands = [f"normlab study {verb} {study.name}{size}" for verb in ("run", "report")]
    commands += [grid.command for grid in study.grids_of(verdicts.size)]
    first, second, *grids = [command + more for command in commands]
    yield Block("code", [first, second, "# its grids", *grids])


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"


def _table(judgements: Sequence[Judgement]) -> list[list[str]]:
    rows = [
        [
            "claim", "source", "verdict", "criterion", "estimate [95% interval, or 90%]", "n", "diverged", "bad",
            "power", "learning rates", "at a common rate",
        ]
    ]  # fmt: skip
    for each in judgements:
        e, claim, common = each.estimate, each.claim, each.common
        rates = sorted({rate for rate in e.rates.values() if rate is not None})
        rows.append(
            [
                claim.text, claim.source, each.verdict_text + each.notes,
                claim.criterion.text, each.interval, str(e.n), str(e.diverged), str(e.bad),
                "" if each.power is None else f"{each.power:.0%}", ", ".join(map(format_setting, rates)),
                "" if common is None else f"{_estimate(common)} at {next(iter(common.rates.values()), None)}",
            ]
        )  # fmt: skip
    return rows


def _estimate(e: Estimate) -> str:
    return _number(e.value) + ("" if e.low is None else f" [{_number(e.low)}, {_number(e.high)}]")


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
    start, end = max(limits[0], low), min(limits[1], high)
    axis.axvspan(start, end, color="#e3e7ec", linewidth=0)
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


# Markdown and HTML


def as_markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as a Markdown page."""
    return as_text("\n\n".join(_block_as_markdown(block) for block in blocks) + "\n")


def _lines(content: Any) -> Any:
    """Return the content of a block with each text on one line; it may be someone else's."""
    return printable(content) if isinstance(content, str) else list(map(_lines, content))


def _block_as_markdown(block: Block) -> str:
    content = _lines(block.content)
    if block.kind == "title":
        return f"# {content}"
    if block.kind == "heading":
        return f"## {content}"
    if block.kind == "list":
        return "\n".join(f"- {line}" for line in content)
    if block.kind == "picture":
        name, caption = content
        return f"![{caption}]({name}.svg)\n\n*{caption}*"
    if block.kind == "code":
        return "\n".join(["```sh", *content, "```"])
    if block.kind == "table":
        head, *rows = [[cell.replace("|", r"\|") for cell in row] for row in content]
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return content


def as_page(study: Study, blocks: Sequence[Block], folder: Path) -> str:
    """Return the blocks as one HTML page, with the figures in `folder`."""
    body = f'<style>{CSS}</style><main class="report">{"".join(_as_html(block, folder) for block in blocks)}</main>'
    return page(study.question, body, {}, [])


def _as_html(block: Block, folder: Path) -> str:
    escape, content = html.escape, _lines(block.content)
    if block.kind in ("title", "heading", "text"):
        tag = {"title": "h1", "heading": "h2", "text": "p"}[block.kind]
        return f"<{tag}>{escape(content)}</{tag}>"
    if block.kind == "list":
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in content) + "</ul>"
    if block.kind == "picture":
        name, caption = content
        picture = base64.b64encode((folder / f"{name}.svg").read_bytes()).decode()
        image = f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{picture}">'
        return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"
    if block.kind == "code":
        return f"<pre>{escape(chr(10).join(content))}</pre>"
    head, *rows = content
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
