"""The table of `normlab summarize`: the cells of a sweep.

JSON and CSV have every value, not rounded. A text has few columns (`columns_of`), each with its definition below.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from normlab.analysis.best import Comparison
from normlab.analysis.cells import Cell, SeedMean, Target, mean, runs_of
from normlab.analysis.columns import Column, format_p
from normlab.analysis.contrasts import pool_notes
from normlab.analysis.factors import level_title, option_name
from normlab.analysis.intervals import LEVEL, Design, Interval, PairedTest, design_of, format_losses
from normlab.analysis.settings import format_setting
from normlab.analysis.table import CellsTable
from normlab.base.errors import ConfigError, counted, unknown
from normlab.report.tables import Row, add_notes, render
from normlab.store.format import FINISHED
from normlab.store.outcome import DESCRIPTIONS, format_loss
from normlab.store.record import RESULTS, RunRecord
from normlab.store.throughput import format_mfu, format_tflops


def render_cells(table: CellsTable, format: str, columns: Sequence[str] = ()) -> str:
    """Render the cells in one of `tables.FORMATS`, with the factors and some columns, such as `val_loss`.

    JSON and CSV have every value, and every column by default.

    Raises:
        ConfigError: A column is unknown.
        NormlabError: The format is unknown.
    """
    if format in ("json", "csv"):
        return render(_chosen_values(json_rows(table), table.by, columns), format)
    rows = table_rows(table, columns)
    shown = list(rows[0]) if rows else []
    lines = notes(table, shown)
    if format == "latex":
        rows = [_with_titles(row, cell) for row, cell in zip(rows, table.cells, strict=True)]
    return add_notes(render(rows, format, fixed=table.by), lines, format)


def _chosen_values(rows: Sequence[Row], by: Sequence[str], columns: Sequence[str]) -> Sequence[Row]:
    """Return the rows with the factors and the chosen columns only; with all if no columns are chosen."""
    if not columns:
        return rows
    known = rows[0] if rows else ()
    keys = dict.fromkeys([*by, *_choose(columns, known)])
    return [{key: row[key] for key in keys} for row in rows]


def _with_titles(row: Row, cell: Cell) -> Row:
    """Return a row with the names and levels of factors as in text: `depth`, `DeepNorm`."""
    titled: Row = {}
    for option, value in cell.levels.items():
        titled[option_name(option)] = level_title(option, value)
    for key, text in row.items():
        if key not in cell.by:
            titled[key] = text
    return titled


def _choose(columns: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the columns with these names, in which spaces, underscores and case do not matter."""
    by_name = {_plain(key): key for key in known}
    for name in columns:
        if _plain(name) not in by_name:
            raise ConfigError("--columns: " + unknown("column", name, list(by_name.values())))
    return [by_name[_plain(name)] for name in columns]


def _plain(name: str) -> str:
    return name.lower().replace(" ", "_")


# Columns


def columns_of(table: CellsTable, *, is_text: bool) -> list[Column[Cell]]:
    """Return the columns of a text, or of JSON and CSV, in their order."""
    to_target: list[Column[Cell]] = []
    baseline: list[Column[Cell]] = []
    if table.cells and table.cells[0].target:
        to_target = _target_columns(table.cells[0].target.loss)
    if table.has_baseline:
        baseline = _baseline_columns()
    has_packs = any(run.status.pack_size > 1 for run in runs_of(table.cells))
    costs = _cost_columns(PACK_NOTE if has_packs else "")
    if is_text:
        columns = [*_loss_columns(), *baseline, *_rate_columns(), *to_target, *costs]
        return [column for column in columns if column.title]
    differences = table.resolved_differences
    lists: list[Column[Cell]] = [
        Column("run_ids", lambda cell: [run.run_id for run in cell.runs]),
        Column("warnings", lambda cell: cell.warnings),
    ]
    last: Column[Cell] = Column("resolved_differences", lambda _: differences)
    return [*_loss_columns(), *_rate_columns(), *costs, *to_target, *lists, *baseline, last]


