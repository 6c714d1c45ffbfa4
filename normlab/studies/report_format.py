"""The types of report.json, what is written into it of a verdict, and its reading.

The file may be a stranger's: a reader gets these types, or an error that names the file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from normlab.base.errors import StoreError, counted
from normlab.base.parsing import leaves
from normlab.store.format import REPORT_FILE
from normlab.store.reading import HOW_TO_FIX, Count, damaged, read_record
from normlab.studies.base import EARLIER_PROTOCOLS, REFUTED, SETTINGS, SUPPORTED, UNDECIDED, VOID, Claim
from normlab.studies.estimate import Estimate
from normlab.studies.judge import AtBest, Judgement, Verdicts
from normlab.studies.power import Power

Text = Annotated[str, msgspec.Meta(max_length=2**16)]
SettingName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SETTINGS)})$")]
Verdict = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join((SUPPORTED, REFUTED, UNDECIDED, VOID))})$")]
StoredInterval = tuple[float, float]


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
    intervals: tuple[StoredInterval, StoredInterval]
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
    setting: SettingName
    first_seed: Count
    protocol: NotRequired[Count]
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


FIELDS = ("n", "method", "deviation", "seeds", "diverged", "bad", "left_out", "rates")
"""The fields of an estimate that a report keeps, besides the value and the intervals."""
LEVELS = (0.05, 0.10)
"""Significance levels of the intervals in a report."""
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
    problem = _problem(report)
    if problem:
        raise damaged(path, problem)
    return report


def _problem(report: dict[str, Any]) -> str:
    """Return what no report has, although its types are right, or an empty text."""
    problem = ""
    first = report["attempts"][0]
    for attempt in report["attempts"]:
        # A page has the verdicts of all attempts on a claim in one line, by the place of the claim.
        for kind in ("claims", "controls"):
            if [row["claim"] for row in attempt[kind]] != [row["claim"] for row in first[kind]]:
                problem = f"its attempts have different {kind}"
        for arm in attempt["arms"]:
            if not all(map(math.isfinite, arm["losses"].values())):
                problem = "an arm has a loss that is not finite"
    for number in leaves(report):
        if isinstance(number, float) and math.isfinite(number) and abs(number) > LARGEST:
            problem = f"it has a number above {LARGEST:g}"
    return problem


@dataclass(frozen=True, slots=True)
class Tested:
    """The verdicts of an attempt, and what a report keeps of its runs."""

    setting: str
    first_seed: int
    protocol: int
    """By which it was judged."""
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

    @property
    def description(self) -> str:
        """What was run, in one sentence."""
        devices, corpora = ", ".join(self.devices), ", ".join(self.corpora)
        runs = counted(self.runs, "run")
        text = f"{self.label}: {runs}, {self.tokens:,.0f} tokens, on {devices}; corpus {corpora}."
        if self.protocol in EARLIER_PROTOCOLS:
            text += f" {EARLIER_PROTOCOLS[self.protocol]}"
        return text


FACTS = ("setting", "first_seed", "protocol", "runs", "tokens", "devices", "corpora", "plugins", "shared")
"""The fields of `Tested` that report.json keeps as they are."""


def as_row(judgement: Judgement) -> dict[str, Any]:
    """Return the row of a verdict in a report, a `StoredClaim`."""
    claim, estimate = judgement.claim, judgement.estimate
    row: dict[str, Any] = {
        "claim": claim.name,
        "text": claim.text,
        "source": claim.source,
        "verdict": judgement.verdict,
        "verdict_in_words": judgement.verdict_in_words,
        "reason": judgement.reason,
        "interval": judgement.interval,
        "interval_at_best": judgement.interval_at_best,
        "estimator": judgement.estimator_text,
        "criterion": claim.criterion.text,
        "estimate": estimate.value,
        "intervals": [list(estimate.interval(alpha)) for alpha in LEVELS],
    }
    for name in FIELDS:
        row[name] = getattr(estimate, name)
    row |= {"effect": claim.effect, "p": judgement.p, "power": None, "at_best": None, "at_common_rate": None}
    if judgement.power is not None:
        row["power"] = asdict(judgement.power)
    if judgement.at_best is not None:
        row["at_best"] = asdict(judgement.at_best)
    if judgement.common is not None:
        row["at_common_rate"] = list(judgement.common)
    return row


def from_row(claim: Claim, row: Mapping[str, Any]) -> Judgement:
    """Return the verdict of a claim from its row in a report: the inverse of `as_row`."""
    intervals = {alpha: (low, high) for alpha, (low, high) in zip(LEVELS, row["intervals"], strict=True)}
    fields = {name: row[name] for name in FIELDS}
    # The intervals of other levels are not known: a report is drawn, and not judged again.
    estimate = Estimate(row["estimate"], intervals.__getitem__, **fields)
    judgement = Judgement(claim, row["verdict"], row["reason"], estimate, row["p"], recorded_estimator=row["estimator"])
    if row["power"]:
        judgement = replace(judgement, power=Power(**row["power"]))
    if row["at_best"]:
        judgement = replace(judgement, at_best=AtBest(**row["at_best"]))
    if row["at_common_rate"]:
        judgement = replace(judgement, common=tuple(row["at_common_rate"]))
    return judgement
