"""The table of `normlab summarize`: the cells of a sweep.

JSON and CSV have every value, not rounded. A text has few columns (`columns_of`), each with its definition below.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from normlab.analysis.best import Comparison
from normlab.analysis.cells import Cell, SeedMean, Target, mean
from normlab.analysis.contrasts import MIN_P_EQUAL, POOLED
from normlab.analysis.factors import level_title, option_name
from normlab.analysis.intervals import LEVEL, PairedTest, design_of, format_losses
from normlab.analysis.settings import format_setting
from normlab.analysis.table import CellsTable
from normlab.base.errors import ConfigError, counted, printable, unknown
from normlab.report.tables import Row, escape_markdown, fold_lines, format_p, render, terminal_width
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
        rows = json_rows(table)
        if columns:
            keys = dict.fromkeys([*table.by, *_choose(columns, rows[0] if rows else ())])
            rows = [{key: row[key] for key in keys} for row in rows]
        return render(rows, format)
    rows = table_rows(table, columns)
    lines = notes(table, rows[0] if rows else ())
    if format == "latex":
        rows = [_with_titles(row, cell) for row, cell in zip(rows, table.cells, strict=True)]
    return add_notes(render(rows, format, fixed=table.by), lines, format)


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


def _choose(columns: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the columns with these names, in which spaces, underscores and case do not matter."""
    known = list(known)
    by_name = {_plain(key): key for key in known}
    for name in columns:
        if _plain(name) not in by_name:
            raise ConfigError("--columns: " + unknown("column", name, known))
    return [by_name[_plain(name)] for name in columns]


def _plain(name: str) -> str:
    return name.lower().replace(" ", "_")


# Columns


class Column(NamedTuple):
    """A column of the table of cells: in JSON and CSV by its key, in a text by its title."""

    key: str
    value: Callable[[Cell], Any]
    """The value in JSON and CSV."""
    title: str = ""
    """Empty if a text has no such column."""
    format: Callable[[Any], str] = str
    note: str = ""
    """The definition below a text, if the column needs one."""
    shown: Callable[[Cell], Any] | None = None
    """What `format` receives, if that is not `value`; None is an empty text."""
    is_default: bool = True
    """Whether a text has it without a request, if a text is not empty."""

    def text(self, cell: Cell) -> str:
        value = (self.shown or self.value)(cell)
        return "" if value is None else self.format(value)


def columns_of(table: CellsTable, *, is_text: bool) -> list[Column]:
    """Return the columns of a text, or of JSON and CSV, in their order."""
    target = table.cells[0].target if table.cells else None
    packed = max((run.status.pack_size for cell in table.cells for run in cell.runs), default=1) > 1
    cells = [
        Column("cell", lambda cell: cell.name),
        Column("runs", lambda cell: len(cell.runs), "runs"),
        *map(_count, RESULTS),
        Column("lr", lambda cell: cell.best_lr, "best lr", format_setting),
        Column("seeds", lambda cell: len(cell.final.losses)),
        Column("seeds_diverged", lambda cell: cell.final.diverged),
        Column("seeds_crossed", lambda cell: cell.final.interval and cell.final.interval.design.crossing),
        Column("seeds_fixed", lambda cell: cell.final.interval and cell.final.interval.design.fixed),
        Column("val_loss", _loss("estimate"), "val loss", loss_text, shown=lambda cell: cell.final),
        Column("val_loss_low", _loss("low")),
        Column("val_loss_high", _loss("high")),
        Column("val_loss_of_others", lambda cell: cell.final.mean_of_others),
        Column("val_loss_ema", _averaged_loss, "val ema", format_loss, EMA_NOTE),
    ]
    rates = [
        Column("learning_rates", lambda cell: list(cell.losses)),
        Column("loss_at_start", lambda cell: cell.loss_at_start),
        Column("bad_lrs", lambda cell: sorted(cell.bad_lrs)),
    ]
    costs = [
        Column("tokens_per_s", _mean_of(lambda run: run.status.tokens_per_s), "tok/s", "{:,.0f}".format,
               PACK_NOTE if packed else ""),
        Column("flops_per_token", _mean_of(lambda run: run.compute.flops_per_token)),
        Column("flops_per_s", _mean_of(lambda run: run.flops_per_s), "TFLOP/s", format_tflops, FLOPS_NOTE,
               is_default=False),
        Column("mfu", _mean_of(lambda run: run.mfu), "MFU", format_mfu, MFU_NOTE),
        Column("peak_memory_bytes",
               lambda cell: max(cell.values(lambda run: run.status.peak_memory_bytes), default=None)),
    ]  # fmt: skip
    to_target = _target_columns(f"to {target.loss:g}") if target else []
    baseline = _baseline_columns() if table.has_baseline else []
    if is_text:
        return [column for column in [*cells, *baseline, *rates, *to_target, *costs] if column.title]
    differences = table.resolved_differences
    lists = [
        Column("run_ids", lambda cell: [run.run_id for run in cell.runs]),
        Column("warnings", lambda cell: cell.warnings),
    ]
    last = Column("resolved_differences", lambda _: differences)
    return [*cells, *rates, *costs, *to_target, *lists, *baseline, last]


