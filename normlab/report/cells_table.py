"""The table of `normlab summarize --by norm,placement`: values for JSON, CSV and the page, texts, and definitions.

The values are not rounded. The texts are few columns: losses with interval and n.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from normlab.analysis.best import Comparison, clearly_best, size_options
from normlab.analysis.cells import GRID_OF_DECAYS, Cell, SeedMean
from normlab.analysis.contrasts import MIN_P_EQUAL, POOLED
from normlab.analysis.factors import level_title, option_name
from normlab.analysis.intervals import LEVEL, design_of, format_losses
from normlab.analysis.learning_rates import BAD, DEFINITIONS, NEAR_BEST
from normlab.analysis.results import STATES
from normlab.analysis.settings import format_setting, sort_key
from normlab.analysis.table import AtRate, CellResult, CellsTable, Target
from normlab.errors import ConfigError, printable, unknown
from normlab.report.tables import Row, escape_markdown, fold_lines, format_p, render, terminal_width
from normlab.store.format import FINISHED
from normlab.store.outcome import DESCRIPTIONS, STUCK
from normlab.store.throughput import format_mfu, format_tflops

SPIKE_RULE = "loss_olmo_core"
"""The spike rule of the table's column; JSON has the counts of all rules."""
ON_REQUEST = ("TFLOP/s",)
"""Columns that a table has only if they are named."""
PREFIXES = ("", "shared_")
"""Prefixes of keys of JSON: at the cell's best learning rate, and at the one that all cells share."""


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
        rows = [row if format == "json" else _flatten(row) for row in json_rows(table)]
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
    text = render(rows, format, fixed=table.by, bold={(index, "val loss") for index in best})
    return add_notes(text, lines, format)


def add_notes(table: str, notes: Sequence[str], format: str) -> str:
    """Return a rendered table with notes below it, each on one line: LaTeX comments, a list in Markdown, or folded."""
    notes = list(map(printable, notes))
    if format == "latex":
        return "\n".join([table, *(f"% {note}" for note in notes)])
    if format == "markdown":
        return "\n".join([table, "", *(f"- {escape_markdown(note)}" for note in notes)])
    return f"{table}\n\n{fold_lines(notes, terminal_width())}"


def _with_titles(row: Row, cell: Cell) -> Row:
    """Return a row with the names and levels of factors as in text: `depth`, `DeepNorm`."""
    titles = {option_name(option): level_title(option, value) for option, value in cell.levels.items()}
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
    rows = json_rows(table)
    [key] = _choose([column.removeprefix("-")], rows[0] if rows else [], "--sort")
    pairs = [(row[key], result) for row, result in zip(rows, table.results, strict=True)]
    known = [pair for pair in pairs if isinstance(pair[0], str | int | float)]
    known.sort(key=lambda pair: sort_key(pair[0]), reverse=column.startswith("-"))
    unknown_values = [pair for pair in pairs if not isinstance(pair[0], str | int | float)]
    return dataclasses.replace(table, results=[result for _, result in known + unknown_values])


# Values


def json_rows(table: CellsTable) -> list[Row]:
    """Return the values of each cell: levels, counts, losses in nats/token, costs, comparisons and warnings."""
    differences = table.resolved_differences
    return [_values(table, result) | {"resolved_differences": differences} for result in table.results]


