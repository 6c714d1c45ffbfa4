"""Progress display of a sweep, on stderr: one live table on a terminal, a line per event elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from normlab.store.plans import FAILURES, FINISHED, Job, Pack, PackOutcome, Plan
from normlab.sweep.pack_progress import PackProgress, pack_progress
from normlab.tracking.console import SafeStream, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REFRESH_S = 0.5
"""Shortest time between two drawings of the table."""
PLAIN_EVERY_S = 60.0
"""Time between two progress lines without a terminal."""
MOST_LINES = 30
"""With more packs, only those are shown that run, failed, diverged, regressed or are stuck."""
WAITING, RUNNING, STOPPED = "waiting", "running", "stopped"


@dataclass(slots=True)
class _PackState:
    """What is shown of one pack."""

    pack: Pack
    jobs: list[Job]
    state: str
    """waiting, running, stopped, finished, or one of `FAILURES`."""
    progress: PackProgress
    started: float = 0.0
    """When the pack started, in seconds of `time.monotonic`."""
    fraction_at_start: float | None = None

    @property
    def gained(self) -> float:
        """Fraction of the work done since the pack started."""
        return 0.0 if self.fraction_at_start is None else self.progress.fraction - self.fraction_at_start

    @property
    def unusual(self) -> dict[str, int]:
        """Number of runs by outcome, without finished ones."""
        return {outcome: count for outcome, count in self.progress.outcomes.items() if outcome != FINISHED}

    @property
    def label(self) -> str:
        more = f" and {len(self.jobs) - 1} more" if len(self.jobs) > 1 else ""
        return (" ".join(self.jobs[0].overrides) or self.jobs[0].run_id) + more

    @property
    def status(self) -> str:
        """State, step and validation loss as text."""
        parts = [FAILURES.get(self.state, self.state)]
        if len(self.jobs) == 1:
            parts = list(self.unusual) or parts
        else:
            parts += [f"{count} of {len(self.jobs)} {outcome}" for outcome, count in self.unusual.items()]
        if self.state not in (WAITING, FINISHED):
            parts.append(f"step {self.progress.step:.0f}/{self.progress.steps}")
        if self.state == FINISHED and self.progress.loss is not None:
            parts.append(f"val {self.progress.loss:.4f}")
        return "  ".join(parts)

    @property
    def time_left(self) -> str:
        """Estimated time left of a running pack; empty where unknown."""
        if self.state != RUNNING or self.gained <= 0:
            return ""
        elapsed = time.monotonic() - self.started
        return format_duration((1 - self.progress.fraction) * elapsed / self.gained)


class ProgressDisplay:
    """Shows the progress of a sweep from the folders of its runs; implements `supervisor.Monitor`.

    Args:
        folder: The sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: Plan | None = None
        self._packs: dict[int, _PackState] = {}
        self._completed_before = 0
        self._started = self._drawn_at = time.monotonic()
        self._live: Live | None = None
        self._stream = SafeStream(sys.stderr)

    def start(self, plan: Plan, packs: Sequence[Pack], completed: int, failed: Sequence[PackOutcome]) -> None:
        """Show the packs to train; on a terminal, start the table."""
        self._plan, self._completed_before = plan, completed
        causes = {outcome.pack: outcome.cause for outcome in failed}
        for pack in plan.packs:
            if pack in packs or pack.number in causes:
                self._add(pack, causes.get(pack.number, WAITING))
        if packs and self._stream.is_terminal():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(self._table(), console=Console(file=cast("TextIO", self._stream)), auto_refresh=False)
            self._live.start()
        elif packs:
            self.print(self._summary())

    def pack_started(self, pack: Pack) -> None:
        """Mark a pack as running."""
        shown = self._packs[pack.number]
        self._update(shown)
        shown.state, shown.started, shown.fraction_at_start = RUNNING, time.monotonic(), shown.progress.fraction

    def pack_ended(self, pack: Pack, outcome: PackOutcome, halves: Sequence[Pack]) -> None:
        """Show the outcome of a pack; without a terminal, print a line."""
        shown = self._packs[pack.number]
        shown.state = outcome.cause if outcome.cause in (FINISHED, *FAILURES) else STOPPED
        self._update(shown)
        if halves:
            del self._packs[pack.number]
            for half in halves:
                self._add(half, WAITING)
        if self._live is None or halves:
            detail = f": {outcome.detail}" if outcome.detail else ""
            split = f"; split into packs {' and '.join(str(half.number) for half in halves)}" if halves else ""
            self.print(f"pack {pack.number} {shown.label}: {shown.status}{detail}{split}")

    def refresh(self) -> None:
        """Draw the table, or print a progress line, if it is time to."""
        now = time.monotonic()
        if now - self._drawn_at < (PLAIN_EVERY_S if self._live is None else REFRESH_S):
            return
        self._drawn_at = now
        running = [shown for shown in self._packs.values() if shown.state == RUNNING]
        for shown in running:
            self._update(shown)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            self.print("; ".join([self._summary(), *(f"{shown.label} {shown.status}" for shown in running)]))

    def print(self, line: str) -> None:
        """Print a line; above the table, if there is one."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._stream.write(f"normlab: {line}\n")
            self._stream.flush()

    def finish(self) -> None:
        """Draw the last state and stop the table."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def _add(self, pack: Pack, state: str) -> None:
        assert self._plan is not None
        jobs = self._plan.jobs_of(pack)
        self._packs[pack.number] = _PackState(pack, jobs, state, pack_progress(self._folder, jobs))

    def _update(self, shown: _PackState) -> None:
        shown.progress = pack_progress(self._folder, shown.jobs)

    def _table(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), caption=Text(self._summary()), caption_justify="left")
        for heading in ("pack", "runs", "", "progress", "left"):
            table.add_column(heading, no_wrap=heading != "runs")
        for number, shown in self._packs.items():
            is_quiet = shown.state in (WAITING, FINISHED, STOPPED) and not shown.unusual
            if len(self._packs) > MOST_LINES and is_quiet:
                continue
            bar = ProgressBar(total=1.0, completed=shown.progress.fraction, width=20)
            table.add_row(str(number), Text(shown.label), bar, Text(shown.status), shown.time_left)
        return table

    def _summary(self) -> str:
        """Return the number of packs by state, of unusual outcomes, and the time left."""
        packs = self._packs.values()
        states = Counter("failed" if shown.state in FAILURES else shown.state for shown in packs)
        states["completed"] = states.pop(FINISHED, 0) + self._completed_before
        order = ("completed", RUNNING, "failed", STOPPED, WAITING)
        parts = [f"{states[state]} {state}" for state in order if states[state]]
        outcomes = sum((Counter(shown.unusual) for shown in packs), Counter[str]())
        parts += [f"{count} {'run' if count == 1 else 'runs'} {outcome}" for outcome, count in outcomes.items()]
        number = self._completed_before + len(self._packs)
        return f"{number} {'pack' if number == 1 else 'packs'}: " + ", ".join(parts) + self._time_left()

    def _time_left(self) -> str:
        """Return the estimated time left of all packs, at the pace since the start; empty where unknown."""
        packs = self._packs.values()
        gained = sum(shown.gained * shown.progress.cost for shown in packs)
        unfinished = [shown.progress for shown in packs if shown.state in (WAITING, RUNNING)]
        left = sum((1 - progress.fraction) * progress.cost for progress in unfinished)
        if not gained or not left:
            return ""
        return f"; left {format_duration(left * (time.monotonic() - self._started) / gained)}"
