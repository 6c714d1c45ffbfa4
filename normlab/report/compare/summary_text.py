"""Summary sentences of a comparison: the best cell, its margin over the second best, and the outcomes of all runs.

A sentence with the loss of a cell also counts the cell's diverged seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from normlab.report.cells import Cell, rank_cells
from normlab.report.contrasts import compare_cells
from normlab.report.intervals import LEVEL, PairedTest, design_of, format_losses, mean_interval
from normlab.report.results import UNFINISHED, reason_not_comparable
from normlab.report.settings import format_setting
from normlab.report.tables import counted
from normlab.store.format import DAMAGED, DIVERGED, FAILED
from normlab.store.outcome import REGRESSED, STUCK


def best_cell(cells: Sequence[Cell]) -> int | None:
    """Return the index of the best cell, or None.

    There is no best cell if the losses are not comparable, or if every cell has a run that diverged, is stuck or
    regressed.
    """
    order = rank_cells(cells)
    if len(cells) < 2 or not order or cells[order[0]].has_bad_outcome or _reason_not_comparable(cells):
        return None
    return order[0]


def summary_sentences(cells: Sequence[Cell], missing: Sequence[str] = (), by: Sequence[str] = ()) -> list[str]:
    """Return the sentences that open the page.

    Args:
        cells: The compared cells.
        missing: The state of each run that is in no cell, such as `damaged` or `not started`.
        by: The options that define the cells; without `by`, the name of a cell has values only.
    """
    order, best = rank_cells(cells), best_cell(cells)
    if not order:
        sentences = ["No run has a final loss yet: there is nothing to compare."]
    elif best is not None:
        sentences = [_describe_best(cells, best, by), _describe_margin(cells, order, by)]
    elif reason := _reason_not_comparable(cells):
        sentences = [f"No best cell: {reason}."]
    elif len(cells) > 1:
        sentences = ["No best cell: in every cell with a result, a run diverged, is stuck or regressed."]
    else:
        loss = f"validation loss {_loss_text(cells[0])}, {_lr_text(cells[0])}"
        sentences = [f"{_name(cells[0], by)}: {loss}; no other cell to compare with."]
    return [*sentences, _count_outcomes(cells, missing, by), *_selection_note(cells, best)]


def _name(cell: Cell, by: Sequence[str]) -> str:
    """Return the cell's name, with options (`model.depth=200`) if its values are only numbers."""
    texts = [format_setting(value) for value in cell.key]
    has_word = any(isinstance(value, bool | str) and any(map(str.isalpha, str(value))) for value in cell.key)
    if has_word or not by:
        return cell.name
    return " ".join(f"{option}={text}" for option, text in zip(by, texts, strict=True))


def _describe_best(cells: Sequence[Cell], best: int, by: Sequence[str]) -> str:
    lowest = min((cell for cell in cells if cell.losses), key=lambda cell: mean_interval(cell.final_losses).estimate)
    among = "" if lowest is cells[best] else " of the cells in which no run diverged, is stuck or regressed"
    cell = cells[best]
    return f"{_name(cell, by)} has the lowest validation loss{among}: {_loss_text(cell)}, {_lr_text(cell)}."


def _describe_margin(cells: Sequence[Cell], order: Sequence[int], by: Sequence[str]) -> str:
    """Compare the best cell with the second best, paired by seed and data order."""
    if len(order) < 2:
        return "No other cell has a result."
    best, second = cells[order[0]], cells[order[1]]
    name = _name(second, by)
    test = compare_cells(best, best.best_lr, second, second.best_lr)
    undecided = f"{_name(best, by)} is not significantly better than the second best, {name}"
    if test is None:
        return f"{undecided}: the two cells have no seed in common ({_loss_text(second)})."
    diverged = f"; {_diverged_text(second)} in {name}" if second.diverged else ""
    if test.low is None or test.high is None:
        if second.diverged:
            return f"The second best is {name}: {_diverged_text(second)}; n={test.design} is too few for an interval."
        return f"{undecided}: {_difference_text(test)}n={test.design} is too few for an interval."
    name_of_test = "" if test.test == "paired t" else f", {test.test}"
    details = f"({_difference_text(test)}n={test.design}{name_of_test}{diverged})"
    if test.high < 0:
        margin = "far" if math.isinf(test.estimate) else f"{-test.estimate:.4f} nats/token"
        return f"The loss is {margin} below that of the second best, {name} {details}."
    return f"{undecided}: the {LEVEL:.0%} interval of the difference is not entirely below 0 {details}."


def _difference_text(test: PairedTest) -> str:
    """Return `paired difference -0.1000 [-0.2000, -0.0100], `, without infinite numbers."""
    parts = [] if math.isinf(test.estimate) else [f"paired difference {test.estimate:+.4f}"]
    if test.low is not None and test.high is not None and (math.isfinite(test.low) or math.isfinite(test.high)):
        low = f"{test.low:+.4f}" if math.isfinite(test.low) else "no lower bound"
        high = f"{test.high:+.4f}" if math.isfinite(test.high) else "no upper bound"
        parts.append(f"{'' if parts else f'{LEVEL:.0%} interval '}[{low}, {high}]")
    return " ".join(parts) + ", " if parts else ""


def _count_outcomes(cells: Sequence[Cell], missing: Sequence[str], by: Sequence[str]) -> str:
    """Return the number of runs in each state other than finished, by cell."""
    total = sum(len(cell.runs) for cell in cells) + len(missing)
    outcomes = {state: state for state in (DIVERGED, FAILED, STUCK, REGRESSED, DAMAGED)} | {"not finished": UNFINISHED}
    counts = {text: {_name(cell, by): cell.count(outcome) for cell in cells} for text, outcome in outcomes.items()}
    parts = []
    for text, by_name in {**counts, "in no cell": Counter(missing)}.items():
        if number := sum(by_name.values()):
            names = ", ".join(f"{name} ({count})" for name, count in by_name.items() if count)
            parts.append(f"{number} {text}: {names}")
    runs = counted(total, "run")
    return f"Of {runs}, {'; '.join(parts)}." if parts else f"{'' if total == 1 else 'All '}{runs} finished."


def _selection_note(cells: Sequence[Cell], best: int | None) -> list[str]:
    """Return the note that a loss is optimistic if it was also used for a selection."""
    rates = [len(cell.losses) for cell in cells if cell.losses]
    selected = ["each cell's learning rate"] if max(rates, default=0) > 1 else []
    if best is not None and len(rates) > 2:
        selected.append(f"the best of {len(rates)} cells")
    if not selected:
        return []
    verb, loss = ("is", "its loss is") if len(selected) == 1 else ("are", "their losses are")
    return [f"Note: {' and '.join(selected)} {verb} selected on this same loss, so {loss} optimistic."]


def _reason_not_comparable(cells: Sequence[Cell]) -> str:
    return reason_not_comparable([run for cell in cells for run in cell.runs if run.has_loss])


def _loss_text(cell: Cell) -> str:
    """Return `1.8321 ± 0.0102 nats/token (95% interval, n=3)`, or the number of diverged seeds."""
    losses = cell.final_losses
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
    return f"{cell.diverged} of {counted(len(cell.final_losses), 'seed')} diverged"
