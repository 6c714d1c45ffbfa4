"""The table of all reports in a folder of studies: one line for each claim."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from normlab.base.errors import StoreError, printable, warn
from normlab.report.pages.shell import write_output
from normlab.store.format import REPORT_FILE
from normlab.studies.base import AT_BEST, COMMON_SETTINGS, EARLIER_PROTOCOLS, SETTINGS
from normlab.studies.report_format import read_stored_report
from normlab.studies.simulations import choice_of_rates

DECIDED = ("supported", "refuted")
LOW_POWER = 0.3
"""A claim with less power at its stated effect is not counted."""
CLOSE_P = 0.04
"""A decided claim with a larger p-value is close to the level, 0.05."""

INTRODUCTION = """\
# Studies

One line for each claim that `normlab study run` has tested. *supported* and *refuted*: the 95 % interval is on one
side of the criterion (for "between", the 90 % interval is inside), corrected for all claims of the study by Holm's
method. *undecided*: neither, within the seeds of the study. *void*: the runs cannot answer, because a control failed,
`normlab verify` rejects a block, the best learning rate is at the edge of its grid, no run has learned, or runs are
missing or not comparable. The intervals shown are of 95 % (for "between", of 90 %), not corrected. An estimate is the
typical value over seeds: the median of the means of all pairs of seeds. Its interval, and that of a share, is a
confidence sequence, which holds at every number of seeds. That of a typical value comes from bets on signed ranks. It
assumes that values are symmetric around it, and nothing else of their distribution, so that a few seeds far off do not
decide a claim. Each report names its other methods. Where an arm has several learning rates, six seeds choose among
them and up to 24 others judge, in blocks of four, until each claim is decided or more are not expected to decide it;
where it has one, all seeds judge, up to 30. An arm is judged by its mean over the rates that the six seeds cannot tell
from the best. *at the best learning rates alone*: the same estimate at the best one only, where that is not the same;
it decides no verdict. Where its interval, which is not corrected, is not on the side of the verdict, the verdict says
so; an undecided claim is an exception if the interval over all chosen rates, without the correction, decides it too.
*replicated?*: the verdict of the same criterion on fresh seeds, with yes or no where the first seeds decided it.
*other settings*: width 128 and another corpus. `normlab study show NAME` prints the criteria. They are fixed before
the replications; a study with an amendment was changed after its first seeds had been seen. Of a claim that was
rewritten only the last form counts, in the rate of replication too. *source*: who prompted the claim; depths, steps,
batch sizes, learning rates and margins are ours. Each placement has its own init rule unless the claim names one, so
that a claim on two placements compares placement and init rule together. *power below 30 %*: with the noise of the
first six seeds, the study could hardly have supported the claim at its stated effect; it is not counted, whatever its
verdict. A power from six seeds is rough: each report has its range, and later seeds may be noisier. Studies with equal
grids share runs, such as depth, deepnorm and bounded_stream, so that their claims are not independent.