def _count(result: str) -> Column:
    note = f"{result}: {DESCRIPTIONS[result]}" if result in DESCRIPTIONS else ""
    title = "" if result == FINISHED else result
    return Column(
        result, lambda cell: cell.count(result), title, note=note, shown=lambda cell: cell.count(result) or None
    )


def _target_columns(title: str) -> list[Column]:
    def column(key: str, value: Callable[[Target], Any], title: str = "") -> Column:
        note = f"{title}: {TARGET_NOTE}"
        return Column(
            key, lambda cell: cell.target and value(cell.target), title, _target_text, note, lambda cell: cell.target
        )

    return [
        column("target", lambda target: target.loss),
        column("target_runs", lambda target: target.runs),
        column("target_reached", lambda target: len(target.reached)),
        column("steps_to_target", lambda target: target.steps, title),
        column("seconds_to_target", lambda target: target.seconds),
    ]


def _baseline_columns() -> list[Column]:
    return [
        Column("baseline", lambda cell: cell.baseline and cell.baseline.name),
        Column("difference", _tested("estimate"), "vs baseline", _difference_text, shown=lambda cell: cell.comparison),
        Column("difference_low", _tested("low")),
        Column("difference_high", _tested("high")),
        Column("p", _tested("p")),
        Column("p_holm", lambda cell: cell.comparison and cell.comparison.p_holm, "p (Holm)", format_p),
        Column("pairs", lambda cell: test.design.n if (test := _test(cell)) else 0),
        Column("pairs_crossed", lambda cell: (test := _test(cell)) and test.design.crossing),
        Column("test", _tested("test")),
    ]


def _test(cell: Cell) -> PairedTest | None:
    return cell.comparison and cell.comparison.test


def _tested(name: str) -> Callable[[Cell], Any]:
    return lambda cell: (test := _test(cell)) and getattr(test, name)


def _loss(name: str) -> Callable[[Cell], Any]:
    return lambda cell: cell.final.interval and getattr(cell.final.interval, name)


def _mean_of(read: Callable[[RunRecord], float | None]) -> Callable[[Cell], float | None]:
    """Return the mean over the runs with a finite loss whose record has the number."""
    return lambda cell: mean(cell.values(read))


def _averaged_loss(cell: Cell) -> float | None:
    """Return the mean at the best learning rate; None if a run there diverged or has no average."""
    losses = [run.status.val_loss_ema if math.isfinite(run.loss) else None for run in cell.runs_at_best]
    return None if None in losses else mean([loss for loss in losses if loss is not None])


def json_rows(table: CellsTable) -> list[Row]:
    """Return the values of each cell: levels, counts, losses in nats/token, costs, comparisons and warnings."""
    columns = columns_of(table, is_text=False)
    return [cell.levels | {column.key: column.value(cell) for column in columns} for cell in table.cells]


# Texts

EMA_NOTE = (
    "val ema: validation loss with the average of the weights (`eval.ema`) at the best lr, mean over seeds; empty if a "
    "seed diverged"
)
TARGET_NOTE = "steps and training time until an evaluation reaches this loss, at the best lr, mean over seeds"
PACK_NOTE = "tok/s: of one run; the runs of a pack train together, so a pack of n runs processes n times as many"
FLOPS_NOTE = "TFLOP/s: of one run: tok/s times the model FLOPs per token, 6 N + 12 L T D (PaLM, appendix B)"
MFU_NOTE = "MFU: model FLOP/s of all runs of a pack, as a share of the device's peak in the run's precision"


