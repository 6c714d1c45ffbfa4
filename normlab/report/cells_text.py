"""Render the table of cells as text: few columns, losses with interval and n, and notes that define the columns."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normlab.errors import ConfigError, printable, unknown
from normlab.report.cells import GRID_OF_DECAYS, Cell, rank_by_size, size_options
from normlab.report.cells_table import BEST, SHARED, CellsTable
from normlab.report.contrasts import MIN_P_EQUAL, POOLED, compare_cells, pool_cells
from normlab.report.factors import level_title, option_name
from normlab.report.intervals import LEVEL, Design, Replicate, design_of, format_losses, holm, mean_interval
from normlab.report.learning_rates import BAD, DEFINITIONS
from normlab.report.results import STATES
from normlab.report.settings import format_setting, sort_key
from normlab.report.tables import Row, escape_markdown, fold_lines, render, terminal_width
from normlab.store.format import FINISHED
from normlab.store.outcome import DESCRIPTIONS, STUCK
from normlab.store.throughput import format_mfu, format_tflops

SPIKE_RULE = "loss_olmo_core"
"""The spike rule of the table's column; JSON has the counts of all rules."""
ON_REQUEST = ("TFLOP/s",)
"""Columns that a table has only if they are named."""


def render_cells(table: CellsTable, format: str, columns: Sequence[str] = (), sort: str = "") -> str:
    """Render the cells in one of `tables.FORMATS`; JSON and CSV have every value.

    Args:
        table: The cells.
        format: One of `tables.FORMATS`.
        columns: The columns besides the factors, such as `val_loss`; by default all.
        sort: The column to sort by, such as `val_loss`, or `-val_loss` for the largest first; by default the factors.

    Raises:
        ConfigError: A column is unknown.
        NormlabError: The format is unknown.
    """
    table = _sorted(table, sort) if sort else table
    if format in ("json", "csv"):
        rows = [row if format == "json" else _flatten(row) for row in table.rows]
        keys = list(dict.fromkeys(key for row in rows for key in row))  # a cell without counts has no spike keys
        if columns:
            keys = list(dict.fromkeys([*table.by, *_choose(columns, keys)]))
        return render([{key: row.get(key) for key in keys} for row in rows], format)
    rows = table_rows(table, columns)
    lines = notes(table, rows[0] if rows else ())
    best = clearly_best(table.cells) if format == "latex" else []
    if best and rows and "val loss" in rows[0]:
        sizes = size_options(table.cells)
        equal = f" with equal {' and '.join(map(option_name, sizes))}" if sizes else ""
        lines.append(f"bold: lower than every other cell{equal}, p < 0.05 in paired tests corrected by Holm's method")
    if format == "latex":
        rows = [_with_titles(row, cell) for row, cell in zip(rows, table.cells, strict=True)]
    return _add_notes(render(rows, format, fixed=table.by, bold={(index, "val loss") for index in best}), lines, format)


def _add_notes(table: str, notes: Sequence[str], format: str) -> str:
    """Return a rendered table with notes below it, each on one line: LaTeX comments, a list in Markdown, or folded."""
    notes = list(map(printable, notes))
    if format == "latex":
        return "\n".join([table, *(f"% {note}" for note in notes)])
    if format == "markdown":
        return "\n".join([table, "", *(f"- {escape_markdown(note)}" for note in notes)])
    return f"{table}\n\n{fold_lines(notes, terminal_width())}"


def _with_titles(row: Row, cell: Cell) -> Row:
    """Return a row with the names and levels of factors as in text: `depth`, `DeepNorm`."""
    titles = {option_name(o): level_title(o, value) for o, value in zip(cell.by, cell.key, strict=True)}
    return titles | {key: text for key, text in row.items() if key not in cell.by}


def _choose(columns: Sequence[str], known: Iterable[str], option: str = "--columns") -> list[str]:
    """Return the columns with these names, in which spaces, underscores and case do not matter."""
    known = list(known)
    by_name = {_plain(key): key for key in known}
    for name in columns:
        if _plain(name) not in by_name:
            raise ConfigError(f"{option}: " + unknown("column", name, known))
    return [by_name[_plain(name)] for name in columns]


def _plain(name: str) -> str:
    return name.lower().replace(" ", "_")


def _sorted(table: CellsTable, column: str) -> CellsTable:
    """Return the table with its cells sorted by a column of JSON; cells without a value come last."""
    [key] = _choose([column.removeprefix("-")], table.rows[0] if table.rows else [], "--sort")
    pairs = list(zip(table.rows, table.cells, strict=True))
    known = [pair for pair in pairs if isinstance(pair[0][key], str | int | float)]
    known.sort(key=lambda pair: sort_key(pair[0][key]), reverse=column.startswith("-"))
    pairs = known + [pair for pair in pairs if pair not in known]
    return dataclasses.replace(table, rows=[row for row, _ in pairs], cells=[cell for _, cell in pairs])


