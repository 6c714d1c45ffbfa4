"""`normlab summarize --by norm,placement`: a row for each cell, with everything that is known of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normlab.errors import ConfigError, StoreError
from normlab.report import against, cell_row
from normlab.report.compare.find import find_started
from normlab.report.groups import Cell, between, cells, damaged_lines
from normlab.report.learning_rates import shared_lr
from normlab.report.outcomes import Outcome, outcome
from normlab.report.settings import LR, check_words
from normlab.report.where import chosen, parse
from normlab.store.query import Entry
from normlab.store.reading import HOW_TO_FIX
from normlab.store.schema import RUN_FILE

Row = dict[str, Any]
NO_LR = f"its {RUN_FILE} names no learning rate; {HOW_TO_FIX[RUN_FILE]}"
OWN, SHARED = "", "shared_"
"""What the keys of a cell's numbers begin with: at its own best learning rate, and at that of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is asked for beside the words."""

    where: Sequence[str] = ()
    """Conditions that the runs must meet."""
    against: str | None = None
    """The baseline: `norm=layernorm`."""
    lr: float | None = None
    """The shared learning rate; the best by mean rank unless given."""
    target: float | None = None
    """A validation loss: how soon it is reached is read from the metrics."""
    spikes: bool = False
    """Whether spikes are counted from the metrics where a run's status does not say how many there were."""


@dataclass(frozen=True, slots=True)
class Report:
    """What cells have to say."""

    by: Sequence[str]
    rows: Sequence[Row]
    """One a cell, all with the same keys: the words, then the cell's numbers and its warnings."""
    of_all: Sequence[str]
    """Warnings of the table as a whole."""
    cells: Sequence[Cell]
    """The runs that each row is of, in the order of the rows."""

    @property
    def warnings(self) -> list[str]:
        """Every warning; what is said of several cells is said once."""
        named: dict[str, list[str]] = {}
        for row in self.rows:
            for warning in row["warnings"]:
                named.setdefault(warning, []).append(row["cell"])
        many = {
            said: "every cell" if 1 < len(names) == len(self.rows) else ", ".join(names)
            for said, names in named.items()
        }
        return [*self.of_all, *(f"{names}: {said}" for said, names in many.items())]


def summarize_by(
    path: str | os.PathLike[str],
    by: Sequence[str],
    options: Options | None = None,
    results_dir: str | os.PathLike[str] = "results",
) -> Report:
    """The cells of a results folder, a `runs` folder, a run, or a sweep. Reads the store only.

    Raises:
        ConfigError: A word is none of the runs', or a condition is none.
        StoreError: There is no run there, or none that can be read.
    """
    check_by(by)
    entries, missing = find_started(path, results_dir)
    outcomes, warnings = outcomes_of(entries, missing)
    if not outcomes:
        raise StoreError(f"{os.fspath(path)}: no run there says what it was; `normlab summarize` tells why")
    check_words(by, [one.entry.run for one in outcomes], "--by")
    return report_of(outcomes, by, options, warnings)


def check_by(by: Sequence[str]) -> None:
    """Refuse words that make no cells.

    Raises:
        ConfigError: There is none, or one stands there twice.
    """
    if not all(by) or not by or len(set(by)) < len(by):
        raise ConfigError(f"--by {','.join(by)}: name one word or more, each once, as norm,placement")


