"""What a sink is. The loop tells every sink the same four things; a sink never changes a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from normlab.stats.profiles import Profiles

Row = Mapping[str, Any]
"""One line of the record: `kind` (train, eval, pace), `step`, and plain numbers by name."""


class Sink(Protocol):
    """Receives a run's beginning, its rows in order, what was seen inside its steps, and its end."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """A run begins. `run` is the content of run.json; `first_step` is 0, or the step it goes on from."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Rows, oldest first."""
        ...

    def look(self, profiles: Profiles) -> None:
        """What was seen inside a measured step, after the interval's rows."""
        ...

    def finish(self, status: Mapping[str, Any]) -> None:
        """The run ends, with the content of status.json; `spikes` besides: by rule, how many of how many steps."""
        ...