def _values(table: CellsTable, result: CellResult) -> Row:
    cell, k = result.cell, len(result.cell.losses)
    selected = f"lowest mean final validation loss of {k} learning rates, on that same loss" if k > 1 else None
    best, shared = (_losses(at, prefix) for at, prefix in zip(result.rates, PREFIXES, strict=True))
    row = {
        **cell.levels,
        "cell": cell.name,
        "label": cell.label,
        "runs": len(cell.runs),
        **{state: cell.count(state) for state in STATES},
        **best,
        "selected": selected,
        **shared,
        "learning_rates": list(cell.losses),
        "lr_sensitivity": result.sensitivity.value,
        "loss_at_start": result.loss_at_start,
        "near_best_lr": result.sensitivity.near_best and list(result.sensitivity.near_best),
        "near_best_within": NEAR_BEST,
        "too_high_lr": result.sensitivity.too_high,
        "bad_lrs": sorted(cell.bad_lrs),
        "tokens_per_s": result.tokens_per_s,
        "flops_per_token": result.flops_per_token,
        "flops_per_s": result.flops_per_s,
        "mfu": result.mfu,
        "peak_memory_bytes": result.peak_memory_bytes,
        **(_target_values(result.target) if result.target else {}),
        "spikes": {
            rule: {"runs": each.runs, "spikes": each.spikes, "of_steps": each.of_steps, "share": each.share}
            for rule, each in result.spikes.items()
        },
        **{
            name: sorted({str(run.settings[key]) for run in cell.runs})
            for name, key in (("corpora", "corpus"), ("devices", "device"), ("precisions", "precision"))
        },
        "run_ids": [run.record.run_id for run in cell.runs],
        "warnings": result.warnings,
    }
    if table.has_baseline:
        for at, prefix in zip(result.rates, PREFIXES, strict=True):
            row |= {f"{prefix}baseline": result.baseline and result.baseline.name}
            row |= _comparison_values(at.comparison, prefix)
    if table.has_speedup:
        row |= _fields(result.speedup, speedup="ratio")
        row |= _fields(
            result.speedup, "speedup_", **{name: name for name in ("low", "high", "seeds", "bound", "method")}
        )
    return row


def _fields(source: object, prefix: str = "", **names: str) -> Row:
    """Return attributes of an object by key, or None for each if there is no object."""
    return {f"{prefix}{key}": None if source is None else getattr(source, name) for key, name in names.items()}


_INTERVAL = {"": "estimate", "_low": "low", "_high": "high"}


def _losses(at: AtRate, prefix: str) -> Row:
    final = at.final.interval
    return {
        f"{prefix}lr": at.lr,
        f"{prefix}seeds": len(at.final.losses),
        f"{prefix}seeds_diverged": at.final.diverged,
        **_fields(final and final.design, f"{prefix}seeds_", crossed="crossing", fixed="fixed"),
        **_fields(final, f"{prefix}val_loss", **_INTERVAL),
        f"{prefix}val_loss_of_others": at.final.mean_of_others,
        **_fields(at.lowest.interval, f"{prefix}best_val_loss", **_INTERVAL),
        f"{prefix}best_val_loss_of_others": at.lowest.mean_of_others,
    }


def _comparison_values(comparison: Comparison | None, prefix: str) -> Row:
    test = comparison and comparison.test
    return {
        **_fields(test, f"{prefix}difference", **_INTERVAL),
        **_fields(test, prefix, p="p"),
        **_fields(comparison, prefix, p_holm="p_holm"),
        f"{prefix}pairs": test.design.n if test else 0,
        f"{prefix}pairs_crossed": test and test.design.crossing,
        f"{prefix}test": test and test.test,
    }


def _target_values(target: Target) -> Row:
    return {
        "target": target.loss,
        "target_runs": target.runs,
        "target_reached": len(target.reached),
        "steps_to_target": target.steps,
        "seconds_to_target": target.seconds,
    }