def _loss_columns() -> list[Column[Cell]]:
    return [
        Column("cell", lambda cell: cell.name),
        Column("runs", lambda cell: len(cell.runs), "runs"),
        *map(_count, RESULTS),
        Column("lr", lambda cell: cell.best_lr, "best lr", format_setting),
        Column("seeds", lambda cell: len(cell.final.losses)),
        Column("seeds_diverged", lambda cell: cell.final.diverged),
        Column("seeds_crossed", _field(_design, "crossing")),
        Column("seeds_fixed", _field(_design, "fixed")),
        Column("val_loss", _field(_interval, "estimate"), "val loss", loss_text, shown=lambda cell: cell.final),
        Column("val_loss_low", _field(_interval, "low")),
        Column("val_loss_high", _field(_interval, "high")),
        Column("val_loss_of_others", lambda cell: cell.final.mean_of_others),
        Column("val_loss_ema", _averaged_loss, "val ema", format_loss, EMA_NOTE),
    ]


def _rate_columns() -> list[Column[Cell]]:
    return [
        Column("learning_rates", lambda cell: list(cell.losses)),
        Column("loss_at_start", lambda cell: cell.loss_at_start),
        Column("bad_lrs", lambda cell: sorted(cell.bad_lrs)),
    ]


def _cost_columns(pack_note: str) -> list[Column[Cell]]:
    return [
        Column(
            "tokens_per_s", _mean_of(lambda run: run.status.tokens_per_s), "tok/s", "{:,.0f}".format, note=pack_note
        ),
        Column("flops_per_token", _mean_of(lambda run: run.compute.flops_per_token)),
        Column(
            "flops_per_s", _mean_of(lambda run: run.flops_per_s), "TFLOP/s", format_tflops, note=FLOPS_NOTE,
            is_default=False,
        ),
        Column("mfu", _mean_of(lambda run: run.mfu), "MFU", format_mfu, note=MFU_NOTE),
        Column("peak_memory_bytes", _peak_memory),
    ]  # fmt: skip


def _count(result: str) -> Column[Cell]:
    """Return the column with the number of runs of a cell that ended with a result, empty for none."""

    def shown(cell: Cell) -> int | None:
        return cell.count(result) or None

    # A text has a column for each result that needs attention.
    title = "" if result == FINISHED else result
    note = ""
    if result in DESCRIPTIONS:
        note = f"{result}: {DESCRIPTIONS[result]}"
    return Column(result, lambda cell: cell.count(result), title, note=note, shown=shown)


def _target_columns(loss: float) -> list[Column[Cell]]:
    title = f"to {loss:g}"
    note = f"{title}: steps and training time until an evaluation reaches this loss, at the best lr, mean over seeds"
    return [
        Column("target", _field(_target, "loss")),
        Column("target_runs", _field(_target, "runs")),
        Column("target_reached", _field(_target, "count")),
        Column("steps_to_target", _field(_target, "steps"), title, _target_text, note, shown=_target),
        Column("seconds_to_target", _field(_target, "seconds")),
    ]


def _baseline_columns() -> list[Column[Cell]]:
    return [
        Column("baseline", _field(lambda cell: cell.baseline, "name")),
        Column("difference", _field(_test, "estimate"), "vs baseline", _difference_text, shown=_comparison),
        Column("difference_low", _field(_test, "low")),
        Column("difference_high", _field(_test, "high")),
        Column("p", _field(_test, "p")),
        Column("p_holm", _field(_comparison, "p_holm"), "p (Holm)", format_p),
        Column("pairs", _field(_test_design, "n", default=0)),
        Column("pairs_crossed", _field(_test_design, "crossing")),
        Column("test", _field(_test, "test")),
    ]


# Values of columns


