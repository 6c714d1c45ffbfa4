"""The report of a study: report.json and figures from the records of its runs, and the page (`report_page.py`).

Equal records give equal files, byte for byte: nothing here depends on the time or the machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normlab.analysis.settings import setting, settings_of
from normlab.analysis.table import summarize_by
from normlab.base.errors import StoreError, warn
from normlab.report.figure_data import make_figure
from normlab.report.figure_draw import write_figure
from normlab.report.pages.shell import write_output
from normlab.store.files import check_links
from normlab.store.format import REPORT_FILE, with_checksum
from normlab.store.reading import damaged
from normlab.store.record import RunRecord
from normlab.studies.base import PROTOCOL, SETTINGS, Claim, Picture, Study
from normlab.studies.evidence import Evidence
from normlab.studies.index import as_text, write_index
from normlab.studies.judge import ArmSummary, Judgement, Verdicts, judge
from normlab.studies.report_format import FACTS, Tested, as_row, from_row, read_stored_report
from normlab.studies.report_page import LIMITS, page_blocks
from normlab.studies.run import Attempt
from normlab.studies.verdict_figure import FORMATS, draw_verdicts

SETTING_ORDER = list(SETTINGS)
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
    tested = {_place(attempt): attempt for attempt in stored}
    # An attempt whose records are here is judged anew.
    for attempt, evidence in attempts:
        verdicts = judge(
            study,
            evidence.results,
            unverified=evidence.unverified,
            missing=evidence.missing,
            notes=evidence.notes,
        )
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
    conditions = [picture.where] if picture.where else []
    table = summarize_by(evidence.selection, picture.by, where=conditions)
    figure = make_figure(picture.kind, table, **picture.options)  # pyright: ignore[reportArgumentType]
    for format in FORMATS:
        write_figure(figure, folder / f"figure-{index}.{format}")
    return figure.caption


def _tested(attempt: Attempt, verdicts: Verdicts, runs: Sequence[RunRecord]) -> Tested:
    devices: set[str] = set()
    corpora: set[str] = set()
    plugins: dict[str, None] = {}
    for run in runs:
        settings = settings_of(run)
        devices.add(str(settings["device"]))
        corpora.add(str(settings["corpus"]))
        plugins |= dict.fromkeys(run.config.plugins)
    # The arms name what differs; the report names the rest once.
    shared: dict[str, Any] = {}
    for name in SHARED:
        values = {setting(run, name) for run in runs}
        if len(values) == 1:
            shared[name] = values.pop()
    return Tested(
        attempt.setting,
        attempt.first_seed,
        PROTOCOL,
        verdicts,
        runs=len(runs),
        tokens=math.fsum(run.status.tokens for run in runs),
        devices=sorted(devices),
        corpora=sorted(corpora),
        plugins=list(plugins),
        shared=shared,
    )


def read_report(study: Study, folder: Path) -> tuple[list[Tested], list[str]]:
    """Return the attempts and the captions of a report that has been written; none if its criterion is another one.

    An earlier protocol is no other criterion: the attempts keep the verdicts of theirs.

    Raises:
        StoreError: The file cannot be read, or is damaged.
    """
    path, current_criterion = folder / REPORT_FILE, study.criterion_hash()
    if not path.exists():
        return [], []
    try:
        report = read_stored_report(path)
        criterion = report["criterion"]
        protocol = study.protocol_of(criterion)
        if protocol is None:
            warn(
                f"{path}: was judged by criterion {criterion}, now {current_criterion}; its attempts without runs here "
                "are left out"
            )
            return [], []
        tested: list[Tested] = []
        for row in report["attempts"]:
            claims = _judgements(study.claims, row["claims"])
            controls = _judgements(study.controls, row["controls"])
            arms = [ArmSummary(**arm) for arm in row["arms"]]
            # Reports of one protocol do not name it at each attempt.
            facts = {name: row[name] for name in FACTS if name in row} | {"protocol": row.get("protocol", protocol)}
            tested.append(Tested(verdicts=Verdicts(study, claims, controls, row["notes"], arms), **facts))
        return tested, report["captions"]
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, repr(error)) from error


def _judgements(claims: Sequence[Claim], rows: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    return [from_row(claim, row) for claim, row in zip(claims, rows, strict=True)]


def _write(study: Study, tested: Sequence[Tested], captions: Sequence[str], folder: Path) -> Path:
    first = tested[0].verdicts
    figures = draw_verdicts([*first.claims, *first.controls])
    for format in FORMATS:
        write_output(folder / f"verdicts.{format}", figures[format])
    page = folder / "README.md"
    write_output(page, as_text("\n\n".join(page_blocks(study, tested, captions)) + "\n").encode())
    write_output(folder / REPORT_FILE, with_checksum(_as_data(study, tested, captions)))
    # The table of all reports reads report.json, so that it is written last.
    write_index(folder.parent)
    return page


def _as_data(study: Study, tested: Sequence[Tested], captions: Sequence[str]) -> dict[str, Any]:
    """Return the content of report.json, a `StoredReport`."""
    attempts: list[dict[str, Any]] = []
    for attempt in tested:
        verdicts = attempt.verdicts
        facts = {name: getattr(attempt, name) for name in FACTS}
        judged = {
            "claims": [as_row(judgement) for judgement in verdicts.claims],
            "controls": [as_row(judgement) for judgement in verdicts.controls],
            "notes": list(verdicts.notes),
            "arms": [asdict(arm) for arm in verdicts.arms],
        }
        attempts.append(facts | judged)
    data: dict[str, Any] = {
        "study": study.name,
        "question": study.question,
        "limits": study.limits or LIMITS,
        "criterion": study.criterion_hash(),
        "grids": {grid.name: grid.overrides for grid in study.grids},
        "attempts": attempts,
        "captions": list(captions),
    }
    if study.amendments:
        data["amendments"] = dict(study.amendments)
    return data