def _flatten(row: Row) -> dict[str, Any]:
    """Return a row for CSV: nested values with dotted keys, and lists as JSON."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten({f"{key}.{name}": nested for name, nested in value.items()})
        else:
            flat[key] = json.dumps(value) if isinstance(value, list) else value
    return flat


# Texts


def table_rows(table: CellsTable, columns: Sequence[str] = ()) -> list[Row]:
    """Return the rows of the table as text.

    Args:
        table: The cells.
        columns: The columns besides the factors; by default all, but for `ON_REQUEST` and columns that are empty or
            repeat others.

    Raises:
        ConfigError: A column is unknown.
    """
    rows = [_texts(table, result) for result in table.results]
    known = [key for key in rows[0] if key not in table.by] if rows else []
    if columns:
        shown = [key for key in _choose(columns, [*known, *table.by]) if key not in table.by]
    else:
        is_same_lr = all(result.best.lr == result.shared.lr for result in table.results)
        shown = [
            key
            for key in known
            if any(row[key] for row in rows)
            and key not in ON_REQUEST
            and not (is_same_lr and key.endswith(" shared lr"))
        ]
    return [{key: row[key] for key in (*table.by, *shown)} for row in rows]


def _texts(table: CellsTable, result: CellResult) -> Row:
    cell, sensitivity, memory = result.cell, result.sensitivity, result.peak_memory_bytes
    counts = result.spikes.get(SPIKE_RULE)
    undefined = "-" if len(cell.losses) > 1 else ""
    return {
        **{option: format_setting(value) for option, value in cell.levels.items()},
        "runs": f"{len(cell.runs)}",
        **{state: f"{cell.count(state) or ''}" for state in STATES if state != FINISHED},
        "best lr": _text(result.best.lr, format_setting),
        "val loss": loss_text(result.best.final),
        "best val": loss_text(result.best.lowest),
        **(_comparison_texts(result.best.comparison, "") if table.has_baseline else {}),
        "val loss at shared lr": loss_text(result.shared.final),
        **(_comparison_texts(result.shared.comparison, " at shared lr") if table.has_baseline else {}),
        **({"compute speed-up": "" if result.speedup is None else str(result.speedup)} if table.has_speedup else {}),
        "S": _text(sensitivity.value, "{:.4f}".format) or undefined,
        "near-best lr": "-".join(format_setting(lr) for lr in dict.fromkeys(sensitivity.near_best or ())),
        "too-high lr": _text(sensitivity.too_high, format_setting),
        **({_target_title(result.target): _target_text(result.target)} if result.target else {}),
        "tok/s": _text(result.tokens_per_s, "{:,.0f}".format),
        "TFLOP/s": _text(result.flops_per_s, format_tflops),
        "MFU": _text(result.mfu, format_mfu),
        "memory": "" if memory is None else f"{memory / 2**30:.2f} GiB",
        "spikes": f"{counts.spikes} of {counts.of_steps}" if counts and counts.of_steps else "",
    }


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def loss_text(mean: SeedMean) -> str:
    """Return `2.2425 ± 0.0031 (n=3)`, or `1 of 3 diverged, others 2.2420` if a run diverged."""
    if mean.diverged:
        others = f", others {mean.mean_of_others:.4f}" if mean.finite else ""
        return f"{mean.diverged} of {len(mean.losses)} diverged{others}"
    return f"{format_losses(mean.losses)} (n={design_of(mean.losses)})" if mean.losses else ""


def _comparison_texts(comparison: Comparison | None, suffix: str) -> Row:
    """Return the difference, `-0.0123 [-0.0200, -0.0046] (n=5)`, and its corrected p-value."""
    test, difference = comparison and comparison.test, ""
    if test is not None:
        interval = "" if test.low is None else f" [{test.low:+.4f}, {test.high:+.4f}]"
        ranks = " by ranks" if test.test.startswith("signed-rank") else ""
        difference = f"{test.estimate:+.4f}{interval} (n={test.design}{ranks})"
    return {f"vs baseline{suffix}": difference, f"p (Holm){suffix}": format_p(comparison and comparison.p_holm)}


def _target_title(target: Target) -> str:
    return f"to {target.loss:g}"


def _target_text(target: Target) -> str:
    if target.steps is None:
        return f"{len(target.reached)} of {target.runs}"
    return f"{target.steps:,.0f} steps" + ("" if target.seconds is None else f", {target.seconds:,.1f} s")


# Definitions


def notes(table: CellsTable, shown: Iterable[str] | None = None) -> list[str]:
    """Return the definitions of the shown columns, by default those of `table_rows`, one per line."""
    results, shown = table.results, list(table_rows(table)[0] if shown is None else shown)
    columns = {column.removesuffix(" at shared lr") for column in shown}
    grid = sorted({len(cell.losses) for cell in table.cells if cell.losses})
    lines = [
        f"losses: nats/token, mean ± half of its {LEVEL:.0%} interval over n seeds (Student's t); both losses if n=2",
        *_design_notes(results),
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
    shared = next((result.shared.lr for result in results), None)
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
    tests = [at.comparison.test for result in results for at in result.rates if at.comparison and at.comparison.test]
    if "vs baseline" in columns and any(result.baseline for result in results):
        m = next(result.best.comparison.tests for result in results if result.best.comparison)
        lines.append(
            "vs baseline: loss minus the loss of the baseline, paired by seed and data order; negative is better. "
            "p: two-sided, of a paired t test, or of an exact signed-rank test if a run of a pair diverged (a diverged "
            f"run ranks worst); corrected by Holm's method (number of comparisons: {m})"
        )
        lines += pool_notes(test.test for test in tests)
    if "compute speed-up" in columns:
        methods = dict.fromkeys(result.speedup.method for result in results if result.speedup)
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
    if "TFLOP/s" in columns and any(result.flops_per_s is not None for result in results):
        lines.append("TFLOP/s: of one run: tok/s times the model FLOPs per token, 6 N + 12 L T D (PaLM, appendix B)")
    if "MFU" in columns and any(result.mfu is not None for result in results):
        lines.append("MFU: model FLOP/s of all runs of a pack, as a share of the device's peak in the run's precision")
    target = results[0].target if results else None
    if target and _target_title(target) in columns:
        lines.append(
            f"{_target_title(target)}: steps and training time until an evaluation reaches this loss, at the best lr, "
            "mean over seeds"
        )
    if "spikes" in columns and any(_texts(table, result)["spikes"] for result in results):
        lines.append(f"spikes: loss spikes by the rule {SPIKE_RULE}, of the steps that it judges, at the best lr")
    return lines


def pool_notes(methods: Iterable[str]) -> list[str]:
    """Return the note that defines pooled tests, if there are any."""
    if not any(method.startswith(POOLED) for method in methods):
        return []
    return [
        "pooled t: the residual variance, after the means of cells and seeds, is pooled over the cells without a bad "
        f"outcome, because Bartlett's test does not find it to differ (p >= {MIN_P_EQUAL:g}), as it seldom does with "
        "few seeds"
    ]


def _unigram_text(cells: Sequence[Cell]) -> str:
    """Return ` (here 3.2114)`, or a range if the runs' unigram entropies differ; empty if none is on record."""
    known = [run.record.references.unigram for cell in cells for run in cell.runs]
    losses = [f"{loss:.4f}" for loss in sorted({loss for loss in known if loss is not None})]
    return f" (here {' to '.join(dict.fromkeys((losses[0], losses[-1])))})" if losses else ""


def _design_notes(results: Sequence[CellResult]) -> list[str]:
    """Return notes on the variance that the intervals include: initial weights, data order."""
    rates = [at for result in results for at in result.rates]
    designs = [at.final.interval.design for at in rates if at.final.interval]
    fixed = {design.fixed for design in designs}
    designs += [at.comparison.test.design for at in rates if at.comparison and at.comparison.test]
    notes = [
        f"{factor} fixed ({option}): its variance is not in the intervals"
        for option, factor in (("data.seed", "data order"), ("seed", "initial weights"))
        if option in fixed
    ]
    if any(design.crossed for design in designs):
        notes.append(
            "n=a x b: a seeds crossed with b data seeds, two random effects: variance of the mean "
            "(MS_a + MS_b - MS_ab) / (ab), t with min(a, b) - 1 degrees of freedom"
        )
    if any(design.crossed and not design.complete for design in designs):
        notes.append("n=k of a x b: an incomplete crossing: the variances of both factors are added (conservative)")
    return notes