def table_rows(table: CellsTable, columns: Sequence[str] = ()) -> list[Row]:
    """Return the rows of the table as text.

    Args:
        table: The cells.
        columns: The columns besides the factors; by default all, but for `ON_REQUEST` and columns that are empty or
            repeat others.

    Raises:
        ConfigError: A column is unknown.
    """
    rows = [_table_row(row, cell) for row, cell in zip(table.rows, table.cells, strict=True)]
    known = [key for key in rows[0] if key not in table.by] if rows else []
    if columns:
        shown = [key for key in _choose(columns, [*known, *table.by]) if key not in table.by]
    else:
        is_same_lr = all(row["lr"] == row["shared_lr"] for row in table.rows)
        shown = [
            key
            for key in known
            if any(row[key] for row in rows)
            and key not in ON_REQUEST
            and not (is_same_lr and key.endswith(" shared lr"))
        ]
    return [{key: row[key] for key in (*table.by, *shown)} for row in rows]


def _table_row(row: Row, cell: Cell) -> Row:
    losses = {lr: loss_text(by_replicate) for lr, by_replicate in cell.losses.items()}
    return {
        **{option: format_setting(value) for option, value in zip(cell.by, cell.key, strict=True)},
        "runs": f"{row['runs']}",
        **{state: f"{row[state] or ''}" for state in STATES if state != FINISHED},
        "best lr": _lr_text(row["lr"]),
        "val loss": losses.get(row["lr"], ""),
        "best val": loss_text(cell.lowest_losses.get(row["lr"], {})),
        **_comparison_texts(row, BEST, ""),
        "val loss at shared lr": losses.get(row["shared_lr"], ""),
        **_comparison_texts(row, SHARED, " at shared lr"),
        **({"compute speed-up": _speedup_text(row)} if "speedup" in row else {}),
        "S": _sensitivity_text(row),
        "near-best lr": "-".join(format_setting(lr) for lr in dict.fromkeys(row["near_best_lr"] or ())),
        "too-high lr": _lr_text(row["too_high_lr"]),
        **(_target_text(row) if "target" in row else {}),
        "tok/s": _text(row["tokens_per_s"], ",.0f"),
        "TFLOP/s": "" if row["flops_per_s"] is None else format_tflops(row["flops_per_s"]),
        "MFU": "" if row["mfu"] is None else format_mfu(row["mfu"]),
        "memory": "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        "spikes": _spikes_text(row),
    }


def clearly_best(cells: Sequence[Cell]) -> list[int]:
    """Return the index of each cell whose loss is lower than that of every other cell of its size.

    Every paired test against another cell must have p < 0.05 after Holm's correction.
    """
    pool = pool_cells(cells, {cell.key: cell.best_lr for cell in cells})
    found = []
    for first, *others in rank_by_size(cells).values():
        best = cells[first]
        tests = [compare_cells(best, best.best_lr, cells[i], cells[i].best_lr, pool) for i in others]
        p_values = holm([test and test.p for test in tests])
        is_lower = [test is not None and test.estimate < 0 for test in tests]
        if others and all(is_lower) and all(p is not None and p < 1 - LEVEL for p in p_values):
            found.append(first)
    return found


# Tests


def render_tests(rows: Sequence[Row], format: str) -> str:
    """Render the rows of `factor_tests.run_test` in one of `tables.FORMATS`; JSON and CSV have every value."""
    if format in ("json", "csv") or not rows:
        return render(rows, format)
    return _add_notes(render(format_tests(rows), format, fixed=("where", "contrast")), notes_on_tests(rows), format)


