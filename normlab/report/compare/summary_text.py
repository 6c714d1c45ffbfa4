"""Summary sentences of a comparison: the best cell, its margin over the second best, and the runs without a loss.

A mean never hides a diverged run: a sentence with a loss also counts diverged seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from normlab.report.against import paired_differences
from normlab.report.cells import UNFINISHED, Cell, RunResult, rank_cells
from normlab.report.compare.comparable import reason_not_comparable
from normlab.report.intervals import LEVEL, PairedTest, design_of, format_losses, mean_interval, paired_test
from normlab.report.settings import format_setting
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.schema import DAMAGED, DIVERGED, FAILED


def best_cell(cells: Sequence[Cell]) -> int | None:
    """Return the index of the best cell, or None for a single cell, without finite losses or if not comparable."""
    order = rank_cells(cells)
    if len(cells) < 2 or not order or not _has_finite_loss(cells[order[0]]) or reason_not_comparable(_results(cells)):
        return None
    return order[0]


def summary_sentences(cells: Sequence[Cell], missing: Sequence[str] = (), by: Sequence[str] = ()) -> list[str]:
    """Return the sentences that open the page.

    Args:
        cells: The compared cells.
        missing: The state of each run that is in no cell: `damaged`, `not started`.
        by: The options that define the cells. Without them, cells are named by their values alone.
    """
    order, best = rank_cells(cells), best_cell(cells)
    if not order:
        sentences = ["No run has a final loss yet: there is nothing to compare."]
    elif best is not None:
        sentences = [_describe_best(cells[best], by), _describe_margin(cells, order, by)]
    else:
        sentences = [_explain_no_best(cells, cells[order[0]], by)]
    return [*sentences, _count_outcomes(cells, missing, by), *_selection_note(cells, best)]


def _name(cell: Cell, by: Sequence[str]) -> str:
    """Return the cell's name, with options (`model.depth=200`) if its values contain no word."""
    if (
        any(isinstance(value, bool | str) and any(map(str.isalpha, format_setting(value))) for value in cell.key)
        or not by
    ):
        return cell.name
    return " ".join(f"{option}={format_setting(value)}" for option, value in zip(by, cell.key, strict=True))


def _describe_best(cell: Cell, by: Sequence[str]) -> str:
    rank = "ranks first, but every cell has diverged seeds" if cell.diverged else "has the lowest validation loss"
    return f"{_name(cell, by)} {rank}: {_loss_text(cell)}, {_lr_text(cell)}."


def _describe_margin(cells: Sequence[Cell], order: Sequence[int], by: Sequence[str]) -> str:
    """Compare the best cell with the second best, paired by seed and data order."""
    if len(order) < 2:
        return "No other cell has a result."
    best, second = cells[order[0]], cells[order[1]]
    name = _name(second, by)
    differences, both_diverged, _ = paired_differences(best, best.best_lr, second, second.best_lr)
    undecided = f"Not significantly better than the second best, {name}"
    if not differences:
        return f"{undecided}: they have no seed in common ({_loss_text(second)})."
    test = paired_test(differences, both_diverged=both_diverged)
    if test.low is None or test.high is None:
        if math.isinf(test.estimate) or (second.diverged and not best.diverged):
            return f"The second best, {name}: {_diverged_text(second)}; n={test.design} is too few for an interval."
        reason = "no interval from one pair" if len(differences) == 1 else "too few for an interval"
        return f"{undecided}: {_difference_text(test)}n={test.design}, {reason}{_diverged_note(second)}."
    name_of_test = "" if test.test == "paired t" else f", {test.test}"
    details = f"({_difference_text(test)}n={test.design}{name_of_test}{_diverged_note(second)})"
    if test.high < 0:
        margin = "Far" if math.isinf(test.estimate) else f"{-test.estimate:.4f} nats/token"
        return f"{margin} below the second best, {name} {details}."
    return f"{undecided}: the {LEVEL:.0%} interval of the difference is not below 0 {details}."


