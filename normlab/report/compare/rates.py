"""Final loss by learning rate, and by norm, placement and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.report.by import BEST, build_report, losses_at
from normlab.report.by_text import loss_text
from normlab.report.cells import Cell, RunResult
from normlab.report.compare.comparable import MAIN_OPTIONS
from normlab.report.settings import format_setting

Row = dict[str, Any]
RunIndex = Mapping[Path, int]
"""The page's index of a run, by its folder."""
LOSS_KEYS = (
    "lr", "val_loss", "val_loss_low", "val_loss_high", "seeds", "seeds_diverged", "val_loss_of_others",
)  # fmt: skip


def learning_rate_points(cells: Sequence[Cell], index: RunIndex) -> list[list[Row]]:
    """Return, for each cell and each of its learning rates, the loss over the seeds and the loss of each run.

    A mean with a diverged run is infinite; the mean of the others is in `val_loss_of_others`.
    """
    return [[_point(cell, lr, index) for lr in cell.losses] for cell in cells]


def _point(cell: Cell, lr: float, index: RunIndex) -> Row:
    row = losses_at(cell, lr, BEST)
    return {
        **{key: row[key] for key in LOSS_KEYS},
        "text": loss_text(cell.losses[lr]),
        "runs": [{"run": index[run.record.folder.path], "loss": run.loss} for run in cell.runs_at(lr)],
    }


def matrix(outcomes: Sequence[RunResult], index: RunIndex) -> Row:
    """Return the rows of `summarize --by norm,placement,model.depth`, with their axes."""
    if not outcomes:
        return {"norms": [], "placements": [], "depths": [], "cells": []}
    report = build_report(outcomes, MAIN_OPTIONS)
    cells = [
        {
            **row,
            "norm": format_setting(cell.key[0]),
            "placement": format_setting(cell.key[1]),
            "depth": cell.key[2],
            "text": loss_text(cell.best_losses),
            "runs": [index[run.record.folder.path] for run in cell.runs],
        }
        for row, cell in zip(report.rows, report.cells, strict=True)
    ]
    axes = {f"{axis}s": list(dict.fromkeys(cell[axis] for cell in cells)) for axis in ("norm", "placement", "depth")}
    return {**axes, "cells": cells}