def report_of(
    outcomes: Sequence[Outcome], by: Sequence[str], options: Options | None = None, said: Sequence[str] = ()
) -> Report:
    """The cells of runs that say what they were.

    Args:
        outcomes: The runs.
        by: The words that cells are made of.
        options: What is asked for beside them.
        said: Warnings that there are already.

    Raises:
        ConfigError: A condition, a baseline or a learning rate is none.
    """
    options, warnings = options or Options(), list(said)
    kept = chosen([one.entry.run for one in outcomes], parse(options.where, "--where"))
    found = cells([one for one, keep in zip(outcomes, kept, strict=True) if keep], by)
    if different := between(found, by):
        warnings.append(f"the cells differ in more than {', '.join(by)}: {'; '.join(different)}")
    if LR not in by and len({tuple(cell.losses) for cell in found if cell.losses}) > 1:
        warnings.append("the cells were not given the same learning rates: their best, and their S, do not compare")
    shared = options.lr if options.lr is not None else shared_lr([cell.ranking for cell in found if cell.losses])
    if options.lr is not None and not any(options.lr in cell.losses for cell in found):
        tried = sorted({lr for cell in found for lr in cell.losses})
        raise ConfigError(f"--lr {options.lr:g}: no run has it; choose one of {', '.join(f'{lr:g}' for lr in tried)}")
    rows = [_row(cell, by, shared, options) for cell in found]
    if options.against is not None:
        _compare(rows, found, by, shared, options.against)
    return Report(by, rows, warnings, found)


def outcomes_of(entries: Sequence[Entry], missing: int = 0) -> tuple[list[Outcome], list[str]]:
    """The runs that say what they were, and what is to be said of the others.

    Args:
        entries: The runs as they were found.
        missing: How many more a sweep has planned, which have not started.
    """
    said = [f"{missing} of the sweep's {missing + len(entries)} runs have not started"] if missing else []
    every = [(entry, outcome(entry)) for entry in entries]
    unread = [(entry.folder.run_id, entry.problem or NO_LR) for entry, one in every if one is None]
    return [one for _, one in every if one is not None], said + damaged_lines(unread)


def _row(cell: Cell, by: Sequence[str], shared: float | None, options: Options) -> Row:
    k, warnings = len(cell.losses), cell.warnings()
    selected = f"lowest mean final validation loss of {k} learning rates, on that same loss" if k > 1 else None
    return {
        **dict(zip(by, cell.key, strict=True)),
        "cell": cell.name,
        **cell_row.counts(cell),
        **cell_row.losses_at(cell, cell.best_lr, OWN),
        "selected": selected,
        **cell_row.losses_at(cell, shared, SHARED),
        **cell_row.sensitivity_of(cell),
        **cell_row.costs(cell),
        **(cell_row.to_target(cell, options.target, warnings) if options.target is not None else {}),
        **cell_row.spikes(cell, count_again=options.spikes),
        "corpora": cell_row.values(cell.outcomes, "corpus"),
        "devices": cell_row.values(cell.outcomes, "device"),
        "precisions": cell_row.values(cell.outcomes, "precision"),
        "run_ids": [run.run_id for run in cell.outcomes],
        "warnings": warnings,
    }


def _compare(rows: Sequence[Row], found: Sequence[Cell], by: Sequence[str], shared: float | None, text: str) -> None:
    """Add to each row how its cell compares with its baseline, at their own learning rates and at the shared one."""
    bases = against.baselines(found, by, text)
    names = {cell.name for cell in bases if cell is not None}
    for prefix, lr in ((OWN, lambda cell: cell.best_lr), (SHARED, lambda cell: shared)):
        for row, cell, one in zip(rows, found, against.compare(found, bases, lr), strict=True):
            test = one.found if one else None
            row |= {
                f"{prefix}baseline": one and one.baseline.name,
                f"{prefix}difference": test and test.estimate,
                f"{prefix}difference_low": test and test.low,
                f"{prefix}difference_high": test and test.high,
                f"{prefix}p": test and test.p,
                f"{prefix}p_holm": one and one.p_holm,
                f"{prefix}pairs": test.design.n if test else 0,
                f"{prefix}pairs_crossed": test and cell_row.crossing(test.design),
                f"{prefix}test": test and test.test,
            }
            if one and one.unpaired and prefix == OWN:
                row["warnings"].append(f"of {one.unpaired} seeds there is a result on one side of its comparison only")
            if one and prefix == OWN and (different := against.confounds(cell, one.baseline, by)):
                row["warnings"].append(f"it and its baseline differ in {'; '.join(different)}")
            if not one and prefix == OWN and cell.name not in names:
                row["warnings"].append(f"there is no baseline for it ({text})")
