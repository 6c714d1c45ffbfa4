"""What a comparison found, in sentences: which cell is best, how surely, and what did not come out.

Never a mean that hides a diverged run: cells are ranked by `badness`, and a seed that diverged is told of wherever a
number stands beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from normlab.report.against import paired_differences
from normlab.report.compare.comparable import incomparable
from normlab.report.groups import Cell
from normlab.report.intervals import LEVEL, Design, PairedTest, Replicate, format_mean, mean_interval, paired_test
from normlab.report.learning_rates import badness
from normlab.report.outcomes import UNFINISHED, RunResult
from normlab.report.settings import format_setting
from normlab.store.outcome import REGRESSED, STUCK
from normlab.store.schema import DAMAGED, DIVERGED, FAILED

ALL_DIVERGED = "every run that has come out diverged"


def ranked(cells: Sequence[Cell]) -> list[int]:
    """Cells with a result, best first, each at its own best learning rate; equals in the order in which they stand.

    By the share of seeds that diverged, then by the mean final validation loss of the others.
    """
    known = {index: badness(_own(cell).values()) for index, cell in enumerate(cells) if cell.losses}
    return sorted(known, key=lambda index: (known[index], index))


def best(cells: Sequence[Cell]) -> int | None:
    """The index of the cell that may be called the best of several; None where none may."""
    order = ranked(cells)
    if len(cells) < 2 or not order or not _mean_of_finite(cells[order[0]]) or incomparable(_came_out(cells)):
        return None
    return order[0]


def answer(cells: Sequence[Cell], absent: Sequence[str] = (), by: Sequence[str] = ()) -> list[str]:
    """The sentences.

    Args:
        cells: The runs.
        absent: What became of each run that is in no cell, a word or two each: `damaged`, `not started`.
        by: The words that cells are made of; without them a cell is called by its values alone, whatever they are.
    """
    order = ranked(cells)
    first = best(cells)
    said: list[str] = []
    if not order:
        said.append("No run has come out: there is no loss to compare.")
    elif first is not None:
        said += [_best(cells[first], by), _next(cells, order, by)]
    else:
        said.append(_no_best(cells, order, by))
    said.append(_rest(cells, absent, by))
    return [*said, *_selected(cells, first)]


def _called(cell: Cell, by: Sequence[str]) -> str:
    """A cell's name; by word and value (`model.depth=200`) where its values are but numbers or nothing."""
    if (
        any(isinstance(value, bool | str) and any(map(str.isalpha, format_setting(value))) for value in cell.key)
        or not by
    ):
        return cell.name
    return " ".join(f"{word}={format_setting(value)}" for word, value in zip(by, cell.key, strict=True))


def _best(cell: Cell, by: Sequence[str]) -> str:
    what = "is best, though seeds of every cell diverged" if _lost(cell) else "has the lowest final validation loss"
    return f"{_called(cell, by)} {what}: {_loss(cell)}, {_rate(cell)}."


def _next(cells: Sequence[Cell], order: Sequence[int], by: Sequence[str]) -> str:
    """How the best stands against the next one, paired by seed and data order."""
    if len(order) < 2:
        return f"No other of the {len(cells)} cells has a result."
    one, other = cells[order[0]], cells[order[1]]
    name = _called(other, by)
    differences, both, _ = paired_differences(one, one.best_lr, other, other.best_lr)
    apart = f"Not told apart from the next, {name}"
    if not differences:
        return f"{apart}: they have no seed in common ({_loss(other)})."
    found = paired_test(differences, both_diverged=both)
    told = f"{_difference(found)}n = {_seeds(found.design)}"
    if found.low is None or found.high is None:
        if math.isinf(found.estimate) or (_lost(other) and not _lost(one)):
            few = "1 pair is" if found.design.n == 1 else f"{found.design.n} pairs are"
            return f"The next, {name}, has {_share(other)} that diverged; n = {few} too few for an interval."
        why = "too few for an interval" if found.test != "one pair" else "no interval"
        return f"{apart}: {told}, {why}{_diverged(other)}."
    test = "" if found.test == "paired t" else f", by {found.test}"
    told = f"{told}{test}{_diverged(other)}"
    if found.high < 0:
        return f"{_size(found.estimate)} below the next, {name} ({told})."
    return f"{apart}: the {LEVEL:.0%} interval of their difference does not lie below 0 ({told})."


def _difference(found: PairedTest) -> str:
    """`paired difference -0.1000 [-0.2000, -0.0100], `; a diverged run is worse by no number, and none is said."""
    estimate = "" if math.isinf(found.estimate) else f"paired difference {_signed(found.estimate)}"
    interval = ""
    if found.low is not None and found.high is not None and (math.isfinite(found.low) or math.isfinite(found.high)):
        low = _signed(found.low) if math.isfinite(found.low) else "no lower bound"
        high = _signed(found.high) if math.isfinite(found.high) else "no upper bound"
        interval = f"{'' if estimate else f'{LEVEL:.0%} interval '}[{low}, {high}]"
    told = " ".join(filter(None, [estimate, interval]))
    return f"{told}, " if told else ""


