"""Render the table of cells as text: few columns, losses with interval and n, and notes that define the columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from normlab.report.cells import Cell
from normlab.report.cells_table import BEST, SHARED, CellsTable
from normlab.report.intervals import LEVEL, Design, Replicate, design_of, format_losses, mean_interval
from normlab.report.learning_rates import EDGE
from normlab.report.results import STATES
from normlab.report.tables import Row, fold_lines, render, terminal_width
from normlab.store.format import FINISHED
from normlab.store.outcome import DESCRIPTIONS, WHOLE_TEXT_NOTE

NO_SENSITIVITY = "-"
"""S of a cell without a usable learning rate."""
SPIKE_RULE = "loss_olmo_core"
"""The spike rule of the table's column; JSON has the counts of all rules."""


def render_cells(table: CellsTable, format: str) -> str:
    """Render the cells in one of `tables.FORMATS`; JSON and CSV have every value.

    Raises:
        NormlabError: The format is unknown.
    """
    if format == "json":
        return render(table.rows, format)
    if format == "csv":
        flat = [_flatten(row) for row in table.rows]
        keys = dict.fromkeys(key for row in flat for key in row)  # a cell without counts has no spike keys
        return render([{key: row.get(key) for key in keys} for row in flat], format)
    text, lines = render(table_rows(table), format), notes(table)
    if format == "markdown":
        return "\n\n".join([text, "\n".join(f"- {line}" for line in lines)])
    return f"{text}\n\n{fold_lines(lines, terminal_width())}"


def table_rows(table: CellsTable) -> list[Row]:
    """Return the rows of the table as text, without columns that are empty or repeat others."""
    rows = [_table_row(row, cell, table.by) for row, cell in zip(table.rows, table.cells, strict=True)]
    is_same_lr = all(row["lr"] == row["shared_lr"] for row in table.rows)
    hidden = [
        key for key in rows[0] if not any(row[key] for row in rows) or (is_same_lr and key.endswith(" shared lr"))
    ]
    return [{key: value for key, value in row.items() if key not in hidden} for row in rows]


def _table_row(row: Row, cell: Cell, by: Sequence[str]) -> Row:
    losses = {lr: loss_text(by_replicate) for lr, by_replicate in cell.losses.items()}
    return {
        " ".join(by): row["cell"],
        "runs": f"{row['runs']}",
        **{state: f"{row[state] or ''}" for state in STATES if state != FINISHED},
        "best lr": _text(row["lr"], "g"),
        "val loss": losses.get(row["lr"], ""),
        "best val": loss_text(cell.lowest_losses.get(row["lr"], {})),
        **_comparison_texts(row, BEST, ""),
        "val loss at shared lr": losses.get(row["shared_lr"], ""),
        **_comparison_texts(row, SHARED, " at shared lr"),
        "S": _sensitivity_text(row),
        "usable lr": "-".join(f"{lr:g}" for lr in dict.fromkeys(row["usable_lr"] or ())),
        "edge lr": _text(row["edge_lr"], "g"),
        **(_target_text(row) if "target" in row else {}),
        "tok/s": _text(row["tokens_per_s"], ",.0f"),
        "memory": "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        "spikes": _spikes_text(row),
    }


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def loss_text(losses: Mapping[Replicate, float]) -> str:
    """Return `2.2425 ± 0.0031 (n=3)`, or `1 of 3 diverged, others 2.2420` if a run diverged."""
    finite = {replicate: loss for replicate, loss in losses.items() if math.isfinite(loss)}
    if len(finite) < len(losses):
        others = f", others {mean_interval(finite).estimate:.4f}" if finite else ""
        return f"{len(losses) - len(finite)} of {len(losses)} diverged{others}"
    return f"{format_losses(losses)} (n={design_of(losses)})" if losses else ""


def _sensitivity_text(row: Row) -> str:
    if row["lr_sensitivity"] is None:
        return NO_SENSITIVITY if len(row["learning_rates"]) > 1 else ""
    return f"{row['lr_sensitivity']:.4f}"


def _comparison_texts(row: Row, prefix: str, suffix: str) -> Row:
    """Return the difference, `-0.0123 [-0.0200, -0.0046] (n=5)`, and its corrected p-value."""
    if "baseline" not in row:
        return {}
    difference, p = "", row[f"{prefix}p_holm"]
    if row[f"{prefix}difference"] is not None:
        low, high = row[f"{prefix}difference_low"], row[f"{prefix}difference_high"]
        interval = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
        ranks = " by ranks" if row[f"{prefix}test"].startswith("signed-rank") else ""
        n, levels = row[f"{prefix}pairs"], row[f"{prefix}pairs_crossed"]
        design = Design(n, (levels[0], levels[1]) if levels else (n, n))
        difference = f"{row[f'{prefix}difference']:+.4f}{interval} (n={design}{ranks})"
    p_text = "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"
    return {f"vs baseline{suffix}": difference, f"p (Holm){suffix}": p_text}