def format_tests(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of `factor_tests.run_test` as text."""
    has_bad, has_units = any(row["bad"] for row in rows), len({row["unit"] for row in rows}) > 1
    return [
        {
            "where": row["where"],
            "contrast": row["contrast"],
            **(_counts_text(row) if row["test"] == "counts" else {"estimate": _estimate_text(row)}),
            **({"unit": row["unit"]} if has_units else {}),
            "p": _p_text(row["p"]),
            "p (Holm)": _p_text(row["p_holm"]),
            **({"bad": f"{row['bad']} of {row['runs']}"} if has_bad and row["test"] != "counts" else {}),
        }
        for row in rows
    ]


def _estimate_text(row: Row) -> str:
    if row["estimate"] is None:
        return "no common seed"
    # A slope per step or per channel may be far below 0.0001.
    form = "+#.3g" if row["test"] == "trend" else "+.4f"
    interval = "" if row["low"] is None else f" [{row['low']:{form}}, {row['high']:{form}}]"
    return f"{row['estimate']:{form}}{interval} (n={_design(row['n'], row['n_crossed'])})"


def _design(n: int, levels: Sequence[int] | None) -> Design:
    return Design(n, (levels[0], levels[1]) if levels else (n, n))


def _counts_text(row: Row) -> Row:
    return {
        "bad": f"{row['bad']} of {row['runs']}",
        "bad, baseline": f"{row['baseline_bad']} of {row['baseline_runs']}",
    }


def _p_text(p: float | None) -> str:
    return "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def notes_on_tests(rows: Sequence[Row]) -> list[str]:
    """Return the definitions of a test's columns, one per line."""
    test, differences = rows[0]["test"], rows[0]["resolved_differences"]
    corrected = f"two-sided, corrected by Holm's method (number of tests: {len(rows)})"
    baseline = "after a minus sign: the baseline, by default the first level of a factor; --against chooses another"
    if test == "counts":
        return [
            "bad: runs that diverged, are stuck or regressed, at all learning rates",
            f"p: Fisher's exact test, which takes the runs as independent; {corrected}",
            baseline,
            *differences,
        ]
    rates, units = {row["lr"] for row in rows}, ", ".join(dict.fromkeys(row["unit"] for row in rows))
    [rate] = rates if len(rates) == 1 else [None]
    at = "the best learning rate of each cell" if rate is None else f"learning rate {format_setting(rate)}"
    lines = [f"estimate: {units}, at {at}, with its {LEVEL:.0%} interval over n seeds; p: {corrected}"]
    if test == "interaction":
        lines += [
            "(A - B) x (C - D): loss(A, C) - loss(B, C) - loss(A, D) + loss(B, D); negative: C instead of D lowers the "
            "loss more in A than in B; x (E - F): this number in E minus that in F",
            baseline,
        ]
    if any(row["bad"] for row in rows):
        lines.append(
            "bad: runs of these cells that diverged, are stuck or regressed; the loss of a stuck run stays near the "
            "unigram entropy, so an estimate with stuck runs may be far too small"
        )
    methods = dict.fromkeys(row["method"] for row in rows if row["method"])
    return [*lines, f"tests: {'; '.join(methods)}", *pool_notes(methods), *differences]


def pool_notes(methods: Iterable[str]) -> list[str]:
    """Return the note that defines pooled tests, if there are any."""
    if not any(method.startswith(POOLED) for method in methods):
        return []
    return [
        "pooled t: the residual variance, after the means of cells and seeds, is pooled over the cells without a bad "
        f"outcome, because Bartlett's test does not find it to differ (p >= {MIN_P_EQUAL:g}), as it seldom does with "
        "few seeds"
    ]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _lr_text(lr: float | None) -> str:
    return "" if lr is None else format_setting(lr)


def loss_text(losses: Mapping[Replicate, float]) -> str:
    """Return `2.2425 ± 0.0031 (n=3)`, or `1 of 3 diverged, others 2.2420` if a run diverged."""
    finite = {replicate: loss for replicate, loss in losses.items() if math.isfinite(loss)}
    if len(finite) < len(losses):
        others = f", others {mean_interval(finite).estimate:.4f}" if finite else ""
        return f"{len(losses) - len(finite)} of {len(losses)} diverged{others}"
    return f"{format_losses(losses)} (n={design_of(losses)})" if losses else ""


def _sensitivity_text(row: Row) -> str:
    if row["lr_sensitivity"] is None:
        return "-" if len(row["learning_rates"]) > 1 else ""
    return f"{row['lr_sensitivity']:.4f}"


def _comparison_texts(row: Row, prefix: str, suffix: str) -> Row:
    """Return the difference, `-0.0123 [-0.0200, -0.0046] (n=5)`, and its corrected p-value."""
    if "baseline" not in row:
        return {}
    difference = ""
    if row[f"{prefix}difference"] is not None:
        low, high = row[f"{prefix}difference_low"], row[f"{prefix}difference_high"]
        interval = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
        ranks = " by ranks" if row[f"{prefix}test"].startswith("signed-rank") else ""
        design = _design(row[f"{prefix}pairs"], row[f"{prefix}pairs_crossed"])
        difference = f"{row[f'{prefix}difference']:+.4f}{interval} (n={design}{ranks})"
    return {f"vs baseline{suffix}": difference, f"p (Holm){suffix}": _p_text(row[f"{prefix}p_holm"])}


def _speedup_text(row: Row) -> str:
    """Return the compute-equivalent speed-up: `1.32 [1.20, 1.45] (n=3)`, or a bound, `> 1.8`."""
    if row["speedup"] is None:
        return ""
    if row["speedup_bound"]:
        return f"{row['speedup_bound']} {row['speedup']:.2f}"
    interval = "" if row["speedup_low"] is None else f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    return f"{row['speedup']:.2f}{interval} (n={row['speedup_seeds']})"


def _target_text(row: Row) -> Row:
    name, steps, seconds = f"to {row['target']:g}", row["steps_to_target"], row["seconds_to_target"]
    if steps is None:
        return {name: f"{row['target_reached']} of {row['target_runs']}"}
    return {name: f"{steps:,.0f} steps" + ("" if seconds is None else f", {seconds:,.1f} s")}


def _spikes_text(row: Row) -> str:
    counts = row["spikes"].get(SPIKE_RULE)
    return f"{counts['spikes']} of {counts['of_steps']}" if counts and counts["of_steps"] else ""


def notes(table: CellsTable, shown: Iterable[str] | None = None) -> list[str]:
    """Return the definitions of the shown columns, by default those of `table_rows`, one per line."""
    rows, shown = table.rows, list(table_rows(table)[0] if shown is None else shown)
    columns = {column.removesuffix(" at shared lr") for column in shown}
    grid = sorted({len(row["learning_rates"]) for row in rows if row["learning_rates"]})
    lines = [
        f"losses: nats/token, mean ± half of its {LEVEL:.0%} interval over n seeds (Student's t); both losses if n=2",
        *_design_notes(rows),
        *table.resolved_differences,
    ]
    if grid and grid[-1] > 1 and columns & {"best lr", "val loss", "best val"}:
        k = "-".join(map(str, dict.fromkeys((grid[0], grid[-1]))))
        lines.append(
            f"best lr: the best of {k} learning rates, selected on this same loss, so the loss is optimistic; a "
            "learning rate with a diverged seed is selected only if every learning rate has one"
        )
    if any(cell.varies_decay for cell in table.cells):
        lines.append(GRID_OF_DECAYS)
    shared = next((row["shared_lr"] for row in rows if row["shared_lr"] is not None), None)
    if any(column.endswith(" at shared lr") for column in shown):
        lines.append(
            f"shared lr: {format_setting(shared)} for every cell: the learning rate of --lr, else the one with the "
            "best mean rank"
        )
    lines += [
        f"{state}: {rule}" + (_unigram_text(table.cells) if state == STUCK else "")
        for state, rule in DESCRIPTIONS.items()
        if state in columns
    ]
    defined = [f"{name}: {text}" for name, text in DEFINITIONS.items() if name in columns]
    lines += [f"bad learning rate: {BAD}", *defined] if defined else []
    if "vs baseline" in columns and any(row.get("baseline") for row in rows):
        m = sum(row.get("p") is not None for row in rows)
        lines.append(
            "vs baseline: loss minus the loss of the baseline, paired by seed and data order; negative is better. "
            "p: two-sided, of a paired t test, or of an exact signed-rank test if a run of a pair diverged (a diverged "
            f"run ranks worst); corrected by Holm's method (number of comparisons: {m})"
        )
        lines += pool_notes(str(row.get(f"{prefix}test")) for row in rows for prefix in (BEST, SHARED))
    if "compute speed-up" in columns:
        methods = dict.fromkeys(row["speedup_method"] for row in rows if row["speedup_method"])
        lines.append(
            "compute speed-up: the training FLOPs that the baseline needs to reach the cell's loss, over the FLOPs of "
            f"the cell, at the best lr; the baseline's loss between its budgets C: {'; '.join(methods)}; > or <: the "
            "loss is outside the baseline's range, so this is a bound"
        )
    packs = {run.record.status.pack_size for cell in table.cells for run in cell.runs}
    if "tok/s" in columns and max(packs) > 1:
        lines.append(
            "tok/s: of one run; the runs of a pack train together, so a pack of n runs processes n times as many"
        )
    if "TFLOP/s" in columns and any(row["flops_per_s"] is not None for row in rows):
        lines.append("TFLOP/s: of one run: tok/s times the model FLOPs per token, 6 N + 12 L T D (PaLM, appendix B)")
    if "MFU" in columns and any(row["mfu"] is not None for row in rows):
        lines.append("MFU: model FLOP/s of all runs of a pack, as a share of the device's peak in the run's precision")
    if any("target" in row and f"to {row['target']:g}" in columns for row in rows):
        lines.append(
            f"to {rows[0]['target']:g}: steps and training time until an evaluation reaches this loss, at the best lr, "
            "mean over seeds"
        )
    if "spikes" in columns and any(_spikes_text(row) for row in rows):
        lines.append(f"spikes: loss spikes by the rule {SPIKE_RULE}, of the steps that it judges, at the best lr")
    return lines


def _unigram_text(cells: Sequence[Cell]) -> str:
    """Return ` (here 3.2114)`, or a range if the runs' unigram entropies differ; empty if none is on record."""
    known = [run.record.references.unigram for cell in cells for run in cell.runs]
    losses = [f"{loss:.4f}" for loss in sorted({loss for loss in known if loss is not None})]
    return f" (here {' to '.join(dict.fromkeys((losses[0], losses[-1])))})" if losses else ""


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
