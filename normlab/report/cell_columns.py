"""The columns of the table of cells: their values, formats and definitions."""

import math
from collections.abc import Callable
from typing import Any

from normlab.analysis.best import Comparison
from normlab.analysis.cells import Cell, SeedMean, Target, mean, runs_of
from normlab.analysis.columns import Column, format_p
from normlab.analysis.intervals import Design, Interval, design_of, format_losses
from normlab.analysis.paired_tests import PairedTest
from normlab.analysis.settings import format_setting
from normlab.analysis.table import CellsTable
from normlab.base.errors import counted
from normlab.store.format import FINISHED
from normlab.store.outcome import DESCRIPTIONS, format_loss
from normlab.store.record import RESULTS, RunRecord
from normlab.store.throughput import format_mfu, format_tflops

EMA_NOTE = (
    "val ema: validation loss with the average of the weights (`eval.ema`) at the best lr, mean over seeds; empty if a "
    "seed diverged"
)
PACK_NOTE = "tok/s: of one run; a pack of n runs processes n times as many; other packs at the same time slow it down"
FLOPS_NOTE = "TFLOP/s: of one run: tok/s times the model FLOPs per token, 6 N + 12 L T D (PaLM, appendix B)"
MFU_NOTE = "MFU: model FLOP/s of all runs of a pack, as a share of the device's peak in the run's precision"


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
        Column("seeds_crossed", _field(design_of_cell, "crossing")),
        Column("seeds_fixed", _field(design_of_cell, "fixed")),
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
        Column("pairs", _field(design_of_test, "n", default=0)),
        Column("pairs_crossed", _field(design_of_test, "crossing")),
        Column("test", _field(_test, "test")),
    ]


# Values of columns


def _interval(cell: Cell) -> Interval | None:
    return cell.final.interval


def design_of_cell(cell: Cell) -> Design | None:
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


def design_of_test(cell: Cell) -> Design | None:
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


# Texts


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