def _target_text(row: Row) -> Row:
    name, steps, seconds = f"to {row['target']:g}", row["steps_to_target"], row["seconds_to_target"]
    if steps is None:
        return {name: f"{row['target_reached']} of {row['target_runs']}"}
    return {name: f"{steps:,.0f} steps" + ("" if seconds is None else f", {seconds:,.1f} s")}


def _spikes_text(row: Row) -> str:
    counts = row["spikes"].get(SPIKE_RULE)
    return f"{counts['spikes']} of {counts['of_steps']}" if counts and counts["of_steps"] else ""


def notes(table: CellsTable) -> list[str]:
    """Return the definitions of the columns, one per line."""
    rows = table.rows
    grid = sorted({len(row["learning_rates"]) for row in rows if row["learning_rates"]})
    lines = [
        f"losses: nats/token, mean ± half of its {LEVEL:.0%} interval over n seeds (Student's t); both losses if n=2",
        *_design_notes(rows),
    ]
    if grid and grid[-1] > 1:
        k = "-".join(map(str, dict.fromkeys((grid[0], grid[-1]))))
        lines.append(
            f"best lr: the best of {k} learning rates, selected on this same loss, so the loss is optimistic; a "
            "learning rate with a diverged seed is selected only if every learning rate has one"
        )
    shared = next((row["shared_lr"] for row in rows if row["shared_lr"] is not None), None)
    if shared is not None and any(row["lr"] != shared for row in rows):
        lines.append(
            f"shared lr: {shared:g} for every cell: the learning rate of --lr, else the one with the best mean rank"
        )
    lines += [f"{state}: {rule}" for state, rule in DESCRIPTIONS.items() if any(row[state] for row in rows)]
    old = sum(run.record.references.whole_text for cell in table.cells for run in cell.runs)
    if old:
        lines.append(f"runs of an older normlab, whose outcomes use {WHOLE_TEXT_NOTE}: {old}")
    if any(row["lr_sensitivity"] is not None for row in rows):
        lines.append(
            "S: sensitivity to the learning rate: the mean of min(loss, ln V) over the learning rates, minus the "
            "lowest loss of a usable learning rate; a diverged run counts as ln V, so read S together with the number "
            "of diverged runs. Edge lr: the lowest learning rate above the best one that is unusable or more than "
            f"{EDGE:g} nats/token worse"
        )
    if any(_sensitivity_text(row) == NO_SENSITIVITY for row in rows):
        lines.append(
            f"S {NO_SENSITIVITY}: no learning rate is usable: at each one a run diverged, is stuck, regressed, or "
            "ended above the band around the unigram entropy"
        )
    if any(row.get("baseline") for row in rows):
        m = sum(row.get("p") is not None for row in rows)
        lines.append(
            "vs baseline: loss minus the loss of the baseline, paired by seed and data order; negative is better. "
            "p: two-sided, of a paired t test, or of an exact signed-rank test if a run of a pair diverged (a diverged "
            f"run ranks worst); corrected by Holm's method (number of comparisons: {m})"
        )
    if any("target" in row for row in rows):
        lines.append(
            f"to {rows[0]['target']:g}: steps and training time until an evaluation reaches this loss, at the best lr, "
            "mean over seeds"
        )
    if any(_spikes_text(row) for row in rows):
        lines.append(f"spikes: loss spikes by the rule {SPIKE_RULE}, of the steps that it judges, at the best lr")
    return lines


def _design_notes(rows: Sequence[Row]) -> list[str]:
    """Return notes on the variance that the intervals include: initial weights, data order."""
    prefixes = (BEST, SHARED)
    fixed = {row[f"{prefix}seeds_fixed"] for row in rows for prefix in prefixes}
    notes = [
        f"{factor} fixed ({option}): its variance is not in the intervals"
        for option, factor in (("data.seed", "data order"), ("seed", "initial weights"))
        if option in fixed
    ]
    crossed = [
        (row[prefix + count], levels)
        for row in rows
        for prefix in prefixes
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


def _flatten(row: Row) -> dict[str, Any]:
    """Return a row for CSV: nested values with dotted keys, and lists as JSON."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten({f"{key}.{name}": nested for name, nested in value.items()})
        else:
            flat[key] = json.dumps(value) if isinstance(value, list) else value
    return flat