def _no_best(cells: Sequence[Cell], order: Sequence[int], by: Sequence[str]) -> str:
    cell = cells[order[0]]
    if why := incomparable(_came_out(cells)):
        return f"No cell is called the best: {why}."
    if not _mean_of_finite(cell):
        return f"No cell is called the best: {ALL_DIVERGED}."
    what = "" if _lost(cell) else "final validation loss "
    return f"{_called(cell, by)}: {what}{_loss(cell)}, {_rate(cell)}; there is no other cell to compare it with."


def _rest(cells: Sequence[Cell], absent: Sequence[str], by: Sequence[str]) -> str:
    """What diverged, failed, is stuck, regressed or has not ended, in numbers with names."""
    total = sum(len(cell.runs) for cell in cells) + len(absent)
    named = [(_called(cell, by), cell) for cell in cells]
    counts = {
        "diverged": {name: cell.count(DIVERGED) for name, cell in named},
        "failed": {name: cell.count(FAILED) for name, cell in named},
        "are stuck at the unigram entropy": {name: cell.count(STUCK) for name, cell in named},
        "regressed": {name: cell.count(REGRESSED) for name, cell in named},
        "are damaged": {name: cell.count(DAMAGED) for name, cell in named},
        "have not ended": {name: cell.count(UNFINISHED) for name, cell in named},
        "are in no cell": Counter(absent),
    }
    parts = []
    for what, by_name in counts.items():
        if number := sum(by_name.values()):
            names = ", ".join(f"{name} ({count})" for name, count in by_name.items() if count)
            verb = what.replace("have ", "has ").replace("are ", "is ") if number == 1 else what
            parts.append(f"{number} {verb}: {names}")
    if not parts:
        return "The one run came to its end." if total == 1 else f"All {total} runs came to their end."
    first, *others = parts
    number, _, rest = first.partition(" ")
    return f"{'; '.join([f'{number} of {_runs(total)} {rest}', *others])}."


def _selected(cells: Sequence[Cell], first: int | None) -> list[str]:
    """That what is shown as best was chosen for it."""
    rates = [len(cell.losses) for cell in cells if cell.losses]
    chosen = ["each cell's learning rate"] if max(rates, default=0) > 1 else []
    if first is not None and len(rates) > 2:
        chosen.append(f"the best of {len(rates)} cells")
    if not chosen:
        return []
    verb = "was" if len(chosen) == 1 else "were"
    what = " and ".join(chosen)
    return [f"{what[0].upper()}{what[1:]} {verb} chosen by the very loss that is shown, which flatters it."]


def _own(cell: Cell) -> Mapping[Replicate, float]:
    """The losses at a cell's own best learning rate, by replicate."""
    return {} if cell.best_lr is None else cell.losses[cell.best_lr]


def _mean_of_finite(cell: Cell) -> bool:
    """Whether a seed of it did not diverge."""
    return any(map(math.isfinite, _own(cell).values()))


def _came_out(cells: Sequence[Cell]) -> list[RunResult]:
    return [run for cell in cells for run in cell.runs if run.has_loss]


def _loss(cell: Cell) -> str:
    """`1.8321 ± 0.0102 nats a token (95 % interval over n = 3 seeds)`; of diverged runs how many they are."""
    values = _own(cell)
    if _lost(cell):
        others = {one: value for one, value in values.items() if math.isfinite(value)}
        whose = "the other's" if len(others) == 1 else "the others'"
        rest = f"; {whose} final validation loss is {mean_interval(others).estimate:.4f} nats a token" if others else ""
        return f"{_share(cell)} diverged{rest}"
    mean, _, high, design = mean_interval(values)
    if high is None:
        return f"{format_mean(mean, None)} nats a token (n = {_seeds(design)}, so without an interval)"
    return f"{format_mean(mean, high)} nats a token ({LEVEL:.0%} interval over n = {_seeds(design)})"


def _rate(cell: Cell) -> str:
    tried = len(cell.losses)
    rate = "" if cell.best_lr is None else f"{cell.best_lr:g}"
    return f"at its own best learning rate {rate} (of {tried} tried)" if tried > 1 else f"at learning rate {rate}"


def _diverged(cell: Cell) -> str:
    """That seeds of the other diverged, where they did."""
    return f"; {_share(cell)} of it diverged" if _lost(cell) else ""


def _lost(cell: Cell) -> int:
    """How many seeds diverged."""
    return sum(not math.isfinite(loss) for loss in _own(cell).values())


def _share(cell: Cell) -> str:
    """`1 of 3 seeds`: those that diverged."""
    return f"{_lost(cell)} of {_seeds(len(_own(cell)))}"


def _size(estimate: float) -> str:
    return "Far" if math.isinf(estimate) else f"{-estimate:.4f}"


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def _seeds(n: int | Design) -> str:
    """`1 seed`, `3 seeds`; `6x6 seeds` where two factors are crossed."""
    return f"{n} seed" if str(n) == "1" else f"{n} seeds"


def _runs(n: int) -> str:
    return f"{n} run" if n == 1 else f"{n} runs"
