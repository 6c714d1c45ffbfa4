"""The interface of a tracker. A tracker receives a run's numbers and never changes the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from normlab.stats.profiles import Profiles
from normlab.store.status import Status

Row = Mapping[str, Any]
"""One line of the record: `kind` (train, eval, pace), `step`, and plain numbers by name."""


class Tracker(Protocol):
    """Receives the start of a run, its rows and statistics in order, and its end."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Start: `run` is the content of run.json; `first_step` is 0, or the step that the run resumes from."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows, oldest first."""
        ...

    def log_statistics(self, profiles: Profiles) -> None:
        """Log the statistics of a measured step, after the interval's rows."""
        ...

    def finish(self, status: Status) -> None:
        """Finish, with the run's last status."""
        ...
