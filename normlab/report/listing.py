"""List the runs of a folder, newest first, for `normlab list runs`."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from normlab.report.summary import read_rows
from normlab.store.schema import number

COLUMNS = ("run", "id", "state", "norm", "placement", "depth", "steps", "val_loss", "created")
"""Keys of a row, in order; as in the summary."""


def list_runs(path: str | os.PathLike[str], results_dir: str = "results") -> list[dict[str, Any]]:
    """Return a row of `COLUMNS` for each run of a folder, or of a sweep or run by its name in `results_dir`.

    Raises:
        StoreError: There is no run.
    """
    rows = sorted(read_rows(path, (), results_dir), key=lambda row: _unix_time(row["created"]), reverse=True)
    return [{key: row[key] for key in COLUMNS} for row in rows]


def _unix_time(created: Any) -> float:
    try:
        return number(created) or datetime.fromisoformat(created).timestamp()
    except (TypeError, ValueError):
        return 0.0