def _interval(cell: Cell) -> Interval | None:
    return cell.final.interval


def _design(cell: Cell) -> Design | None:
    interval = cell.final.interval
    if interval is None:
        return None
    return interval.design


def _target(cell: Cell) -> Target | None:
    return cell.target


def _comparison(cell: Cell) -> Comparison | None:
    return cell.comparison


def _test(cell: Cell) -> PairedTest | None:
    if cell.comparison is None:
        return None
    return cell.comparison.test


def _test_design(cell: Cell) -> Design | None:
    test = _test(cell)
    if test is None:
        return None
    return test.design


def _field(part: Callable[[Cell], Any], name: str, default: Any = None) -> Callable[[Cell], Any]:
    """Return the reader of a field of a part of a cell, with a value for cells without the part."""

    def read(cell: Cell) -> Any:
        value = part(cell)
        if value is None:
            return default
        return getattr(value, name)

    return read


def _mean_of(read: Callable[[RunRecord], float | None]) -> Callable[[Cell], float | None]:
    """Return the mean over the runs with a finite loss whose record has the number."""
    return lambda cell: mean(cell.values(read))


def _peak_memory(cell: Cell) -> float | None:
    return max(cell.values(lambda run: run.status.peak_memory_bytes), default=None)


def _averaged_loss(cell: Cell) -> float | None:
    """Return the mean at the best learning rate; None if a run there diverged or has no average."""
    losses: list[float] = []
    for run in cell.runs_at_best:
        loss = run.status.val_loss_ema
        # A mean of the others would flatter a cell in which a seed diverged.
        if loss is None or not math.isfinite(run.loss):
            return None
        losses.append(loss)
    return mean(losses)


def json_rows(table: CellsTable) -> list[Row]:
    """Return the values of each cell: levels, counts, losses in nats/token, costs, comparisons and warnings."""
    columns = columns_of(table, is_text=False)
    return [cell.levels | {column.key: column.value(cell) for column in columns} for cell in table.cells]


# Texts

EMA_NOTE = (
    "val ema: validation loss with the average of the weights (`eval.ema`) at the best lr, mean over seeds; empty if a "
    "seed diverged"
)
PACK_NOTE = "tok/s: of one run; the runs of a pack train together, so a pack of n runs processes n times as many"
FLOPS_NOTE = "TFLOP/s: of one run: tok/s times the model FLOPs per token, 6 N + 12 L T D (PaLM, appendix B)"
MFU_NOTE = "MFU: model FLOP/s of all runs of a pack, as a share of the device's peak in the run's precision"


def table_rows(table: CellsTable, columns: Sequence[str] = ()) -> list[Row]:
    """Return the rows of the table as text: the factors, and some columns, by default those that are not empty.

    Raises:
        ConfigError: A column is unknown.
    """
    known: dict[str, Column[Cell]] = {}
    if table.cells:
        known = {column.title: column for column in columns_of(table, is_text=True)}
    texts = {title: list(map(column.text, table.cells)) for title, column in known.items()}
    shown = [title for title in known if known[title].is_default and any(texts[title])]
    if columns:
        chosen = _choose(columns, [*known, *table.by])
        shown = [title for title in chosen if title not in table.by]
    rows: list[Row] = []
    for index, cell in enumerate(table.cells):
        row: Row = {option: format_setting(value) for option, value in cell.levels.items()}
        for title in shown:
            row[title] = texts[title][index]
        rows.append(row)
    return rows


def _target_text(target: Target) -> str:
    if target.steps is None:
        return f"{target.count} of {target.runs}"
    text = counted(target.steps, "step", ",.0f")
    if target.seconds is not None:
        text += f", {target.seconds:,.1f} s"
    return text


