"""The summary of a comparison, printed and on the page: the best cell of each size, its margin, and all outcomes.

Cells of different sizes or lengths of training are not compared: a larger model has a lower loss. A sentence with the
loss of a cell also counts the cell's diverged seeds.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from normlab.analysis.best import Comparison, compare_with_best, rank_by_size
from normlab.analysis.cell_differences import resolved_differences
from normlab.analysis.cells import Cell, reason_cells_not_comparable
from normlab.analysis.comparability import reason_not_comparable
from normlab.analysis.factor_tests.rate_tests import RateRange, Sensitivity
from normlab.analysis.intervals import LEVEL, design_of, format_losses
from normlab.analysis.paired_tests import PairedTest
from normlab.analysis.phrases import name_some
from normlab.analysis.rate_range import HIGHEST, NEAR, SENSITIVITY
from normlab.analysis.settings import format_setting
from normlab.base.errors import counted
from normlab.store.format import DAMAGED, DIVERGED, FAILED
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.record import UNFINISHED, RunRecord

NO_RESULT = "No run has a final loss yet: there is nothing to compare."
BAD_STATES = {
    DIVERGED: DIVERGED, FAILED: FAILED, STUCK: STUCK, REGRESSED: REGRESSED, DAMAGED: DAMAGED,
    "not finished": UNFINISHED,
}  # fmt: skip
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
    if not cells:
        return ""
    completed: list[RunRecord] = []
    for cell in cells:
        completed += cell.completed
    reason = reason_not_comparable([completed], cells[0].by)
    if not reason:
        return ""
    return f"No best cell: {reason}."


def margin_text(worse: Cell, compared: Comparison) -> str:
    """Return how much better the best cell is than the second best, `worse`, or why that is not sure."""
    name, test, p = worse.label, compared.test, compared.p_holm
    undecided = f"Not significantly better than the second best, {name}"
    if test is None:
        return f"{undecided}: the two cells have no seed in common ({loss_text(worse)})."
    # Ranks of fewer than six pairs have no interval, and neither has one pair.
    if test.low is None or test.high is None or p is None:
        few = f"n={test.design} is too few for an interval"
        if worse.final.diverged:
            return f"The second best is {name}: {_diverged_text(worse)}; {few}."
        return f"{undecided}: {_difference_text(test)}{few}."
    details = f"{_difference_text(test)}n={test.design}"
    if test.test != "paired t":
        details += f", {test.test}"
    details += f", p = {p:.2g}"
    if compared.tests > 1:
        details += f" corrected for {compared.tests} comparisons: each cell with the best cell of its size"
    if worse.final.diverged:
        details += f"; {_diverged_text(worse)} in {name}"
    # A cell ranks behind one with a higher mean if some of its runs have not learned.
    if test.low > 0:
        return f"The mean loss of the second best, {name}, is lower, but a run of it has not learned ({details})."
    if not compared.is_lower:
        return f"{undecided} ({details})."
    margin = f"{-test.estimate:.4f} nats/token"
    # The difference from a diverged seed is infinite, which is no number to print.
    if math.isinf(test.estimate):
        margin = "far"
    return f"The loss is {margin} below that of the second best, {name} ({details})."


def summary_facts(cells: Sequence[Cell], missing: Sequence[str] = ()) -> list[Fact]:
    """Return the facts of the summary; `missing` has the state of each run that is in no cell, such as `damaged`."""
    sizes = rank_by_size(cells)
    obstacle = not_comparable(cells)
    facts: list[Fact] = []
    if not sizes:
        facts.append(Fact(NO_RESULT, strong=NO_RESULT, text=" "))
    elif obstacle:
        facts.append(Fact(obstacle, strong=obstacle, text=" "))
    else:
        with_best: dict[str, Sequence[int]] = {}
        for size, ranked in sizes.items():
            if _has_best(cells, ranked):
                with_best[size] = ranked
        # All sizes together, because their p-values are corrected together.
        margins = compare_with_best(cells, with_best)
        for size, ranked in sizes.items():
            facts += _best_of_size(cells, size, ranked, margins)
    if not obstacle:
        facts += _learning_rates(cells)
    for line in resolved_differences(cells):
        facts.append(Fact(f"{line[0].upper()}{line[1:]}.", "also differs"))
    facts.append(_count_outcomes(cells, missing))
    facts += map(Fact, _selection_note(cells))
    return facts


def _has_best(cells: Sequence[Cell], ranked: Sequence[int]) -> bool:
    """Whether the first of the ranked cells is the best one: they are comparable, and its runs have learned."""
    is_comparable = not reason_cells_not_comparable([cells[index] for index in ranked])
    return is_comparable and not cells[ranked[0]].has_unlearned_run


def _best_of_size(
    cells: Sequence[Cell], size: str, ranked: Sequence[int], margins: Mapping[str, Sequence[Comparison]]
) -> Iterator[Fact]:
    cell = cells[ranked[0]]
    result = f"validation loss {loss_text(cell)}, {lr_text(cell)}"
    no_best = f"No best cell at {size}" if size else "No best cell"
    reason = reason_cells_not_comparable([cells[index] for index in ranked])
    if len(ranked) == 1 and (size or len(cells) == 1):
        text = f"{result}; no other cell to compare with."
        yield Fact(f"{cell.label}: {text}", size, cell.label, text)
    elif reason:
        yield Fact(f"{no_best}: {reason}.", size)
    elif cell.has_unlearned_run:
        yield Fact(f"{no_best}: in every cell with a result, a run diverged or has not learned.", size)
    else:
        name, strong = "Best", cell.label
        if size:
            name, strong = f"Best at {size}", cell.arm
        yield Fact(f"{name}: {strong}: {result}.", name.lower(), strong, f"{result}.")
        if len(ranked) == 1:
            yield Fact("No other cell has a result.")
            return
        margin = margins[size][0]
        badge = "not significant", "no"
        if margin.is_lower:
            badge = "significant", "yes"
        yield Fact(margin_text(cells[ranked[1]], margin), "by how much", badges=[badge])


def _learning_rates(cells: Sequence[Cell]) -> Iterator[Fact]:
    """Yield the sensitivity to the learning rate and the highest one that trains, if several cells have a grid.

    Every cell has the numbers that `normlab summarize --test sensitivity` and `range` print.
    """
    test_of_highest, test_of_s = RateRange(), Sensitivity()
    highest = test_of_highest.of_cells(cells, HIGHEST)
    sensitivities = test_of_s.of_cells(cells, SENSITIVITY)
    # The numbers of a single cell have nothing to be compared with.
    if len(highest) < 2:
        return
    table = [("cell", SENSITIVITY.title, HIGHEST.title)]
    texts: list[str] = []
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
    parts: list[str] = []
    if not math.isinf(test.estimate):
        parts.append(f"paired difference {test.estimate:+.4f}")
    if test.low is not None and test.high is not None and (math.isfinite(test.low) or math.isfinite(test.high)):
        if not parts:
            parts.append(f"{LEVEL:.0%} interval")
        low = f"{test.low:+.4f}" if math.isfinite(test.low) else "no lower bound"
        high = f"{test.high:+.4f}" if math.isfinite(test.high) else "no upper bound"
        parts.append(f"[{low}, {high}]")
    if not parts:
        return ""
    return f"{' '.join(parts)}, "


def _count_outcomes(cells: Sequence[Cell], missing: Sequence[str]) -> Fact:
    """Return the number of runs in each state other than finished, by cell."""
    total = len(missing)
    for cell in cells:
        total += len(cell.runs)
    parts: list[str] = []
    badges: list[tuple[str, str]] = []
    for text, state in BAD_STATES.items():
        number = 0
        names: list[str] = []
        for cell in cells:
            count = cell.count(state)
            number += count
            if count:
                names.append(f"{cell.label} ({count})")
        if not number:
            continue
        parts.append(f"{number} {text}: {name_some(names)}")
        # A run that has not finished is no failure.
        kind = "no" if state == UNFINISHED else "bad"
        badges.append((f"{number} {text}", kind))
    if missing:
        names = [f"{state} ({count})" for state, count in Counter(missing).items()]
        parts.append(f"{len(missing)} in no cell: {name_some(names)}")
        badges.append((f"{len(missing)} in no cell", "no"))
    runs = counted(total, "run")
    if parts:
        sentence = f"Of {runs}, {'. '.join(parts)}."
    elif total == 1:
        sentence = f"{runs} finished."
    else:
        sentence = f"All {runs} finished."
    return Fact(sentence, "outcomes", badges=badges)


def _selection_note(cells: Sequence[Cell]) -> list[str]:
    """Return the note that a loss is optimistic if it was also used for a selection."""
    sizes: list[int] = []
    for ranked in rank_by_size(cells).values():
        if _has_best(cells, ranked):
            sizes.append(len(ranked))
    selected: list[str] = []
    if any(len(cell.losses) > 1 for cell in cells):
        selected.append("each cell's learning rate")
    largest = max(sizes, default=0)
    # The better of two cells is a comparison; the best of more is a selection.
    if largest > 2 and not not_comparable(cells):
        up_to = "up to " if len(set(sizes)) > 1 else ""
        selected.append(f"the best of {up_to}{largest} cells")
    if not selected:
        return []
    if len(selected) == 1:
        return [f"Note: {selected[0]} is selected on this same loss, so its loss is optimistic."]
    return [f"Note: {' and '.join(selected)} are selected on this same loss, so their losses are optimistic."]


def loss_text(cell: Cell) -> str:
    """Return `1.8321 ± 0.0102 nats/token (95% interval, n=3)`, or the number of diverged seeds."""
    final = cell.final
    n = len(final.losses)
    if not n:
        return "no final loss"
    if final.diverged and not final.finite:
        return _diverged_text(cell)
    if final.diverged:
        return f"{_diverged_text(cell)}; mean of the others {final.mean_of_others:.4f} nats/token"
    details = f"n={design_of(final.losses)}"
    if n >= 3:
        details = f"{LEVEL:.0%} interval, {details}"
    if n == 1:
        details += ", no interval"
    return f"{format_losses(final.losses)} nats/token ({details})"


def lr_text(cell: Cell) -> str:
    """Return `at learning rate 0.001, the best of 3`."""
    if cell.best_lr is None:
        return "at learning rate "
    text = f"at learning rate {format_setting(cell.best_lr)}"
    if len(cell.losses) > 1:
        text += f", the best of {len(cell.losses)}"
    return text


def _diverged_text(cell: Cell) -> str:
    return f"{cell.final.diverged} of {counted(len(cell.final.losses), 'seed')} diverged"
