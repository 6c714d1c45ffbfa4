"""The interface of a tracker, which receives a run's numbers and never changes the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from normlab.stats.profiles import Profiles
from normlab.store.status import Status

Row = Mapping[str, Any]
"""A row of the metrics: `kind` (train, eval or pace), `step`, and numbers by name."""


class Tracker(Protocol):
    """Receives the start of a run, its rows and statistics in order, and its end."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Start tracking.

        Args:
            run: The content of run.json.
            first_step: 0, or the step from which the run resumes.
        """
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows, oldest first."""
        ...

    def log_statistics(self, profiles: Profiles) -> None:
        """Log the statistics of a measured step, before the rows of its interval."""
        ...

    def finish(self, status: Status) -> None:
        """Finish, with the run's last status."""
        ...