def table_rows(table: CellsTable, columns: Sequence[str] = ()) -> list[Row]:
    """Return the rows of the table as text: the factors, and some columns, by default those that are not empty.

    Raises:
        ConfigError: A column is unknown.
    """
    known = {column.title: column for column in columns_of(table, is_text=True)} if table.cells else {}
    texts = {title: list(map(column.text, table.cells)) for title, column in known.items()}
    shown = [title for title in known if known[title].is_default and any(texts[title])]
    if columns:
        shown = [title for title in _choose(columns, [*known, *table.by]) if title not in table.by]
    return [
        {option: format_setting(value) for option, value in cell.levels.items()}
        | {title: texts[title][index] for title in shown}
        for index, cell in enumerate(table.cells)
    ]


def _target_text(target: Target) -> str:
    if target.steps is None:
        return f"{len(target.reached)} of {target.runs}"
    return counted(target.steps, "step", ",.0f") + ("" if target.seconds is None else f", {target.seconds:,.1f} s")


def loss_text(mean: SeedMean) -> str:
    """Return `2.2425 ± 0.0031 (n=3)`, or `1 of 3 diverged, others 2.2420` if a run diverged."""
    if mean.diverged:
        others = f", others {mean.mean_of_others:.4f}" if mean.finite else ""
        return f"{mean.diverged} of {len(mean.losses)} diverged{others}"
    return f"{format_losses(mean.losses)} (n={design_of(mean.losses)})" if mean.losses else ""


def _difference_text(comparison: Comparison) -> str:
    test = comparison.test
    if test is None:
        return ""
    interval = "" if test.low is None else f" [{test.low:+.4f}, {test.high:+.4f}]"
    ranks = " by ranks" if test.test.startswith("signed-rank") else ""
    return f"{test.estimate:+.4f}{interval} (n={test.design}{ranks})"


# Definitions


def notes(table: CellsTable, shown: Iterable[str] | None = None) -> list[str]:
    """Return the definitions of the shown columns, by default those of `table_rows`, one per line."""
    cells = table.cells
    shown = list((table_rows(table) or [{}])[0] if shown is None else shown)
    grid = sorted({len(cell.losses) for cell in table.cells if cell.losses})
    lines = [
        f"losses: nats/token, mean ± half of its {LEVEL:.0%} interval over n seeds (Student's t); both losses if n=2",
        *_design_notes(cells),
        *table.resolved_differences,
    ]
    if grid and grid[-1] > 1 and {"best lr", "val loss"} & {*shown}:
        k = "-".join(map(str, dict.fromkeys((grid[0], grid[-1]))))
        lines.append(
            f"best lr: the best of {k} learning rates, selected on this same loss, so the loss is optimistic; a "
            "learning rate with a diverged seed is selected only if every learning rate has one"
        )
    comparisons = [cell.comparison for cell in cells if cell.comparison]
    if "vs baseline" in shown and any(cell.baseline for cell in cells):
        lines.append(
            "vs baseline: loss minus the loss of the baseline, paired by seed and data order; negative is better. "
            "p: two-sided, of a paired t test, or of an exact signed-rank test if a run of a pair diverged (a diverged "
            f"run ranks worst); corrected by Holm's method for {counted(comparisons[0].tests, 'comparison')}, of all "
            "cells with their baselines"
        )
        lines += pool_notes(each.test.test for each in comparisons if each.test)
    defined = [
        column for column in columns_of(table, is_text=True) if column.title in shown and any(map(column.text, cells))
    ]
    return [*lines, *(column.note for column in defined if column.note)]


def pool_notes(methods: Iterable[str]) -> list[str]:
    if not any(method.startswith(POOLED) for method in methods):
        return []
    return [
        "pooled t: the residual variance, after the means of cells and seeds, is pooled over the cells without a bad "
        f"outcome, because Bartlett's test does not find it to differ (p >= {MIN_P_EQUAL:g}), as it seldom does with "
        "few seeds"
    ]


def _design_notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes on the variance that the intervals include: initial weights, data order."""
    designs = [cell.final.interval.design for cell in cells if cell.final.interval]
    fixed = {design.fixed for design in designs}
    designs += [each.comparison.test.design for each in cells if each.comparison and each.comparison.test]
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
