"""A report's cells as people read them: few columns, a loss with its interval and n, and below what they mean."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from normlab.report.by import OWN, SHARED, Report, Row
from normlab.report.intervals import LEVEL, Design
from normlab.report.learning_rates import EDGE
from normlab.report.outcomes import ENDINGS
from normlab.report.render import render
from normlab.store.outcome import RULES, WHOLE_TEXT_NOTE, references_of
from normlab.store.schema import FINISHED

GIB = 2**30
NO_S = "-"
"""What stands for S where no learning rate is usable."""


def render_report(report: Report, format: str) -> str:
    """The report in one of the formats; JSON and CSV hold every value.

    Raises:
        NormlabError: There is no such format.
    """
    if format == "json":
        return render(report.rows, format)
    if format == "csv":
        flat = [_flat(row) for row in report.rows]
        keys = dict.fromkeys(key for row in flat for key in row)  # a cell without spikes has no rules
        return render([{key: row.get(key) for key in keys} for row in flat], format)
    text, lines = render(table_rows(report), format), notes(report)
    if format == "markdown":
        return "\n\n".join([text, "\n".join(f"- {line}" for line in lines)])
    width = max(shutil.get_terminal_size((160, 24)).columns, 56)
    return "\n\n".join([text, "\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in lines)])


def table_rows(report: Report) -> list[Row]:
    """The columns that a reader needs, as text; a column that says nothing, or the same as another, is left out."""
    rows = [_table_row(row, report) for row in report.rows]
    same = all(row["lr"] == row["shared_lr"] for row in report.rows)
    silent = [key for key in rows[0] if not any(row[key] for row in rows)]
    if same:
        silent += [key for key in rows[0] if key.endswith(" shared lr")]
    return [{key: value for key, value in row.items() if key not in silent} for row in rows]


def _table_row(row: Row, report: Report) -> Row:
    compared = "baseline" in row
    return {
        " ".join(report.by): row["cell"],
        "runs": f"{row['runs']}",
        **{ending: f"{row[ending]}" if row[ending] else "" for ending in _COUNTS},
        "best lr": "" if row["lr"] is None else f"{row['lr']:g}",
        "val loss": loss_text(row, OWN, "val_loss"),
        "best val": loss_text(row, OWN, "best_val_loss"),
        **({"less baseline": difference_text(row, OWN), "p (Holm)": p_text(row, OWN)} if compared else {}),
        "val loss at shared lr": loss_text(row, SHARED, "val_loss"),
        **(
            {"less baseline at shared lr": difference_text(row, SHARED), "p (Holm) at shared lr": p_text(row, SHARED)}
            if compared
            else {}
        ),
        "S": _sensitivity_text(row),
        "usable lr": "" if row["usable_lr"] is None else "-".join(f"{lr:g}" for lr in dict.fromkeys(row["usable_lr"])),
        "edge lr": "" if row["edge_lr"] is None else f"{row['edge_lr']:g}",
        **(_target_text(row) if "target" in row else {}),
        "tokens/s": "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
        "memory": "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / GIB:.2f} GiB",
        "spikes": _spikes_text(row),
    }


_COUNTS = [ending for ending in ENDINGS if ending != FINISHED]
_SHOWN_SPIKES = "loss_olmo_core"
"""The rule whose count the table shows; JSON has all of them."""


def loss_text(row: Row, prefix: str, key: str) -> str:
    """`2.2425 ± 0.0031 (n=3)`; of diverged runs how many they are, never a mean that leaves them out unsaid."""
    mean, n, diverged = row[f"{prefix}{key}"], row[f"{prefix}seeds"], row[f"{prefix}seeds_diverged"]
    if mean is None:
        return ""
    if diverged:
        others = row[f"{prefix}{key}_of_others"]
        return f"{diverged} of {n} diverged" + ("" if others is None else f", others {others:.4f}")
    high, n = row[f"{prefix}{key}_high"], count_text(n, row[f"{prefix}seeds_crossed"])
    return f"{mean:.4f} (n={n})" if high is None else f"{mean:.4f} ± {high - mean:.4f} (n={n})"


def count_text(n: int, crossed: Sequence[int] | None) -> str:
    """`3`; `6x6` where seeds and data seeds are crossed; `11 of 6x6` where the crossing is incomplete."""
    return str(Design(n, (crossed[0], crossed[1]) if crossed else (n, n)))


def _sensitivity_text(row: Row) -> str:
    if row["lr_sensitivity"] is not None:
        return f"{row['lr_sensitivity']:.4f}"
    return NO_S if len(row["learning_rates"]) > 1 else ""


def difference_text(row: Row, prefix: str) -> str:
    """`-0.0123 [-0.0200, -0.0046]`, nats; below zero the cell is better than its baseline."""
    if row[f"{prefix}difference"] is None:
        return ""
    low, high = row[f"{prefix}difference_low"], row[f"{prefix}difference_high"]
    interval = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
    ranks = " by ranks" if str(row[f"{prefix}test"]).startswith("signed-rank") else ""
    n = count_text(row[f"{prefix}pairs"], row[f"{prefix}pairs_crossed"])
    return f"{row[f'{prefix}difference']:+.4f}{interval} (n={n}{ranks})"


def p_text(row: Row, prefix: str) -> str:
    """The corrected p-value, to two digits."""
    p = row[f"{prefix}p_holm"]
    return "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def notes(report: Report) -> list[str]:
    """What the columns mean, and how far they may be believed."""
    rows, percent = report.rows, f"{LEVEL:.0%}"
    grid = sorted({len(row["learning_rates"]) for row in rows if row["learning_rates"]})
    said = [f"losses: nats a token, mean ± {percent} interval over n seeds (Student t)"]
    said += _design_notes(rows)
    if grid and grid[-1] > 1:
        k = "-".join(map(str, dict.fromkeys((grid[0], grid[-1]))))
        said.append(
            f"best lr: selected out of {k} learning rates, by the mean of the very validation loss that is shown, "
            "which flatters it; one at which a seed diverged only where every one has such a seed"
        )
    shared = next((row["shared_lr"] for row in rows if row["shared_lr"] is not None), None)
    if shared is not None and any(row["lr"] != shared for row in rows):
        said.append(f"shared lr: {shared:g}, the same for every cell (by mean rank over the cells, or --lr)")
    said += [f"{ending}: {rule}" for ending, rule in RULES.items() if any(row[ending] for row in rows)]
    old = sum(references_of(run.entry.run, {}).whole_text for cell in report.cells for run in cell.outcomes)
    if old:
        said.append(f"the outcomes of {old} older runs are judged by {WHOLE_TEXT_NOTE}")
    if any(row["lr_sensitivity"] is not None for row in rows):
        said.append(
            "S: mean over the learning rates of min(loss, ln V), less the least of a usable one; a diverged run counts "
            f"as ln V, so read it with n diverged. Edge: the lowest lr above the best that is more than {EDGE:g} above "
            "it, or not usable"
        )
    if any(_sensitivity_text(row) == NO_S for row in rows):
        said.append(
            f"S {NO_S}: no learning rate is usable; at each a run diverged, is stuck, regressed, or ended above the "
            "band around the unigram entropy"
        )
    if any(row.get("baseline") for row in rows):
        m = sum(row.get("p") is not None for row in rows)
        said.append(
            f"less baseline: paired by seed and data order, below 0 is better; p of {m} comparisons, corrected by "
            "Holm. Paired t; where a run of a pair diverged, exact signed ranks, in which it is the worst of all"
        )
    if any("target" in row for row in rows):
        said.append(f"to {rows[0]['target']:g}: the first evaluation at or below it, at the best lr, mean over seeds")
    if any(row["spikes"] for row in rows):
        said.append(f"spikes: of the loss, by the rule {_SHOWN_SPIKES}, of the steps that it can judge, at the best lr")
    return said


_FIXED = {"data.seed": "data order", "seed": "initial weights"}


def _design_notes(rows: Sequence[Row]) -> list[str]:
    """What the intervals hold of the two sources of variation, once for the table."""
    fixed = {row[f"{prefix}seeds_fixed"] for row in rows for prefix in (OWN, SHARED)}
    notes = [
        f"{what} fixed ({word}): its variance is not in the intervals" for word, what in _FIXED.items() if word in fixed
    ]
    crossed = [
        (row[prefix + count], levels)
        for row in rows
        for prefix in (OWN, SHARED)
        for count in ("seeds", "pairs")
        if (levels := row.get(f"{prefix}{count}_crossed"))
    ]
    if crossed:
        notes.append(
            "n=a x b: a seeds crossed with b data seeds, two random effects: variance of the mean "
            "(MS_a + MS_b - MS_ab) / (ab), t with min(a, b) - 1 degrees of freedom"
        )
    if any(n < a * b for n, (a, b) in crossed):
        notes.append("n=k of a x b: an incomplete crossing: the variances of both factors are added (conservative)")
    return notes


def _target_text(row: Row) -> Row:
    name, steps, seconds = f"to {row['target']:g}", row["steps_to_target"], row["seconds_to_target"]
    if steps is None:
        return {name: f"{row['target_reached']} of {row['target_runs']}"}
    return {name: f"{steps:,.0f} steps" + ("" if seconds is None else f", {seconds:,.1f} s")}


def _spikes_text(row: Row) -> str:
    found = row["spikes"].get(_SHOWN_SPIKES)
    return f"{found['spikes']} of {found['of_steps']}" if found and found["of_steps"] else ""


def _flat(row: Row) -> dict[str, Any]:
    """A row without rows inside it: a dotted key for each leaf, lists as JSON."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flat({f"{key}.{name}": each for name, each in value.items()})
        else:
            flat[key] = json.dumps(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    return flat
