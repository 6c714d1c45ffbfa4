"""The loss over the learning rate, cell by cell, and the cells by norm, placement and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.report.by import build_report
from normlab.report.cell_row import losses_at
from normlab.report.compare.comparable import FIRST
from normlab.report.groups import Cell
from normlab.report.learning_rates import EDGE, USABLE
from normlab.report.outcomes import RunResult
from normlab.report.settings import format_setting

Row = dict[str, Any]
Indices = Mapping[Path, int]
"""Where a run is among the page's, by its folder."""


def rates(cells: Sequence[Cell], index: Indices) -> Row:
    """Of each cell, at every learning rate that was tried, the mean over its seeds and the runs.

    A mean with a diverged run is infinite, and that of the others stands beside it, as in a cell's row.
    """
    curves = [
        {"cell": number, "points": [_point(cell, lr, index) for lr in cell.losses]} for number, cell in enumerate(cells)
    ]
    return {"edge": EDGE, "usable": USABLE, "curves": curves}


def _point(cell: Cell, lr: float, index: Indices) -> Row:
    row = losses_at(cell, lr, "")
    return {
        "lr": lr,
        "mean": row["val_loss"],
        "low": row["val_loss_low"],
        "high": row["val_loss_high"],
        "of_others": row["val_loss_of_others"],
        "n": row["seeds"],
        "crossed": row["seeds_crossed"],
        "diverged": row["seeds_diverged"],
        "losses": [{"run": index[run.entry.folder.path], "loss": run.loss} for run in cell.runs_at(lr)],
    }


def matrix(outcomes: Sequence[RunResult], index: Indices) -> Row:
    """Every norm in every placement at every depth: the same rows, by these three words."""
    if not outcomes:
        return {"norms": [], "placements": [], "depths": [], "cells": []}
    report = build_report(outcomes, FIRST)
    cells = [
        {
            **row,
            **dict(zip(("norm", "placement"), map(format_setting, cell.key), strict=False)),
            "depth": cell.key[2],
            "runs": [index[run.entry.folder.path] for run in cell.runs],
        }
        for row, cell in zip(report.rows, report.cells, strict=True)
    ]
    return {
        **{f"{word}s": list(dict.fromkeys(cell[word] for cell in cells)) for word in ("norm", "placement", "depth")},
        "cells": cells,
    }
