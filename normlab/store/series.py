"""A record's series: every step's loss, gradient norm and clip factor.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import StoreError
from normlab.store.runs import RunFolder
from normlab.store.schema import DIVERGED, FINISHED, number

NAMES = ("step", "loss", "grad_norm", "clip")


def series(folder: RunFolder) -> dict[str, NDArray[np.float64]]:
    """Each of `NAMES` of every step of a run, (S,), oldest first; NaN for what is no number.

    Raises:
        StoreError: The run has taken no step yet, or its rows are gone, or its record cannot be read.
    """
    trained = folder.rows("train").rows
    if not trained:
        status = folder.status()
        if status.get("step") or status["state"] in (FINISHED, DIVERGED):
            raise StoreError(f"{folder.metrics_path}: the steps of run {folder.run_id} are gone; put back a copy")
        raise StoreError(f"run {folder.run_id} has taken no step yet; try again when it has")
    return series_of(trained)


def series_of(trained: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Each of `NAMES` of some rows of training, (S,), as they stand; NaN for what is no number."""
    return {name: np.array([number(row.get(name)) for row in trained], dtype=np.float64) for name in NAMES}