def _difference_text(test: PairedTest) -> str:
    """Return `paired difference -0.1000 [-0.2000, -0.0100], `, without the numbers that a divergence makes infinite."""
    parts = [] if math.isinf(test.estimate) else [f"paired difference {test.estimate:+.4f}"]
    if test.low is not None and test.high is not None and (math.isfinite(test.low) or math.isfinite(test.high)):
        low = f"{test.low:+.4f}" if math.isfinite(test.low) else "no lower bound"
        high = f"{test.high:+.4f}" if math.isfinite(test.high) else "no upper bound"
        parts.append(f"{'' if parts else f'{LEVEL:.0%} interval '}[{low}, {high}]")
    return " ".join(parts) + ", " if parts else ""


def _explain_no_best(cells: Sequence[Cell], first: Cell, by: Sequence[str]) -> str:
    if reason := reason_not_comparable(_results(cells)):
        return f"No best cell: {reason}."
    if not _has_finite_loss(first):
        return "No best cell: every run that has ended diverged."
    return f"{_name(first, by)}: validation loss {_loss_text(first)}, {_lr_text(first)}; no other cell to compare with."


def _count_outcomes(cells: Sequence[Cell], missing: Sequence[str], by: Sequence[str]) -> str:
    """Count the runs that diverged, failed, are stuck, regressed, or have not finished, by cell."""
    total = sum(len(cell.runs) for cell in cells) + len(missing)
    outcomes = {
        "diverged": DIVERGED, "failed": FAILED, "stuck at the unigram entropy": STUCK, "regressed": REGRESSED,
        "damaged": DAMAGED, "not finished": UNFINISHED,
    }  # fmt: skip
    counts = {text: {_name(cell, by): cell.count(outcome) for cell in cells} for text, outcome in outcomes.items()}
    parts = []
    for text, by_name in {**counts, "in no cell": Counter(missing)}.items():
        if number := sum(by_name.values()):
            names = ", ".join(f"{name} ({count})" for name, count in by_name.items() if count)
            parts.append(f"{number} {text}: {names}")
    runs = "1 run" if total == 1 else f"{total} runs"
    return f"Of {runs}, {'; '.join(parts)}." if parts else f"{'' if total == 1 else 'All '}{runs} finished."


def _selection_note(cells: Sequence[Cell], best: int | None) -> list[str]:
    """Warn that a value selected on the reported loss is optimistic."""
    rates = [len(cell.losses) for cell in cells if cell.losses]
    selected = ["each cell's learning rate"] if max(rates, default=0) > 1 else []
    if best is not None and len(rates) > 2:
        selected.append(f"the best of {len(rates)} cells")
    if not selected:
        return []
    verb, loss = ("is", "its loss is") if len(selected) == 1 else ("are", "their losses are")
    return [f"Note: {' and '.join(selected)} {verb} selected on this same loss, so {loss} optimistic."]


def _has_finite_loss(cell: Cell) -> bool:
    return any(map(math.isfinite, cell.best_losses.values()))


def _results(cells: Sequence[Cell]) -> list[RunResult]:
    return [run for cell in cells for run in cell.runs if run.has_loss]


def _loss_text(cell: Cell) -> str:
    """Return `1.8321 ± 0.0102 nats/token (95% interval, n=3)`, or the number of diverged seeds."""
    losses = cell.best_losses
    if cell.diverged:
        finite = {replicate: loss for replicate, loss in losses.items() if math.isfinite(loss)}
        others = f"; mean of the others {mean_interval(finite).estimate:.4f} nats/token" if finite else ""
        return _diverged_text(cell) + others
    interval = "" if len(losses) < 3 else f"{LEVEL:.0%} interval, "
    none = ", no interval" if len(losses) == 1 else ""
    return f"{format_losses(losses)} nats/token ({interval}n={design_of(losses)}{none})"


def _lr_text(cell: Cell) -> str:
    rate = "" if cell.best_lr is None else f"{cell.best_lr:g}"
    return f"at its best learning rate {rate} (of {len(cell.losses)})" if len(cell.losses) > 1 else f"at lr {rate}"


def _diverged_text(cell: Cell) -> str:
    n = len(cell.best_losses)
    return f"{cell.diverged} of {n} {'seed' if n == 1 else 'seeds'} diverged"


def _diverged_note(cell: Cell) -> str:
    return f"; {_diverged_text(cell)} there" if cell.diverged else ""
