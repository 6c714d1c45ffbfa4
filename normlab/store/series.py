"""Loss, gradient norm and clip factor of every step of a run, as arrays.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.store.runs import RunFolder
from normlab.store.schema import COMPLETED_STATES, number

NAMES = ("step", "loss", "grad_norm", "clip")


def series(folder: RunFolder) -> dict[str, NDArray[np.float64]]:
    """Return each of `NAMES` for every step of a run, (S,), oldest first; NaN where a value is no number.

    Raises:
        StoreError: The run has taken no step yet, its rows are gone, or its record cannot be read.
    """
    rows = folder.rows("train").rows
    if not rows:
        status = folder.status()
        if status.get("step") or status["state"] in COMPLETED_STATES:
            raise StoreError(f"{folder.metrics_path}: the steps of run {folder.run_id} are gone; put back a copy")
        raise StoreError(f"run {folder.run_id} has taken no step yet; try again when it has")
    return series_of(rows)


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Return each of `NAMES` for some training rows, (S,), in their order; NaN where a value is no number."""
    return {name: np.array([number(row.get(name)) for row in rows], dtype=np.float64) for name in NAMES}