def loss_text(mean: SeedMean) -> str:
    """Return `2.2425 ± 0.0031 (n=3)`, or `1 of 3 diverged, others 2.2420` if a run diverged."""
    if not mean.losses:
        return ""
    if not mean.diverged:
        return f"{format_losses(mean.losses)} (n={design_of(mean.losses)})"
    text = f"{mean.diverged} of {len(mean.losses)} diverged"
    if mean.finite:
        text += f", others {mean.mean_of_others:.4f}"
    return text


def _difference_text(comparison: Comparison) -> str:
    test = comparison.test
    if test is None:
        return ""
    text = f"{test.estimate:+.4f}"
    if test.low is not None:
        text += f" [{test.low:+.4f}, {test.high:+.4f}]"
    if test.test.startswith("signed-rank"):
        return f"{text} (n={test.design} by ranks)"
    return f"{text} (n={test.design})"


# Definitions


def notes(table: CellsTable, shown: Iterable[str] | None = None) -> list[str]:
    """Return the definitions of the shown columns, by default those of `table_rows`, one per line."""
    cells = table.cells
    if shown is None:
        shown = (table_rows(table) or [{}])[0]
    shown = list(shown)
    lines = [
        f"losses: nats/token, mean ± half of its {LEVEL:.0%} interval over n seeds (Student's t); both losses if n=2",
        *_design_notes(cells),
        *table.resolved_differences,
    ]
    if "best lr" in shown or "val loss" in shown:
        lines += _selection_notes(cells)
    if "vs baseline" in shown and any(cell.baseline for cell in cells):
        lines += _comparison_notes(cells)
    for column in columns_of(table, is_text=True):
        if column.note and column.title in shown and any(map(column.text, cells)):
            lines.append(column.note)
    return lines


def _selection_notes(cells: Sequence[Cell]) -> list[str]:
    """Return the note that the best learning rate is selected, if a cell has several."""
    sizes = sorted({len(cell.losses) for cell in cells if cell.losses})
    if not sizes or sizes[-1] == 1:
        return []
    smallest, largest = sizes[0], sizes[-1]
    count = f"{smallest}" if smallest == largest else f"{smallest}-{largest}"
    return [
        f"best lr: the best of {count} learning rates, selected on this same loss, so the loss is optimistic; a "
        "learning rate with a diverged seed is selected only if every learning rate has one"
    ]


def _comparison_notes(cells: Sequence[Cell]) -> list[str]:
    """Return what the comparisons with the baseline are."""
    comparisons = [cell.comparison for cell in cells if cell.comparison]
    methods = [comparison.test.test for comparison in comparisons if comparison.test]
    return [
        "vs baseline: loss minus the loss of the baseline, paired by seed and data order; negative is better. "
        "p: two-sided, of a paired t test, or of an exact signed-rank test if a run of a pair diverged (a diverged "
        f"run ranks worst); corrected by Holm's method for {counted(comparisons[0].tests, 'comparison')}, of all "
        "cells with their baselines",
        *pool_notes(methods),
    ]


def _design_notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes on the variance that the intervals include: initial weights, data order."""
    designs: list[Design] = []
    for cell in cells:
        design = _design(cell)
        if design:
            designs.append(design)
    fixed = {design.fixed for design in designs}
    notes: list[str] = []
    for option, factor in (("data.seed", "data order"), ("seed", "initial weights")):
        if option in fixed:
            notes.append(f"{factor} fixed ({option}): its variance is not in the intervals")
    # The intervals of comparisons may be crossed too.
    for cell in cells:
        design = _test_design(cell)
        if design:
            designs.append(design)
    crossed = [design for design in designs if design.crossed]
    if crossed:
        notes.append(
            "n=a x b: a seeds crossed with b data seeds, two random effects: variance of the mean "
            "(MS_a + MS_b - MS_ab) / (ab), t with min(a, b) - 1 degrees of freedom"
        )
    if not all(design.complete for design in crossed):
        notes.append("n=k of a x b: an incomplete crossing: the variances of both factors are added (conservative)")
    return notes
