"""The summary of a comparison, printed and on the page: the best cell of each size, its margin, and all outcomes.

Cells of different sizes or lengths of training are not compared: a larger model has a lower loss. A sentence with the
loss of a cell also counts the cell's diverged seeds.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from normlab.analysis.best import Comparison, compare_with_best, rank_by_size
from normlab.analysis.cells import Cell, reason_cells_not_comparable, resolved_differences
from normlab.analysis.comparability import reason_not_comparable
from normlab.analysis.factor_tests.rate_tests import Range, Sensitivity
from normlab.analysis.intervals import LEVEL, PairedTest, design_of, format_losses
from normlab.analysis.phrases import name_some
from normlab.analysis.rate_range import HIGHEST, NEAR, SENSITIVITY
from normlab.analysis.settings import format_setting
from normlab.base.errors import counted
from normlab.store.format import DAMAGED, DIVERGED, FAILED
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.record import UNFINISHED

NO_RESULT = "No run has a final loss yet: there is nothing to compare."
BAD_STATES = {state: state for state in (DIVERGED, FAILED, STUCK, REGRESSED, DAMAGED)} | {"not finished": UNFINISHED}
"""The states of runs that the summary counts, by their names in text."""


class Fact(NamedTuple):
    """A sentence of the summary, and how the page shows it."""

    sentence: str
    name: str = ""
    strong: str = ""
    """The name of a best cell, which the page shows large before the text."""
    text: str = ""
    """The text of the page, if it is not the sentence."""
    badges: Sequence[tuple[str, str]] = ()
    """Words in front of the text, each with a kind: yes, no or bad."""
    table: Sequence[Sequence[str]] = ()
    """The rows of a table that the page shows in place of the sentence; the first is the head."""


def not_comparable(cells: Sequence[Cell]) -> str:
    """Return the sentence that says why the cells have no best one, or an empty text."""
    runs = [run for cell in cells for run in cell.runs if run.has_loss]
    reason = reason_not_comparable([runs], cells[0].by if cells else ())
    return reason and f"No best cell: {reason}."


def margin_text(worse: Cell, compared: Comparison) -> str:
    """Return how much better the best cell is than the second best, `worse`, or why that is not sure."""
    name, test, p = worse.label, compared.test, compared.p_holm
    undecided = f"Not significantly better than the second best, {name}"
    if test is None:
        return f"{undecided}: the two cells have no seed in common ({loss_text(worse)})."
    diverged = f"; {_diverged_text(worse)} in {name}" if worse.final.diverged else ""
    if test.low is None or test.high is None or p is None:
        few = f"n={test.design} is too few for an interval"
        if worse.final.diverged:
            return f"The second best is {name}: {_diverged_text(worse)}; {few}."
        return f"{undecided}: {_difference_text(test)}{few}."
    corrected = ""
    if compared.tests > 1:
        corrected = f" corrected for {compared.tests} comparisons: each cell with the best cell of its size"
    name_of_test = "" if test.test == "paired t" else f", {test.test}"
    details = f"({_difference_text(test)}n={test.design}{name_of_test}, p = {p:.2g}{corrected}{diverged})"
    if compared.is_lower:
        margin = "far" if math.isinf(test.estimate) else f"{-test.estimate:.4f} nats/token"
        return f"The loss is {margin} below that of the second best, {name} {details}."
    return f"{undecided} {details}."


def summary_facts(cells: Sequence[Cell], missing: Sequence[str] = ()) -> list[Fact]:
    """Return the facts of the summary; `missing` has the state of each run that is in no cell, such as `damaged`."""
    sizes = rank_by_size(cells)
    if not sizes:
        facts = [Fact(NO_RESULT, strong=NO_RESULT, text=" ")]
    elif reason := not_comparable(cells):
        facts = [Fact(reason, strong=reason, text=" ")]
    else:
        with_best = {size: ranked for size, ranked in sizes.items() if _has_best(cells, ranked)}
        margins = compare_with_best(cells, with_best)
        facts = [fact for size, ranked in sizes.items() for fact in _best_of_size(cells, size, ranked, margins)]
    if not not_comparable(cells):
        facts += _learning_rates(cells)
    facts += [Fact(f"{line[0].upper()}{line[1:]}.", "also differs") for line in resolved_differences(cells)]
    return [*facts, _count_outcomes(cells, missing), *map(Fact, _selection_note(cells))]


def _has_best(cells: Sequence[Cell], ranked: Sequence[int]) -> bool:
    """Whether the first of the ranked cells is the best one: they are comparable, and it has no bad outcome."""
    is_comparable = not reason_cells_not_comparable([cells[index] for index in ranked])
    return is_comparable and not cells[ranked[0]].has_bad_outcome


def _best_of_size(
    cells: Sequence[Cell], size: str, ranked: Sequence[int], margins: Mapping[str, Sequence[Comparison]]
) -> Iterator[Fact]:
    at = f" at {size}" if size else ""
    cell, result = cells[ranked[0]], f"validation loss {loss_text(cells[ranked[0]])}, {lr_text(cells[ranked[0]])}"
    if len(ranked) == 1 and (size or len(cells) == 1):
        text = f"{result}; no other cell to compare with."
        yield Fact(f"{cell.label}: {text}", size, cell.label, text)
    elif reason := reason_cells_not_comparable([cells[index] for index in ranked]):
        yield Fact(f"No best cell{at}: {reason}.", size)
    elif cell.has_bad_outcome:
        yield Fact(f"No best cell{at}: in every cell with a result, a run diverged, is stuck or regressed.", size)
    else:
        name, strong = (f"Best at {size}", cell.arm) if size else ("Best", cell.label)
        yield Fact(f"{name}: {strong}: {result}.", name.lower(), strong, f"{result}.")
        if len(ranked) > 1:
            margin = margins[size][0]
            badge = ("significant", "yes") if margin.is_lower else ("not significant", "no")
            yield Fact(margin_text(cells[ranked[1]], margin), "by how much", badges=[badge])
        else:
            yield Fact("No other cell has a result.")


def _learning_rates(cells: Sequence[Cell]) -> Iterator[Fact]:
    """Yield the sensitivity to the learning rate and the highest one that trains, if several cells have a grid.

    Every cell has the numbers that `normlab summarize --test sensitivity` and `range` print.
    """
    test_of_highest, test_of_s = Range(), Sensitivity()
    highest = test_of_highest.of_cells(cells, HIGHEST)
    sensitivities = test_of_s.of_cells(cells, SENSITIVITY)
    if len(highest) < 2:
        return
    table, texts = [("cell", SENSITIVITY.title, HIGHEST.title)], []
    for (cell, highest_row), (_, s_row) in zip(highest, sensitivities, strict=True):
        gaps = ", with gaps below" if highest_row["gaps"] else ""
        interval = test_of_highest.estimate_text(highest_row) + gaps
        number = test_of_highest.number_text(highest_row) + gaps
        table.append((cell.label, test_of_s.estimate_text(s_row), interval))
        texts.append(f"{cell.label} {test_of_s.number_text(s_row)}, {number}")
    text = f"S in nats/token, and the highest learning rate within {NEAR} nats/token of the lowest loss"
    source = "The tests `sensitivity` and `range` of `normlab summarize` compare them."
    yield Fact(f"{text}: {'; '.join(texts)}. {source}", "learning rates", text=f"{text}. {source}", table=table)


def _difference_text(test: PairedTest) -> str:
    """Return `paired difference -0.1000 [-0.2000, -0.0100], `, without infinite numbers."""
    parts = [] if math.isinf(test.estimate) else [f"paired difference {test.estimate:+.4f}"]
    if test.low is not None and test.high is not None and (math.isfinite(test.low) or math.isfinite(test.high)):
        low = f"{test.low:+.4f}" if math.isfinite(test.low) else "no lower bound"
        high = f"{test.high:+.4f}" if math.isfinite(test.high) else "no upper bound"
        parts.append(f"{'' if parts else f'{LEVEL:.0%} interval '}[{low}, {high}]")
    return " ".join(parts) + ", " if parts else ""


def _count_outcomes(cells: Sequence[Cell], missing: Sequence[str]) -> Fact:
    """Return the number of runs in each state other than finished, by cell."""
    total = sum(len(cell.runs) for cell in cells) + len(missing)
    counts = {text: {cell.label: cell.count(state) for cell in cells} for text, state in BAD_STATES.items()}
    parts, badges = [], []
    for text, by_name in {**counts, "in no cell": Counter(missing)}.items():
        if number := sum(by_name.values()):
            names = name_some([f"{name} ({count})" for name, count in by_name.items() if count])
            parts.append(f"{number} {text}: {names}")
            badges.append((f"{number} {text}", "bad" if text in counts and text != "not finished" else "no"))
    runs = counted(total, "run")
    sentence = f"Of {runs}, {'. '.join(parts)}." if parts else f"{'' if total == 1 else 'All '}{runs} finished."
    return Fact(sentence, "outcomes", badges=badges)


def _selection_note(cells: Sequence[Cell]) -> list[str]:
    """Return the note that a loss is optimistic if it was also used for a selection."""
    sizes = [len(ranked) for ranked in rank_by_size(cells).values() if _has_best(cells, ranked)]
    rates = [len(cell.losses) for cell in cells if cell.losses]
    selected = ["each cell's learning rate"] if max(rates, default=0) > 1 else []
    if max(sizes, default=0) > 2 and not not_comparable(cells):
        up_to = "up to " if len({*sizes}) > 1 else ""
        selected.append(f"the best of {up_to}{max(sizes)} cells")
    if not selected:
        return []
    verb, loss = ("is", "its loss is") if len(selected) == 1 else ("are", "their losses are")
    return [f"Note: {' and '.join(selected)} {verb} selected on this same loss, so {loss} optimistic."]


def loss_text(cell: Cell) -> str:
    """Return `1.8321 ± 0.0102 nats/token (95% interval, n=3)`, or the number of diverged seeds."""
    final = cell.final
    n = len(final.losses)
    if not n:
        return "no final loss"
    if final.diverged:
        others = f"; mean of the others {final.mean_of_others:.4f} nats/token" if final.finite else ""
        return _diverged_text(cell) + others
    interval = "" if n < 3 else f"{LEVEL:.0%} interval, "
    none = ", no interval" if n == 1 else ""
    return f"{format_losses(final.losses)} nats/token ({interval}n={design_of(final.losses)}{none})"


def lr_text(cell: Cell) -> str:
    """Return `at learning rate 0.001, the best of 3`."""
    rate = "" if cell.best_lr is None else format_setting(cell.best_lr)
    return f"at learning rate {rate}" + (f", the best of {len(cell.losses)}" if len(cell.losses) > 1 else "")


def _diverged_text(cell: Cell) -> str:
    return f"{cell.final.diverged} of {counted(len(cell.final.losses), 'seed')} diverged"
