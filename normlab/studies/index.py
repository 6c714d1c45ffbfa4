"""The table of all reports in a folder of studies: one line for each claim."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import StoreError, printable, warn
from normlab.report.pages.shell import write_output
from normlab.store.reading import check_format

INTRODUCTION = """\
# Studies

One line for each claim that `normlab study run` has tested: claim, source and verdict. *supported* and *refuted*: the
95 % interval is on one side of the criterion (for "between", two one-sided tests: the 90 % interval is inside).
*undecided*: it has values on both sides. *void*: a control failed, `normlab verify` rejects a block, or the best
learning rate is at the edge of its grid, so that the runs cannot answer. *under review*: later runs or a closer look
put the verdict in doubt; the reason is below the table. `normlab study show NAME` prints the criteria, which are fixed
before the runs; what was changed later is named as an amendment. Whether a model learns is tested by the share of seeds
that do not.

**What small models cannot tell.** These models have 2 to 48 blocks of width 32 (the step times: up to 1024) and train
on less than half a million bytes. They decide signs, whether a model learns at all, laws at initialisation, and
differences of a tenth of a nat/token, or of some hundredths where both arms of a seed share most of the noise (study
`noise` measures it). They do not decide differences of 1 % in loss, what happens after a thousand times as many tokens,
or what appears in wide models only: outlier channels, attention sinks, loss spikes of long runs. A verdict here is a
verdict on this size.
"""


def write_index(folder: Path) -> None:
    """Write README.md in a folder of reports; a damaged report is left out with a warning.

    Raises:
        StoreError: The file cannot be written.
    """
    parts = [INTRODUCTION]
    for path in sorted(folder.glob("*/report.json")):
        try:
            report = json.loads(path.read_text())
            check_format(path, report["version"])
            parts.append("\n".join(map(printable, _section(report | {"folder": path.parent.name}))))
        except StoreError as error:
            warn(str(error))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warn(
                f"{path}: is damaged ({error!r}), so {folder / 'README.md'} leaves it out; restore a copy, or delete it"
            )
    text = as_text("\n".join(parts) + "\n")
    write_output(folder / "README.md", f"<!-- Written by normlab. -->\n\n{text}".encode())


def as_text(markdown: str) -> str:
    """Return Markdown without controls and tags of HTML: the names of runs and corpora may be someone else's."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", printable(markdown, keep="\n"))


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is the head."""
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        yield f"| {' | '.join(printable(cell).replace('|', chr(92) + '|') for cell in row)} |"


def _section(report: dict[str, Any]) -> Iterator[str]:
    folder = report["folder"]
    yield from (f"## {report['question']}", "")
    yield (
        f"`normlab study run {report['study']}`: {report['runs']} runs, "
        f"{report['tokens']:,.0f} tokens. [Report]({folder}/README.md), [picture]({folder}/verdicts.svg)."
    )
    yield ""
    rows = [("claim", "source", "verdict", "estimate, interval", "criterion", "n")]
    for row in report["claims"]:
        verdict = f"under review (these runs: {row['verdict']})" if row["under_review"] else f"**{row['verdict']}**"
        rows.append((row["text"], row["source"], verdict, row["interval"], row["criterion"], str(row["n"])))
    yield from table_lines(rows)
    for row in report["claims"]:
        if row["under_review"]:
            yield from ("", f"Under review: {row['text']} Reason: {row['under_review']}.")
    controls = [f"{row['text'].removesuffix('.')} ({row['verdict']})" for row in report["controls"]]
    yield from ("", f"Controls: {'; '.join(controls) or 'none'}.", "")
    if amendments := report.get("amendments"):
        yield from (f"Amended: {' '.join(amendments.values())}", "")
