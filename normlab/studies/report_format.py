"""The types of report.json, which may be a stranger's: a reader gets these, or an error that names the file."""

import math
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from normlab.base.errors import StoreError
from normlab.base.parsing import leaves
from normlab.store.format import REPORT_FILE
from normlab.store.reading import HOW_TO_FIX, Count, damaged, read_record
from normlab.studies.base import REFUTED, SETTINGS, SUPPORTED, UNDECIDED, VOID

Text = Annotated[str, msgspec.Meta(max_length=2**16)]
Setting = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SETTINGS)})$")]
Verdict = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join((SUPPORTED, REFUTED, UNDECIDED, VOID))})$")]
Interval = tuple[float, float]


class StoredPower(TypedDict):
    value: float
    low: float
    high: float
    seeds: Count


class StoredAtBest(TypedDict):
    estimate: float
    low: float
    high: float


class StoredClaim(TypedDict):
    """A verdict, as `as_row` writes it."""

    claim: Text
    text: Text
    source: Text
    verdict: Verdict
    verdict_in_words: Text
    reason: Text
    interval: Text
    interval_at_best: Text
    estimator: Text
    criterion: Text
    estimate: float
    intervals: tuple[Interval, Interval]
    n: Count
    method: Text
    deviation: float | None
    seeds: dict[str, float]
    diverged: Count
    bad: Count
    left_out: Count
    rates: dict[str, list[float]]
    effect: float | None
    p: float
    power: StoredPower | None
    at_best: StoredAtBest | None
    at_common_rate: tuple[float, float] | None


class StoredArm(TypedDict):
    where: Text
    rates: list[float]
    chosen: list[float]
    best: float | None
    losses: dict[str, float]
    runs: Count


class StoredAttempt(TypedDict):
    setting: Setting
    first_seed: Count
    runs: Count
    tokens: float
    devices: list[Text]
    corpora: list[Text]
    plugins: list[Text]
    shared: dict[str, str | int | float | bool | None]
    claims: list[StoredClaim]
    controls: list[StoredClaim]
    notes: list[Text]
    arms: list[StoredArm]


class StoredReport(TypedDict):
    study: Text
    question: Text
    limits: Text
    criterion: Text
    attempts: Annotated[list[StoredAttempt], msgspec.Meta(min_length=1)]
    captions: list[Text]
    amendments: NotRequired[dict[str, Text]]


LARGEST = 1e100
"""Largest finite number of a report: the sum of such numbers, which a figure needs, is finite."""


def read_stored_report(path: Path) -> dict[str, Any]:
    """Return the content of a report.json; a number may be NaN or infinite, but for losses.

    Raises:
        StoreError: It is missing or damaged, of another study or format, or has a value that no report has.
    """
    report: Any = read_record(path, StoredReport)
    study = path.absolute().parent.name
    if report["study"] != study:
        raise StoreError(f"{path}: is of study {report['study']!a:.80}, not of {study}; {HOW_TO_FIX[REPORT_FILE]}")
    first = report["attempts"][0]
    problem = ""
    for attempt in report["attempts"]:
        for kind in ("claims", "controls"):
            if [row["claim"] for row in attempt[kind]] != [row["claim"] for row in first[kind]]:
                problem = f"its attempts have different {kind}"
        if not all(math.isfinite(loss) for arm in attempt["arms"] for loss in arm["losses"].values()):
            problem = "an arm has a loss that is not finite"
    numbers = (value for value in leaves(report) if isinstance(value, float))
    if any(math.isfinite(number) and abs(number) > LARGEST for number in numbers):
        problem = f"it has a number above {LARGEST:g}"
    if problem:
        raise damaged(path, problem)
    return report