**What small models cannot show.** Trained models have width 32 (128 in the setting wide) and 2 to 32 blocks, models at
initialisation up to 48 blocks and width 64; step times are measured up to width 1024. The models train on less than
half a million bytes. They can decide signs, whether a model learns at all within some hundred steps, laws at
initialisation, and differences of a tenth of a nat/token, where the noise over seeds is no larger. They cannot decide
differences of 1 % in loss, what happens after a thousand times as many tokens, or what appears in wide models only:
outlier channels, attention sinks, loss spikes of long runs.
"""


def write_index(folder: Path) -> None:
    """Write README.md in a folder of reports; a damaged report is left out with a warning.

    Raises:
        StoreError: The file cannot be written.
    """
    parts: list[str] = []
    reports: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"*/{REPORT_FILE}")):
        try:
            report = read_stored_report(path)
            section = _section(report | {"folder": path.parent.name})
            parts.append("\n".join(printable(line) for line in section))
        except StoreError as error:
            # One damaged report, perhaps somebody else's, must not hide the others.
            warn(f"{folder / 'README.md'} leaves out {error}")
        else:
            reports.append(report)
    if reports:
        parts.insert(0, _summary(reports))
    text = as_text("\n".join([INTRODUCTION, *parts]) + "\n")
    write_output(folder / "README.md", f"<!-- Written by normlab. -->\n\n{text}".encode())


def as_text(markdown: str) -> str:
    """Return Markdown without controls and tags of HTML: the names of runs and corpora may be someone else's."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", printable(markdown, keep="\n"))


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is the head."""
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        # A "|" inside a cell would end it: Markdown needs a backslash before it.
        cells = [printable(cell).replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"


COLUMNS = ("claim", "source", "verdict", "estimate, interval", "criterion", "n", "replicated?", "other settings")


def _section(report: dict[str, Any]) -> Iterator[str]:
    folder, attempts = report["folder"], report["attempts"]
    first, plugins = attempts[0], plugins_argument(attempt["plugins"] for attempt in attempts)
    yield from (f"## {report['question']}", "")
    runs = sum(attempt["runs"] for attempt in attempts)
    tokens = sum(attempt["tokens"] for attempt in attempts)
    yield (
        f"{runs} runs, {tokens:,.0f} tokens. "
        f"[Report]({folder}/README.md), [picture]({folder}/verdicts.svg). "
        f"`{command(report['study'], first['setting'], first['first_seed'])}{plugins}`, "
        f"`normlab study replicate {report['study']} --seeds fresh{plugins}`."
    )
    yield ""
    for protocol, difference in EARLIER_PROTOCOLS.items():
        seeds: dict[str, list[str]] = {}
        for attempt in attempts:
            if attempt.get("protocol") == protocol:
                seeds.setdefault(attempt["setting"], []).append(str(attempt["first_seed"]))
        if seeds:
            settings = [f"{setting}, seeds from {' and '.join(firsts)} on" for setting, firsts in seeds.items()]
            yield f"{'; '.join(settings)}: {difference}"
            yield ""
    rows: list[Sequence[str]] = [COLUMNS]
    rows += [_claim_row(attempts, index) for index in range(len(first["claims"]))]
    yield from table_lines(rows)
    for row in first["claims"]:
        if row["reason"]:
            yield from ("", f"{row['verdict'].capitalize()}: {row['text']} {row['reason']}.")
    controls = [f"{row['text'].removesuffix('.')} ({row['verdict']})" for row in first["controls"]]
    yield from ("", f"Controls: {'; '.join(controls) or 'none'}.", "", f"What would change it: {report['limits']}", "")
    amendments = report.get("amendments")
    if amendments:
        yield from ("Amended:", "")
        for reason in amendments.values():
            yield f"- {reason}"
        yield ""


def _claim_row(attempts: Sequence[dict[str, Any]], index: int) -> Sequence[str]:
    """Return the row of a claim: its first verdict, those of fresh seeds and those of other settings."""
    first = attempts[0]
    row = first["claims"][index]
    fresh: list[str] = []
    elsewhere: list[str] = []
    settings: set[str] = set()
    is_same_everywhere = row["verdict"] in DECIDED
    for attempt in attempts[1:]:
        again = attempt["claims"][index]
        is_same_everywhere = is_same_everywhere and again["verdict"] == row["verdict"]
        if attempt["setting"] == first["setting"]:
            fresh.append(_again(row, again))
        else:
            elsewhere.append(f"{attempt['setting']}: {again['verdict']}")
            settings.add(attempt["setting"])
    verdict = f"**{row['verdict']}**" + row["verdict_in_words"].removeprefix(row["verdict"])
    # Not of a study that was run in some settings only: the others may decide otherwise.
    if is_same_everywhere and len(settings) == len(COMMON_SETTINGS) - 1:
        verdict += ", in all settings"
    if not _is_counted(row):
        verdict += "; power below 30 %"
    return (
        row["text"],
        row["source"],
        verdict,
        _both(row),
        row["criterion"],
        str(row["n"]),
        "; ".join(fresh),
        "; ".join(elsewhere),
    )


def command(study: str, setting: str, first_seed: int) -> str:
    """Return the command that makes an attempt."""
    is_default = setting == next(iter(SETTINGS))
    option = "" if is_default else f" --setting {setting}"
    if first_seed:
        return f"normlab study replicate {study} --seeds {first_seed}{option}"
    return f"normlab study run {study}{option}"


def plugins_argument(plugins: Iterable[Sequence[str]]) -> str:
    """Return ` plugins=[...]` with the plugins of all attempts of a study, quoted for the shell; "" if it has none."""
    files = ",".join(dict.fromkeys(chain.from_iterable(plugins)))
    return f" {shlex.quote(f'plugins=[{files}]')}" if files else ""


def _is_counted(row: dict[str, Any]) -> bool:
    # A claim whose power is not known counts: many state no effect.
    return row["power"] is None or row["power"]["value"] >= LOW_POWER


def _again(row: dict[str, Any], again: dict[str, Any]) -> str:
    """Return how a replication on fresh seeds judged a claim: yes or no only where the first seeds decided it."""
    verdict = again["verdict"]
    if row["verdict"] in DECIDED:
        verdict = "yes" if verdict == row["verdict"] else f"no, {verdict}"
    verdict += again["verdict_in_words"].removeprefix(again["verdict"])
    return f"{verdict}: {_both(again)}" if again["interval"] else verdict


def _both(row: dict[str, Any]) -> str:
    """Return the estimate of a claim and the one at the best learning rates alone, where that is another one."""
    if not row["interval_at_best"]:
        return row["interval"]
    return f"{row['interval']}; {AT_BEST} {row['interval_at_best']}"


def _summary(reports: Sequence[dict[str, Any]]) -> str:
    """Return how many claims are decided, how many of them in the same way again, and how many may be wrong."""
    rows: list[dict[str, Any]] = []
    for report in reports:
        rows += report["attempts"][0]["claims"]
    claims = [row for row in rows if _is_counted(row)]
    decided = [row for row in claims if row["verdict"] in DECIDED]
    undecided = sum(row["verdict"] == "undecided" for row in claims)
    close = sum(row["p"] > CLOSE_P for row in decided)
    other_at_best = sum(row["verdict_in_words"] != row["verdict"] for row in decided)
    amended = sum(bool(report.get("amendments")) for report in reports)
    amended_text = "All of them were" if amended == len(reports) else f"{amended} of them were"
    return (
        f"{len(claims)} claims count: {len(decided)} decided, {undecided} undecided, "
        f"{len(claims) - len(decided) - undecided} void; {len(rows) - len(claims)} more have a power below 30 %. "
        f"The power of {_unknown(claims)} is not known: they state no effect, their estimator has no power, or a "
        f"choosing seed has no finite value. {_replicated(reports)}. "
        f"In {close} of the decided claims p is above {CLOSE_P}: they are close. "
        f"In {other_at_best} of the decided claims the interval {AT_BEST} is not on the side of the verdict. "
        f"{_in_other_settings(reports)}.\n\n"
        "The verdicts of a study are corrected for all its claims: with a criterion fixed beforehand, one of them or "
        f"more is wrong with a probability of at most 5 %, and of {len(reports)} studies at most "
        f"{0.05 * len(reports):.2g} are expected to have a wrong one. {amended_text} amended after their first seeds "
        f"had been seen, so that this holds for their fresh seeds only.\n\n{choice_of_rates()}"
    )


def _replicated(reports: Sequence[dict[str, Any]]) -> str:
    """Return how many decided claims were decided in the same way on fresh seeds."""
    pairs = _decided_pairs(reports, in_first=True)
    if not pairs:
        return "None is replicated"
    num_same = sum(row["verdict"] == replication["verdict"] for row, replication in pairs)
    num_with_power = len(pairs) - _unknown([row for row, _ in pairs])
    return (
        f"{num_same} of {len(pairs)} decided claims were decided in the same way on fresh seeds; only "
        f"{num_with_power} of these have a known power"
    )


def _in_other_settings(reports: Sequence[dict[str, Any]]) -> str:
    """Return how many studies were run in another setting, and how often the verdict was the same there."""
    studies = 0
    for report in reports:
        settings = {attempt["setting"] for attempt in report["attempts"]}
        studies += len(settings) > 1
    text = f"{studies} of {len(reports)} studies were run in another setting"
    pairs = _decided_pairs(reports, in_first=False)
    if not pairs:
        return text
    num_same = num_opposite = 0
    for row, other_row in pairs:
        if other_row["verdict"] == row["verdict"]:
            num_same += 1
        elif other_row["verdict"] in DECIDED:
            num_opposite += 1
    return (
        f"{text}: of {len(pairs)} verdicts there on decided claims {num_same} are the same, {num_opposite} the "
        f"opposite and {len(pairs) - num_same - num_opposite} none (undecided or void)"
    )


def _decided_pairs(reports: Sequence[dict[str, Any]], *, in_first: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each decided claim that counts, with its row of each later attempt in the first setting, or in another."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for report in reports:
        first, *later = report["attempts"]
        for attempt in later:
            if (attempt["setting"] == first["setting"]) != in_first:
                continue
            for row, later_row in zip(first["claims"], attempt["claims"], strict=True):
                if row["verdict"] in DECIDED and _is_counted(row):
                    pairs.append((row, later_row))
    return pairs


def _unknown(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["power"] is None for row in rows)
